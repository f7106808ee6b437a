"""What a conformance kit is made of: named checks, how hard they search, and how a broken promise reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NoReturn

from attrs import field, frozen

from kimicore.errors import PluginError
from kimicore.guard import RAISED

__all__ = [
    "BrokenPromise",
    "Check",
    "Counterexample",
    "Effort",
    "Judge",
    "Story",
    "Together",
    "explore",
    "explore_machine",
    "named",
]

MOST_EVENTS = 60


@frozen
class Effort:
    """How hard a check searches: ``examples`` histories of up to ``steps`` events, chosen by ``seed``.

    Once a counterexample is found, ``shrinks`` more histories are tried for a shorter one.
    """

    examples: int = 60
    steps: int = 30
    seed: int = 0
    shrinks: int = 120


class Counterexample(AssertionError):
    """Raised inside a search where ``promise`` does not hold; ``events`` is the history that led there."""

    def __init__(self, found: str, events: Sequence[str], promise: str = "") -> None:
        super().__init__(found)
        self.found = found
        self.promise = promise
        self.events = tuple(events)


class BrokenPromise(AssertionError):
    """A policy does not keep a promise.

    ``kind``, ``policy``, ``check`` and ``promise`` say which; ``found`` is what was seen, and ``events`` the
    shortest history found that shows it, one event a line.
    """

    def __init__(self, check: Check, found: str, events: Sequence[str]) -> None:
        self.kind = check.kind
        self.policy = check.policy
        self.check = check.name
        self.promise = check.promise
        self.found = found
        self.events = tuple(events)
        super().__init__(self._text())

    def _text(self) -> str:
        lines = [
            f"the {self.kind} policy {self.policy!r} breaks a promise, {self.check}: {self.promise}",
            f"  found: {self.found}",
        ]
        if self.events:
            lines.append("  after:")
        shown = self.events
        if len(shown) > MOST_EVENTS:
            lines.append(f"    ({len(shown) - MOST_EVENTS} events before)")
            shown = shown[-MOST_EVENTS:]
        width = len(str(len(self.events)))
        first = len(self.events) - len(shown) + 1
        lines += [f"    {at:>{width}}. {event}" for at, event in enumerate(shown, first)]
        return "\n".join(lines)


@frozen(eq=False)
class Check:
    """One promise of one policy; calling it searches for a counterexample and raises :class:`BrokenPromise`.

    ``kind``: "batching", "eviction", "padding" or "precision". ``policy``: the policy's name. ``name``: of the check,
    such as "leaf-first". ``promise``: one sentence. ``str(check)`` is what a test is best called.
    """

    kind: str
    policy: str
    name: str
    promise: str
    search: Callable[[], None] = field(repr=False)

    def __call__(self) -> None:
        """Search for a counterexample.

        Raises :class:`BrokenPromise` with the shortest one found, and :class:`~kimicore.PluginError` where the
        package ``hypothesis`` is missing, which does the searching.
        """
        _library()
        counterexample = _found_by(self.search)
        if counterexample is not None:
            raise BrokenPromise(self, counterexample.found, counterexample.events)

    def __str__(self) -> str:
        return f"{self.policy}-{self.name}"


def _found_by(search: Callable[[], None]) -> Counterexample | None:
    try:
        search()
    except Counterexample as found:
        return found
    return None


class Story:
    """The events of one history, in words; ``listener`` is told of the counterexample that they end in."""

    def __init__(self) -> None:
        self.events: list[str | Callable[[], str]] = []
        self.listener: Callable[[Counterexample], None] | None = None

    def tell(self, event: str | Callable[[], str]) -> None:
        """Note what happened, as text or as what makes the text when it is wanted."""
        self.events.append(event)

    def end(self, found: str, promise: str = "") -> NoReturn:
        """Raise :class:`Counterexample`: this history shows that a promise is broken."""
        events = [event if isinstance(event, str) else event() for event in self.events]
        counterexample = Counterexample(found, events, promise)
        if self.listener is not None:
            self.listener(counterexample)
        raise counterexample


class Judge:
    """Looks at some promises; what breaks another one is handled as the engine would handle it."""

    def __init__(self, promises: Collection[str], story: Story) -> None:
        self.promises = frozenset(promises)
        self.story = story
        self.over = False

    def looks_at(self, promise: str) -> bool:
        """Whether this promise is looked at."""
        return promise in self.promises

    def broken(self, promise: str, found: str) -> None:
        """Say that ``promise`` is broken, which ends the history where it is looked at."""
        if promise in self.promises:
            self.over = True
            self.story.end(found, promise)


class Together:
    """Looks at many promises in one search, since most policies keep all of them.

    ``search`` is called with the promises to look at. One that was found broken is left out of the next search, until
    nothing more is found; then each broken one is searched alone, for a short history of its own.
    """

    def __init__(self, search: Callable[[Collection[str]], None], promises: Collection[str]) -> None:
        self._search = search
        self._promises = tuple(promises)
        self._broken: dict[str, Counterexample] | None = None

    def check(self, promise: str) -> None:
        """Raise :class:`Counterexample` where the promise is broken."""
        if self._broken is None:
            self._broken = self._search_all()
        if promise in self._broken:
            self._search([promise])
            raise self._broken[promise]

    def _search_all(self) -> dict[str, Counterexample]:
        broken: dict[str, Counterexample] = {}
        while len(broken) < len(self._promises):
            left = [one for one in self._promises if one not in broken]
            found = _found_by(partial(self._search, left))
            if found is None:
                break
            if found.promise not in left:
                return dict.fromkeys(self._promises, found)  # not even a start: nothing else can be looked at
            broken[found.promise] = found
        return broken


def _library() -> Any:
    try:
        import hypothesis
    except ImportError:
        raise PluginError(
            "the conformance kit searches with the package hypothesis, which is not installed: "
            "pip install 'kimicore[testing]'"
        ) from None
    return hypothesis


def _settings(effort: Effort) -> Any:
    library = _library()
    return library.settings(
        max_examples=effort.examples,
        stateful_step_count=max(1, effort.steps),
        database=None,
        deadline=None,
        phases=(library.Phase.generate, library.Phase.shrink),
        print_blob=False,
        report_multiple_bugs=False,
        suppress_health_check=list(library.HealthCheck),
        verbosity=library.Verbosity.quiet,
    )


class _Enough(BaseException):
    """Ends a search from within; the library lets through what is no Exception."""


class _Hunt:
    """Keeps the shortest counterexample, and ends the search ``runs`` runs after the first one was found."""

    def __init__(self, runs: int) -> None:
        self.best: Counterexample | None = None
        self._left = runs

    def note(self, found: Counterexample) -> None:
        """Take a counterexample in."""
        if self.best is None or len(found.events) <= len(self.best.events):
            self.best = found

    def begin(self) -> None:
        """Count a run."""
        if self.best is not None:
            self._left -= 1
            if self._left < 0:
                raise _Enough

    def go(self, search: Callable[[], None]) -> None:
        """Search, and raise the shortest counterexample that was found."""
        try:
            search()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # also the library's complaint about a search that was ended
            if self.best is None:
                raise
            if isinstance(error, BaseExceptionGroup):  # the same history did not show it again
                self.best.found += " (not every time: the policy is not repeatable)"
        if self.best is not None:
            raise self.best


def explore(test: Callable[..., None], effort: Effort, **strategies: Any) -> None:
    """Call ``test`` with values drawn from ``strategies`` until ``effort`` is spent; raise the best counterexample."""
    library = _library()
    hunt = _Hunt(effort.shrinks)

    def run(**values: Any) -> None:
        hunt.begin()
        try:
            test(**values)
        except Counterexample as found:
            hunt.note(found)
            raise

    hunt.go(library.seed(effort.seed)(_settings(effort)(library.given(**strategies)(run))))


def explore_machine(machine: Callable[[], Any], effort: Effort) -> None:
    """Run the state machine that ``machine`` makes until ``effort`` is spent; raise the best counterexample.

    A machine has its :class:`Story` as ``story``.
    """
    library = _library()
    from hypothesis.stateful import run_state_machine_as_test

    hunt = _Hunt(effort.shrinks)

    def make() -> Any:
        hunt.begin()
        made = machine()
        made.story.listener = hunt.note
        return made

    seeded = library.seed(effort.seed)(make)
    hunt.go(lambda: run_state_machine_as_test(seeded, settings=_settings(effort)))


def named(maker: Callable[[], Any]) -> str:
    """Return the name of the policy that ``maker`` makes, or the maker's own where it makes none."""
    try:
        name = maker().name
        if isinstance(name, str) and name:
            return name
    except RAISED:  # the first check of every kind says what is wrong with it
        pass
    return str(getattr(maker, "__name__", "unnamed"))
