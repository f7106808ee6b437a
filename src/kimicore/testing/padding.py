"""The conformance kit of padding policies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from kimicore.asking import SPARE
from kimicore.contracts import Padding
from kimicore.guard import RAISED
from kimicore.testing.engine_check import check_in_engine
from kimicore.testing.promises import Check, Effort, Judge, Story, Together, explore, named
from kimicore.testing.settings_check import check_settings

__all__ = ["check_padding"]

PROMISES = {
    "settings": "the settings are a frozen record with a name",
    "never-raises": "no step makes it raise, and sizes and claims are integers",
    "covers": "a shape is at least as large as the step, in every direction",
    "near": f"no direction is padded to more than twice its size and {SPARE} more, which the core would refuse",
    "pure": "the same step gets the same shape, whatever came before and from any copy of the settings",
    "waste": "padding adds at most as many tokens as waste_tokens() claims",
    "claims": "waste_tokens() is at least 0; shapes() is at least 1 and never less for larger steps",
    "bounded": "steps up to a size get at most as many different shapes as shapes() claims",
    "engine": "in the engine's own book and planner it serves real traffic without a fault",
}
_BY_SIZES = ("never-raises", "covers", "near", "pure", "waste", "claims", "bounded")
Size = tuple[int, int, int]


def check_padding(maker: Callable[[], Padding], *, examples: int = 60, steps: int = 30, seed: int = 0) -> list[Check]:
    """Return the checks of a padding policy, one for each promise of :class:`~kimicore.contracts.Padding`.

    ``maker``: called without arguments, returns the settings: the class itself, or a function that gives some.
    ``examples``, ``steps``: how many lists of steps each check tries and how many steps one has; ``seed`` chooses them.
    Under pytest: ``@pytest.mark.parametrize("check", check_padding(MyPolicy), ids=str)`` over a test that calls
    ``check()``. Nothing runs before that.
    """
    effort = Effort(examples, steps, seed, shrinks=1000)
    together = Together(partial(_by_sizes, maker, effort), _BY_SIZES)
    searches: dict[str, Callable[[], None]] = {
        "settings": lambda: check_settings("padding", maker, None, None),
        **{name: partial(together.check, name) for name in _BY_SIZES},
        "engine": lambda: check_in_engine("padding", maker, effort),
    }
    policy = named(maker)
    return [Check("padding", policy, name, promise, searches[name]) for name, promise in PROMISES.items()]


def _by_sizes(maker: Callable[[], Any], effort: Effort, promises: Collection[str]) -> None:
    from hypothesis import strategies as st

    tokens = st.one_of(st.integers(1, 40), st.integers(1, 700), st.sampled_from([1023, 1024, 1025, 4096, 9000]))
    sizes = st.tuples(tokens, st.integers(1, 256), st.one_of(st.integers(1, 20), st.integers(1, 600)))
    most = st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(1, 7))

    def run(steps: list[Size], most: Size) -> None:
        drive = _Drive(maker, promises)
        for tokens, rows, blocks in steps:
            drive.step((tokens, min(rows, tokens), blocks))
        drive.again()
        if drive.judge.looks_at("bounded"):
            drive.count_shapes(most)

    explore(run, effort, steps=st.lists(sizes, min_size=1, max_size=effort.steps), most=most)


class _Drive:
    """A list of steps that one policy pads."""

    def __init__(self, maker: Callable[[], Any], promises: Collection[str]) -> None:
        self.story = Story()
        self.judge = Judge(promises, self.story)
        self.maker = maker
        self.made = self._make()
        self.seen: dict[Size, Size] = {}

    def _make(self) -> Any:
        error: BaseException | None = None
        try:
            return self.maker()
        except RAISED as raised:
            error = raised
        self.story.end(f"making the settings raised {error!r}")

    def _call(self, made: Any, method: str, *sizes: int) -> Any:
        """Return what a method answers, or None where it raises."""
        error: BaseException | None = None
        try:
            return getattr(made, method)(*sizes)
        except RAISED as raised:
            error = raised
        self.judge.broken("never-raises", f"{method}{sizes} raised {error!r}")
        return None

    def shape(self, size: Size, made: Any = None) -> Size | None:
        """Return the shape of a step as numbers, or None where there is none."""
        shape = self._call(self.made if made is None else made, "shape", *size)
        found = tuple(getattr(shape, name, None) for name in ("tokens", "rows", "blocks"))
        if shape is not None and not all(_is_int(one) for one in found):
            self.judge.broken("never-raises", f"shape{size} is {shape!r}, which has no three integers")
        if not all(_is_int(one) for one in found):
            return None
        tokens, rows, blocks = found
        return (tokens, rows, blocks)  # type: ignore[return-value]

    def step(self, size: Size) -> None:
        """Pad a step and look at the shape and at what is claimed."""
        self.story.tell(f"shape{size}")
        shape = self.shape(size)
        self.story.events[-1] = f"shape{size} -> {shape}"
        names = ("tokens", "rows", "blocks")
        if shape is not None:
            for name, own, padded in zip(names, size, shape, strict=True):
                if padded < own:
                    self.judge.broken("covers", f"a step of {size} tokens, rows and blocks got {padded} {name}")
                if padded > 2 * own + SPARE:
                    self.judge.broken("near", f"{own} {name} became {padded}")
            before = self.seen.setdefault(size, shape)
            if before != shape:
                self.judge.broken("pure", f"{size} got {before} before and {shape} now")
        self._claims(size, shape)

    def _claims(self, size: Size, shape: Size | None) -> None:
        waste = self._call(self.made, "waste_tokens", size[0])
        if not _is_int(waste) or waste < 0:
            self.judge.broken("claims", f"waste_tokens({size[0]}) is {waste!r}")
        elif shape is not None and shape[0] - size[0] > waste:
            self.judge.broken(
                "waste", f"{size[0]} tokens became {shape[0]}, {shape[0] - size[0]} more; {waste} are claimed"
            )
        count = self._call(self.made, "shapes", *size)
        if not _is_int(count) or count < 1:
            self.judge.broken("claims", f"shapes{size} is {count!r}")
            return
        for at, name in enumerate(("tokens", "rows", "blocks")):
            larger = _larger(size, at)
            other = self._call(self.made, "shapes", *larger)
            if not _is_int(other) or other < count:
                self.judge.broken("claims", f"shapes{size} is {count} and shapes{larger}, of more {name}, is {other!r}")

    def again(self) -> None:
        """Pad the same steps in the other order, with fresh settings."""
        fresh = self._make()
        for size, before in reversed(self.seen.items()):
            shape = self.shape(size, fresh)
            if shape is not None and shape != before:
                self.story.tell(f"shape{size} -> {shape}, from fresh settings")
                self.judge.broken("pure", f"{size} got {before} before and {shape} from fresh settings")

    def count_shapes(self, most: Size) -> None:
        """Pad every step up to ``most`` and count the shapes."""
        tokens, rows, blocks = most[0], min(most[1], most[0]), most[2]
        found = {
            self.shape((token, row, block))
            for token in range(1, tokens + 1)
            for row in range(1, min(rows, token) + 1)
            for block in range(1, blocks + 1)
        } - {None}
        claimed = self._call(self.made, "shapes", tokens, rows, blocks)
        if _is_int(claimed) and len(found) > claimed:
            self.story.tell(f"every step of up to {tokens} tokens, {rows} rows and {blocks} blocks")
            self.judge.broken("bounded", f"they got {len(found)} shapes; {claimed} are claimed")


def _larger(size: Sequence[int], at: int) -> tuple[int, ...]:
    """Return a size that is larger in one direction; a step never has more rows than tokens."""
    more = list(size)
    more[at] += 1 + more[at] // 3
    if at == 1:
        more[0] = max(more[0], more[1])
    return tuple(more)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
