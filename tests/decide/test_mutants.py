"""Planted faults: each breaks one thing in the decide tower, and a short workload notices."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from bad_policies import BadEviction
from rig import Rig, Words, kv_class, prompt_of

import kimicore.ledger
import kimicore.roster
import kimicore.steps
from kimicore.blocks import Blocks
from kimicore.errors import RequestFailed
from kimicore.ledger import Ledger
from kimicore.prefix import BlockKeys, KeyChain
from kimicore.roster import Roster
from kimicore.sampling_params import SamplingParams
from kimicore.slabs import Slabs
from kimicore.steps import Steps

BLOCK = 4
LAYOUTS = (
    (kv_class("full", 1, block_tokens=BLOCK),),
    (kv_class("window", 2, window=9, block_tokens=BLOCK), kv_class("full", 1, block_tokens=BLOCK)),
)


def workload() -> None:
    """Raise where anything that the decide tower promises does not hold."""
    for seed, classes in enumerate(LAYOUTS * 3):
        mixed(seed, classes)
    ends()
    tenants()
    failures()


def mixed(seed: int, classes: tuple[Any, ...]) -> None:
    """Requests with shared prefixes, choices and cancels in a small arena."""
    draw = random.Random(seed)
    eviction = BadEviction("held") if seed == 2 else None
    rig = Rig(14, classes=classes, block_tokens=BLOCK, max_batch_size=4, max_batch_tokens=24, eviction=eviction)
    longest = min(48, rig.book.capacity_tokens)
    gone = set()
    number = 1
    for _ in range(25):
        length = draw.randint(1, longest - 12)
        prompt = prompt_of(length, draw.randint(0, 1))
        params = SamplingParams(max_tokens=12, prompt_logprobs=0 if draw.random() < 0.2 else None)
        choices = draw.choice([1, 1, 3])
        group = [
            rig.new(prompt, 12, number=number + at, choice=at, leader=number if at else None, params=params)
            for at in range(choices)
        ]
        number += choices
        rig.submit_all(group)
        for _ in range(draw.randint(0, 6)):
            bound = rig.bind()
            if draw.random() < 0.1:
                victim = draw.randint(max(1, number - 4), number - 1)
                if rig.book.cancel(victim):
                    gone.add(victim)
            rig.book.check_integrity()
            rig.commit(bound)
            rig.book.check_integrity()
    rig.finish(3000)
    rig.assert_empty()
    for each in set(rig.out) - gone:
        rig.assert_right(each)
        if rig.news[each].params.prompt_logprobs is not None:
            assert len(rig.out[each].prompt_scores) == len(rig.news[each].prompt) - 1
    assert rig.book.stats().cached_tokens > 0
    assert rig.ledger.evicted_blocks > 0


def ends() -> None:
    """A stop at the cap is a stop, an end token ends, and the least is kept."""
    rig = Rig()
    prompt = prompt_of(20)
    tokens = rig.alone(rig.new(prompt, 8))
    out = rig.run(prompt, 8, judge=Words(tokens[6:8]))
    assert out.finished.reason == "stop"
    out = rig.run(prompt, 8, ends=[tokens[7]])
    assert out.finished.stop == tokens[7]
    rig = Rig(vocabulary=3)
    out = rig.run([0] * 20, 20, ends=[0, 1], banned=[0, 1], params=SamplingParams(max_tokens=20, min_tokens=15))
    assert set(out.tokens[:15]) == {2}


def tenants() -> None:
    """One tenant's blocks are never another's, and neither are those of a request without the cache."""
    rig = Rig()
    prompt = prompt_of(50)
    rig.run(prompt, 2, tenant="a")
    assert rig.run(prompt, 2, tenant="b").finished.cached_tokens == 0
    assert rig.run(prompt, 2, tenant="a").finished.cached_tokens == 48
    assert rig.run(prompt, 2, tenant="a", use_cache=False).finished.cached_tokens == 0
    number = rig.submit([1] * 16 + prompt[16:], 2, tenant="a")
    rig.finish()
    rig.assert_right(number)


def failures() -> None:
    """What a failed request computed is not found, and choices go on without their leader."""
    doomed = {1}
    rig = Rig(
        max_batch_tokens=16,
        fault=lambda row: RequestFailed("x") if row.plan.request in doomed and row.plan.start > 30 else None,
    )
    prompt = prompt_of(50)
    rig.submit_all([rig.new(prompt, 4, number=at, choice=at - 1, leader=1 if at > 1 else None) for at in (1, 2)])
    rig.finish()
    assert rig.out[1].error is not None
    rig.assert_right(2)
    assert rig.out[2].finished.cached_tokens == 0
    rig.assert_empty()


Patch = Callable[[pytest.MonkeyPatch], None]
MUTANTS: dict[str, Patch] = {}


def mutant(patch: Patch) -> Patch:
    """Register a planted fault under its function's name."""
    MUTANTS[patch.__name__] = patch
    return patch


@mutant
def block_stays_indexed_when_evicted(patch: pytest.MonkeyPatch) -> None:
    real = Blocks.leave_index

    def leave(self: Blocks, slot: int) -> None:
        key = self.key[slot]
        real(self, slot)
        assert key is not None
        self.index.slots[key] = slot

    patch.setattr(Blocks, "leave_index", leave)


@mutant
def hit_is_not_held(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "_hold", lambda self, kind, slot: None)


@mutant
def hit_covers_the_whole_prompt(patch: pytest.MonkeyPatch) -> None:
    real = Roster.hit

    def hit(self: Roster, request: Any) -> int:
        request.known.append(0)
        try:
            return real(self, request)
        finally:
            request.known.pop()

    patch.setattr(Roster, "hit", hit)


@mutant
def scored_prompts_read_the_cache(patch: pytest.MonkeyPatch) -> None:
    real = Roster.hit

    def hit(self: Roster, request: Any) -> int:
        scored, request.scored = request.scored, request.prompt_tokens
        try:
            return real(self, request)
        finally:
            request.scored = scored

    patch.setattr(Roster, "hit", hit)


@mutant
def salt_is_ignored(patch: pytest.MonkeyPatch) -> None:
    real = BlockKeys.chains
    patch.setattr(
        BlockKeys, "chains", lambda self, contexts, salt, rope, prompt: real(self, contexts, b"", rope, prompt)
    )


@mutant
def parent_is_not_in_the_name(patch: pytest.MonkeyPatch) -> None:
    def extend(self: KeyChain, tokens: Any, blocks: int) -> list[bytes]:
        for at in range(len(self.keys), blocks):
            digest = self._start.copy()
            digest.update(repr(list(tokens[at * self.block_tokens : (at + 1) * self.block_tokens])).encode())
            self.keys.append(digest.digest())
        return self.keys

    patch.setattr(KeyChain, "extend", extend)


@mutant
def half_a_block_is_sealed(patch: pytest.MonkeyPatch) -> None:
    real = Roster.seal

    def seal(self: Roster, request: Any) -> None:
        computed = request.computed
        if computed % BLOCK and len(request.known) // BLOCK > computed // BLOCK:
            request.computed += BLOCK - computed % BLOCK
        real(self, request)
        request.computed = computed

    patch.setattr(Roster, "seal", seal)


@mutant
def window_closes_too_early(patch: pytest.MonkeyPatch) -> None:
    real = kimicore.roster.first_seen
    patch.setattr(kimicore.roster, "first_seen", lambda position, window, size: real(position + 2 * size, window, size))


@mutant
def window_never_closes(patch: pytest.MonkeyPatch) -> None:
    real = kimicore.roster.first_seen
    patch.setattr(kimicore.roster, "first_seen", lambda position, window, size: real(0, window, size))


@mutant
def cancelled_rows_keep_their_blocks(patch: pytest.MonkeyPatch) -> None:
    def abandon(self: Roster, request: Any) -> None:
        self.requests.pop(request.number)
        self.waiting.pop(request.number, None)
        self.running.pop(request.number, None)

    patch.setattr(Roster, "abandon", abandon)


@mutant
def cancel_frees_under_a_running_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "abandon", lambda self, request: self.leave(request))


@mutant
def preempted_requests_lose_a_token(patch: pytest.MonkeyPatch) -> None:
    real = Roster.preempt

    def preempt(self: Roster, request: Any) -> None:
        real(self, request)
        if request.generated:
            request.known.pop()
            request.generated -= 1

    patch.setattr(Roster, "preempt", preempt)


@mutant
def followers_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Roster, "free_followers", lambda self, leader: None)


@mutant
def failed_blocks_stay_in_the_cache(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "forget", lambda self, kind, slots: None)


@mutant
def a_slot_is_given_out_twice(patch: pytest.MonkeyPatch) -> None:
    real = Slabs.take
    last: dict[int, int] = {}

    def take(self: Slabs, kind: int) -> int:
        slot = real(self, kind)
        if slot % 5 == 3 and id(self) in last:
            return last[id(self)]
        last[id(self)] = slot
        return slot

    patch.setattr(Slabs, "take", take)


@mutant
def a_root_goes_before_its_leaves(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Blocks, "longest_unused", lambda self: next(reversed(self.idle)))
    patch.setattr(Blocks, "victims", lambda self, count, now_s: [])


@mutant
def held_blocks_are_legal_victims(patch: pytest.MonkeyPatch) -> None:
    def legal(self: Blocks, key: Any) -> int:
        slot = self.index.slots.get(key, 0)
        self.idle.setdefault(slot)
        return slot

    patch.setattr(Blocks, "legal_victim", legal)


@mutant
def the_second_copy_replaces_the_first(patch: pytest.MonkeyPatch) -> None:
    real = Blocks.enter

    def enter(self: Blocks, slot: int, key: bytes, parent: int, depth: int) -> int:
        self.index.slots.pop(key, None)
        return real(self, slot, key, parent, depth)

    patch.setattr(Blocks, "enter", enter)


@mutant
def length_comes_before_stop(patch: pytest.MonkeyPatch) -> None:
    real = kimicore.steps._accept

    def accept(request: Any, tokens: Any) -> Any:
        answer = real(request, tokens)
        return ("length", None) if len(request.known) >= request.limit else answer

    patch.setattr(kimicore.steps, "_accept", accept)


@mutant
def the_least_counts_the_prompt(patch: pytest.MonkeyPatch) -> None:
    real = kimicore.steps._accept

    def accept(request: Any, tokens: Any) -> Any:
        if len(request.known) >= request.new.params.min_tokens:
            request.banned = ()
        return real(request, tokens)

    patch.setattr(kimicore.steps, "_accept", accept)


@mutant
def scores_are_told_twice(patch: pytest.MonkeyPatch) -> None:
    def scores(request: Any, row: Any, given: Any) -> Any:
        request.scored += len(given.prompt_scores or ())
        return (given.prompt_scores or ()) * 2 or None

    patch.setattr(kimicore.steps, "_new_scores", scores)


@mutant
def a_step_is_committed_without_closing(patch: pytest.MonkeyPatch) -> None:
    real = Steps.commit

    def commit(self: Steps, step: Any, result: Any, now_s: float) -> None:
        real(self, step, result, now_s)
        self.bound = step if step.rows else None

    patch.setattr(Steps, "commit", commit)


@mutant
def busy_slabs_are_not_counted(patch: pytest.MonkeyPatch) -> None:
    real = Slabs.drop

    def drop(self: Slabs, kind: int, slot: int) -> None:
        real(self, kind, slot)
        self.busy_slots[kind] += slot % 7 == 5

    patch.setattr(Slabs, "drop", drop)


def test_the_workload_passes_without_a_fault():
    """Without a planted fault the workload notices nothing."""
    workload()


@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_every_planted_fault_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch):
    """With a planted fault the workload fails."""
    MUTANTS[name](monkeypatch)
    try:
        workload()
    except Exception:  # any way of noticing is good
        return
    pytest.fail(f"nobody noticed {name}")
