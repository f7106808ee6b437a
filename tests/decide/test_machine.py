"""State machines: whatever happens in whatever order, the books agree and the tokens are right."""

from __future__ import annotations

from typing import Any

from bad_policies import KINDS, BadEviction
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from rig import VOCABULARY, Rig, Words, kv_class, prompt_of, quantized

from kimicore.errors import Overloaded, RequestFailed, RequestTimeout
from kimicore.sampling_params import SamplingParams
from kimicore.types import BoundRow, BoundStep

BLOCK = 4
ONE = (kv_class("full", block_tokens=BLOCK),)
TWO = (kv_class("window", 5, window=7, block_tokens=BLOCK), kv_class("full", 1, block_tokens=BLOCK))
SAME = (kv_class("full", 2, block_tokens=BLOCK), kv_class("window", 3, window=9, block_tokens=BLOCK))
OUTCOMES = ["done", "done", "done", "failed", "half", "lost"]
MIXED = (*TWO[1:], *quantized(*TWO[1:]), *quantized(*TWO[1:], precision="int4"))
LAYOUTS = {"one": ONE, "two": TWO, "same": SAME, "window": (kv_class("only", 1, window=6, block_tokens=BLOCK),)}
LAYOUTS |= {"mixed": MIXED, "mixed windows": (*SAME, *quantized(*SAME))}


class BookMachine(RuleBasedStateMachine):
    """Requests of every sort, cancels and deadlines at every moment, failing rows, bad policies, tiny arenas."""

    rig: Rig
    bound: BoundStep | None

    @initialize(
        layout=st.sampled_from(sorted(LAYOUTS)),
        slabs=st.integers(4, 14),
        batching=st.sampled_from(["fcfs", "priority"]),
        padding=st.sampled_from(["packed", "max-len"]),
        how=st.sampled_from(KINDS),
        size=st.integers(1, 5),
        tokens=st.integers(5, 24),
        least=st.integers(1, 3),
        below=st.fixed_dictionaries(
            {
                "host_slabs": st.sampled_from([0, 3, 6, 40]),
                "staging": st.booleans(),
                "admission": st.integers(1, 2),
                "disk_bytes": st.sampled_from([0, 64, 640, 1 << 20]),
            }
        ),
    )
    def open(
        self,
        layout: str,
        slabs: int,
        batching: str,
        padding: str,
        how: str,
        size: int,
        tokens: int,
        least: int,
        below: dict[str, Any],
    ) -> None:
        self.bound = None
        self.gone: set[int] = set()
        self.doomed: set[int] = set()
        classes = LAYOUTS[layout]
        self.precisions = sorted({one.precision for one in classes})
        self.rig = Rig(
            max(slabs, 2 + len(classes)),
            classes=classes,
            block_tokens=BLOCK,
            batching=batching,
            padding=padding,
            eviction=BadEviction(how),
            max_waiting=12,
            fault=self.fault,
            max_batch_size=size,
            max_batch_tokens=tokens,
            min_batch_size=min(least, size),
            disk={} if below["disk_bytes"] else None,
            **below | {"staging": below["staging"] and bool(below["disk_bytes"])},
        )
        self.longest = min(60, *self.rig.book.capacities.values())

    def fault(self, row: BoundRow) -> BaseException | None:
        return RequestFailed("planted") if row.plan.request in self.doomed else None

    @rule(
        base=st.integers(0, 2),
        length=st.integers(1, 40),
        more=st.integers(0, 20),
        tail=st.integers(0, 3),
        tenant=st.sampled_from(["", "a"]),
        priority=st.integers(0, 2),
        use_cache=st.booleans(),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        scored=st.booleans(),
        timeout_s=st.sampled_from([None, None, 0.03, 0.3]),
        doomed=st.sampled_from([False] * 9 + [True]),
        ends=st.lists(st.integers(0, VOCABULARY - 1), max_size=3),
        least=st.integers(0, 4),
        stop=st.integers(0, VOCABULARY - 1),
        precision=st.integers(0, 2),
        share=st.sampled_from([None, None, 0.5]),
    )
    def submit(self, **drawn: Any) -> None:
        length = min(drawn["length"], self.longest)
        prompt = prompt_of(length, drawn["base"])
        if drawn["tail"] and length > 2:
            prompt[-1] = drawn["tail"]
        limit = min(length + drawn["more"], self.longest)
        least = min(drawn["least"], limit - length)
        params = SamplingParams(
            max_tokens=limit - length, min_tokens=least, prompt_logprobs=0 if drawn["scored"] else None, logprobs=0
        )
        first = self.rig.new([0], 1).number
        group = [
            self.rig.new(
                prompt,
                None,
                number=first + choice,
                limit=limit,
                params=params,
                choice=choice,
                tenant=drawn["tenant"],
                priority=drawn["priority"],
                use_cache=drawn["use_cache"],
                timeout_s=drawn["timeout_s"],
                leader=first if choice else None,
                ends=drawn["ends"],
                banned=drawn["ends"],
                judge=Words([drawn["stop"]]),
                kv_precision=self.precisions[drawn["precision"] % len(self.precisions)],
                share=drawn["share"],
            )
            for choice in range(drawn["n"])
        ]
        try:
            self.rig.submit_all(group)
        except Overloaded:
            assert not any(self.rig.book.cancel(new.number) for new in group)
            return
        if drawn["doomed"]:
            self.doomed.add(first)

    @rule(pick=st.integers(0, 30))
    def cancel(self, pick: int) -> None:
        numbers = sorted(self.rig.out)
        if not numbers:
            return
        number = numbers[-1 - pick % len(numbers)]
        living = not self.rig.out[number].ends and number not in self.gone
        assert self.rig.book.cancel(number) == living
        assert not self.rig.book.cancel(number)
        if living:
            self.gone.add(number)

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.2]))
    def wait(self, seconds: float) -> None:
        self.rig.clock.advance(seconds)
        self.rig.take(self.rig.book.expire(self.rig.clock()))

    @precondition(lambda self: self.bound is None)
    @rule()
    def bind(self) -> None:
        bound = self.rig.bind()
        if bound.rows:
            self.bound = bound
        else:
            self.rig.take(self.rig.book.take_events())

    @precondition(lambda self: self.bound is not None)
    @rule()
    def commit(self) -> None:
        assert self.bound is not None
        self.rig.commit(self.bound)
        self.bound = None

    @rule(picks=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(OUTCOMES)), min_size=1, max_size=4))
    def move(self, picks: list[tuple[int, Any]]) -> None:
        for at, outcome in picks:
            self.rig.move(at, outcome)

    @rule(pick=st.integers(0, 30))
    def sink(self, pick: int) -> None:
        if self.rig.news:
            new = self.rig.news[sorted(self.rig.news)[-1 - pick % len(self.rig.news)]]
            self.rig.book.sink(list(new.prompt), len(new.prompt), new.salt, new.kv_precision)

    @rule(keys=st.integers(1, 3))
    def damage(self, keys: int) -> None:
        for key in list(self.rig.carrier.disk)[:keys]:
            del self.rig.carrier.disk[key]

    @precondition(lambda self: self.bound is None)
    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.rig.step()

    @precondition(lambda self: self.bound is None)
    @rule()
    def fail(self) -> None:
        if len(self.rig.out) % 7 == 6:
            self.rig.take(self.rig.book.fail_all(RuntimeError("step")))
            self.rig.assert_empty()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "rig"):
            self.rig.book.check_integrity()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        if self.bound is not None:
            self.rig.commit(self.bound)
        self.rig.finish(2000)
        self.rig.assert_empty()
        for number, out in self.rig.out.items():
            self.judge(number, out)

    def judge(self, number: int, out: Any) -> None:
        new = self.rig.news[number]
        tokens, reason, stop = self.rig.expected(new)
        assert out.tokens == tokens[: len(out.tokens)]
        assert len(out.logprobs) == len(out.tokens)
        if number in self.gone:
            assert not out.ends
            return
        assert out.ends == 1
        if out.error is not None:
            allowed = (RequestTimeout, RuntimeError) if number not in self.doomed else Exception
            assert isinstance(out.error, allowed)
            return
        assert (out.tokens, out.finished.reason, out.finished.stop) == (tokens, reason, stop)
        assert out.firsts == (1 if tokens else 0)
        if new.params.prompt_logprobs is not None:
            assert [one.logprob for one in out.prompt_scores] == [-float(at) for at in range(1, len(new.prompt))]


BookMachine.TestCase.settings = settings(
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestBook = BookMachine.TestCase
TestBook.__doc__ = "Whatever happens in whatever order, blocks and requests agree and every text is what it is alone."
