"""Tells an eviction policy the events of a cache, as the engine's ledger does, and weighs its answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from kimicore.guard import RAISED
from kimicore.testing.cache_model import Asker, CacheModel, Node, Verdict, labels_of
from kimicore.testing.footprint import Footprint, footprint
from kimicore.testing.names import key_of
from kimicore.testing.promises import Judge

__all__ = ["CacheDrive", "Event", "call_victims"]

MORE = 64  # that are looked at beyond what was asked for, of an answer that may not end
Event = tuple[str, tuple[Any, ...]]
"""A call of the policy: the method's name and its arguments, with labels in place of keys."""


class CacheDrive:
    """One history of one cache.

    ``maker``: makes the settings. ``judge``: the promise that is looked at. ``capacity_blocks``, ``ghost_blocks``:
    handed to ``start``. ``rooted``: see :class:`~kimicore.testing.cache_model.CacheModel`. ``salts``: one running state
    for each, which all see the same history with keys that hash differently.
    """

    def __init__(
        self,
        maker: Callable[[], Any],
        judge: Judge,
        capacity_blocks: int,
        ghost_blocks: int,
        *,
        rooted: bool = True,
        salts: Sequence[int] = (0,),
    ) -> None:
        self.judge = judge
        self.story = judge.story
        self.model = CacheModel(capacity_blocks, rooted=rooted)
        self.now_s = 0.0
        self.history: list[Event] = []
        self.started = (capacity_blocks, ghost_blocks, 0)
        self._maker = maker
        self._salts = tuple(salts)
        start = f"start(capacity_blocks={capacity_blocks}, ghost_blocks={ghost_blocks}, seed=0)"
        self.story.tell(start if rooted else f"{start}, of a class with a window")
        self._states = [self._start() for _ in self._salts]

    def _start(self) -> Any:
        try:
            return self._maker().start(*self.started)
        except RAISED as raised:
            error = raised
        self.story.end(f"making the settings or starting them raised {error!r}")

    # ------------------------------------------------------------ what happens to a cache

    def wait(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    def use(self, path: Sequence[int], *, done: bool) -> bool:
        """Let a request come that computes the sequence ``path``; it ends at once where ``done``.

        Blocks that are there are held, the others are new and evict what they need. False where they do not fit.
        """
        model = self.model
        labels = labels_of(path)
        held = model.hits(labels)
        model.hold(held)
        missing = len(labels) - len(held)
        if missing > model.free_blocks + len(model.idle):
            self._release(held)
            return False
        if missing > model.free_blocks:
            self.evict(missing - model.free_blocks)
        there = {node.label: node for node in held}
        nodes: list[Node] = []
        for depth, label in enumerate(labels):
            above = nodes[-1] if nodes else None
            nodes.append(there.get(label) or model.enter(label, depth, above))
        model.open.append(nodes)
        if done:
            self.finish(len(model.open) - 1)
        return True

    def finish(self, pick: int) -> None:
        """Let a running request go; ``pick`` chooses which, and nothing happens where none runs."""
        model = self.model
        if not model.open:
            return
        nodes = model.open.pop(pick % len(model.open))
        if model.rooted:
            self._release(nodes)
        else:  # the blocks that left the window were let go before
            middle = len(nodes) // 2
            self._release(nodes[:middle])
            self._release(nodes[middle:])

    def _release(self, nodes: Sequence[Node]) -> None:
        for node in reversed(nodes):
            if node.cached and node.told:
                self.call("touched", node.label, self.now_s)
            elif node.cached:
                node.told = True
                above = node.above.label if node.above is not None else None
                self.call("added", node.label, above, node.depth, self.now_s)
            self.model.let_go(node)

    def forget(self, pick: int) -> None:
        """Drop a block with all that follows it, whoever holds them, as after a failed step."""
        labels = list(self.model.nodes)
        if labels:
            for node in list(self.model.subtree(self.model.nodes[labels[pick % len(labels)]])):
                self._drop(node)

    def _drop(self, node: Node) -> None:
        self.model.leave(node)
        if node.told:
            node.told = False
            self.call("removed", node.label)

    def importance(self, picks: Sequence[int], values: Sequence[float]) -> None:
        """Tell how much attention some of the known blocks got."""
        told = self.model.told()
        if told:
            chosen = {told[pick % len(told)].label: value for pick, value in zip(picks, values, strict=True)}
            self.call("importance", tuple(chosen), tuple(chosen.values()))

    def evict(self, count: int) -> list[str]:
        """Ask for ``count`` victims and drop them: those named as far as they are legal, then the longest unused.

        Nobody is asked where nothing can go.
        """
        if not self.model.idle:
            return []
        asker = self.model.asker()
        self.history.append(("victims", (count, asker, self.now_s)))
        could = len(self.model.idle)
        event = f"victims({count}, now_s={self.now_s:g})"
        self.story.tell(event)
        answers = [self._named(state, count, asker.fresh()) for state in self._states]
        named = answers[0]
        self.story.events[-1] = lambda: f"{event} -> {_listed(named)}; {could} could go"
        for other in answers[1:]:
            if [bytes(key) if isinstance(key, bytes) else key for key in other] != named:
                self.judge.broken(
                    "repeatable",
                    f"a second state that was told the same named {_listed(other)} (its keys are equal and hash "
                    "differently, as in another process)",
                )
        verdict = self.model.judge(named, count)
        for promise, found in verdict.faults.items():
            self.judge.broken(promise, found)
        return self._drop_all(verdict, min(count, len(self.model.idle)))

    def _drop_all(self, verdict: Verdict, count: int) -> list[str]:
        for node in verdict.legal:
            self._drop(node)
        dropped = [node.label for node in verdict.legal]
        while len(dropped) < count:
            node = self.model.longest_unused()
            self._drop(node)
            dropped.append(node.label)
        return dropped

    def _named(self, state: Any, count: int, asker: Asker) -> list[Any]:
        error: BaseException | None = None
        named: list[Any] = []
        try:
            named = list(islice(state.victims(count, asker, self.now_s), count + MORE))
        except RAISED as raised:
            error = raised
        if error is not None:
            self.judge.broken("never-raises", f"victims() raised {error!r}, or what it returned cannot be listed")
        if asker.strangers:
            key = asker.strangers[0]
            self.judge.broken("asks", f"victims() asked about {key!r}, which it was not told of or which was removed")
        return named

    # ------------------------------------------------------------ the policy

    def call(self, method: str, *arguments: Any) -> None:
        """Call a method of every state, with keys in place of labels."""
        self.history.append((method, arguments))
        self.story.tell(partial(_shown, method, arguments))
        for state, salt in zip(self._states, self._salts, strict=True):
            error = call_state(state, method, arguments, salt)
            if error is not None:
                self.judge.broken("never-raises", f"{method}() raised {error!r}")

    def replayed(self, history: Sequence[Event]) -> Any:
        """Return a fresh state that has seen ``history``."""
        state = self._start()
        for method, arguments in history:
            if method == "victims":
                count, asker, now_s = arguments
                call_victims(state, count, asker, now_s)
            else:
                call_state(state, method, arguments, 0)
        return state

    def remembered(self) -> Footprint:
        """Return how much the policy's state holds."""
        return footprint(self._states[0])

    def drain(self) -> list[str]:
        """Ask for everything that can go, and return it in the order in which it went."""
        return self.evict(len(self.model.idle))


def call_state(state: Any, method: str, arguments: tuple[Any, ...], salt: int) -> BaseException | None:
    """Call a method that tells of an event; return what it raised."""
    try:
        if method == "added":
            label, above, depth, now_s = arguments
            parent = None if above is None else key_of(above, salt)
            state.added(key_of(label, salt), parent, depth, now_s)
        elif method == "touched":
            state.touched(key_of(arguments[0], salt), arguments[1])
        elif method == "removed":
            state.removed(key_of(arguments[0], salt))
        else:
            state.importance([key_of(label, salt) for label in arguments[0]], list(arguments[1]))
    except RAISED as error:
        return error
    return None


def call_victims(state: Any, count: int, asker: Asker, now_s: float) -> list[Any]:
    """Ask for victims; nothing where the state raises."""
    try:
        return list(islice(state.victims(count, asker.fresh(), now_s), count + MORE))
    except RAISED:
        return []


def _shown(method: str, arguments: tuple[Any, ...]) -> str:
    if method == "added":
        label, above, depth, now_s = arguments
        return f"added({label}, parent={above}, depth_blocks={depth}, now_s={now_s:g})"
    if method == "touched":
        return f"touched({arguments[0]}, now_s={arguments[1]:g})"
    if method == "removed":
        return f"removed({arguments[0]})"
    return f"importance([{', '.join(arguments[0])}], {list(arguments[1])})"


def _listed(named: Sequence[Any]) -> str:
    return "[" + ", ".join(repr(key) for key in named) + "]"
