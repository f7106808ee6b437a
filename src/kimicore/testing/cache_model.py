"""A cache in plain dictionaries: what is legal to tell an eviction policy, and what its answers may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from attrs import define, field

from kimicore.testing.names import key_of

__all__ = ["Asker", "CacheModel", "Node", "Verdict", "labels_of"]


@define(eq=False)
class Node:
    """A block: ``label`` names its content, ``refs`` requests hold it, ``told`` says whether the policy knows it."""

    label: str
    depth: int
    above: Node | None
    raw: bytes
    refs: int = 1
    told: bool = False
    cached: bool = True
    below: set[str] = field(factory=set)


class Asker:
    """``evictable`` of one call of ``victims``, frozen at that moment: who is free to go, and who follows whom."""

    def __init__(self, idle: dict[bytes, str], below: dict[str, frozenset[str]], known: set[bytes]) -> None:
        self.idle = idle
        self.below = below
        self.known = known
        self.strangers: list[object] = []
        self._taken: set[str] = set()

    def fresh(self) -> Asker:
        """Return the same question, not yet asked."""
        return Asker(self.idle, self.below, self.known)

    def __call__(self, key: bytes) -> bool:
        """Say whether the block may go after those that this was asked about before."""
        raw = bytes(key) if isinstance(key, bytes) else b""
        if raw not in self.known:
            self.strangers.append(key)
            return False
        label = self.idle.get(raw)
        if label is None or label in self._taken or not self.below[label] <= self._taken:
            return False
        self._taken.add(label)
        return True


class Verdict:
    """What is wrong with an answer of ``victims``, by promise, and which of the named blocks may really go."""

    def __init__(self) -> None:
        self.faults: dict[str, str] = {}
        self.legal: list[Node] = []

    def add(self, promise: str, found: str) -> None:
        """Note the first fault of each promise."""
        self.faults.setdefault(promise, found)


class CacheModel:
    """Blocks by content, and who holds them.

    ``capacity_blocks`` bounds what is there at once. ``rooted``: a block is of use only with those before it, as in a
    class without a window; then it is cached only while the one before it is.
    """

    def __init__(self, capacity_blocks: int, *, rooted: bool = True) -> None:
        self.capacity_blocks = capacity_blocks
        self.rooted = rooted
        self.nodes: dict[str, Node] = {}
        self.raws: dict[bytes, Node] = {}
        self.idle: dict[str, None] = {}  # cached and held by nobody, longest unused first
        self.open: list[list[Node]] = []  # what each running request holds, from the start of its sequence

    @property
    def free_blocks(self) -> int:
        """Blocks that hold nothing."""
        return self.capacity_blocks - len(self.nodes)

    def hits(self, labels: Sequence[str]) -> list[Node]:
        """Return the cached blocks of a sequence that a request can use."""
        found: list[Node] = []
        for label in labels:
            node = self.nodes.get(label)
            if node is not None:
                found.append(node)
            elif self.rooted:
                break
        return found

    def hold(self, nodes: Sequence[Node]) -> None:
        """Let one more request hold these blocks."""
        for node in nodes:
            node.refs += 1
            self.idle.pop(node.label, None)

    def enter(self, label: str, depth: int, above: Node | None) -> Node:
        """Put a new block, held by one request, into the cache."""
        above = above if self.rooted else None
        node = Node(label, depth, above, bytes(key_of(label)))
        self.nodes[label] = node
        self.raws[node.raw] = node
        if above is not None:
            above.below.add(label)
        return node

    def let_go(self, node: Node) -> None:
        """Let one request less hold the block."""
        node.refs -= 1
        if not node.refs and node.cached:
            self.idle[node.label] = None

    def leave(self, node: Node) -> None:
        """Take a block out of the cache; who holds it keeps it, and nobody else finds it."""
        node.cached = False
        del self.nodes[node.label]
        del self.raws[node.raw]
        self.idle.pop(node.label, None)
        if node.above is not None:
            node.above.below.discard(node.label)

    def subtree(self, node: Node) -> Iterator[Node]:
        """Yield the cached blocks that follow ``node``, last first, and then itself."""
        for label in sorted(node.below):
            yield from self.subtree(self.nodes[label])
        yield node

    def told(self) -> list[Node]:
        """Return the blocks that the policy knows of, in the order in which they came."""
        return [node for node in self.nodes.values() if node.told]

    def asker(self) -> Asker:
        """Return what ``victims`` may ask now."""
        idle = {self.nodes[label].raw: label for label in self.idle}
        below = {label: frozenset(self.nodes[label].below) for label in self.idle}
        return Asker(idle, below, {node.raw for node in self.nodes.values() if node.told})

    def longest_unused(self) -> Node:
        """Return the block that goes where the policy names none."""
        return next(self.nodes[label] for label in self.idle if not self.nodes[label].below)

    def judge(self, named: Sequence[object], count: int) -> Verdict:
        """Say what is wrong with ``named`` as an answer to being asked for ``count`` blocks."""
        verdict = Verdict()
        before: set[str] = set()  # what was named, rightly or not: one fault must not look like another
        legal = True
        for key in named:
            node = self.raws.get(bytes(key)) if isinstance(key, bytes) else None
            if node is None or not node.told:
                verdict.add("evictable", f"{key!r} was named, which is not in the cache")
            elif node.label in before:
                verdict.add("distinct", f"{node.label} was named twice")
            elif node.refs:
                verdict.add("evictable", f"{node.label} was named while {_requests(node.refs)} it")
            elif not node.below <= before:
                last = min(node.below - before)
                verdict.add("leaf-first", f"{node.label} was named before {last}, which follows it in its sequence")
            elif legal and len(verdict.legal) < count:
                verdict.legal.append(node)
                before.add(node.label)
                continue
            legal = False
            if node is not None:
                before.add(node.label)
        there = min(count, len(self.idle))
        if len(named) < there:
            verdict.add("enough", f"{len(named)} blocks were named, {count} asked for, and {len(self.idle)} could go")
        elif len(named) > count:
            verdict.add("enough", f"{len(named)} blocks were named although {count} were asked for")
        return verdict


def _requests(count: int) -> str:
    return "a request holds" if count == 1 else f"{count} requests hold"


def labels_of(path: Sequence[int]) -> list[str]:
    """Return the labels of a sequence's blocks: ``b1``, ``b1.0``, ``b1.0.2`` ... for choices 1, 0, 2."""
    words = [str(one) for one in path]
    return ["b" + ".".join(words[: at + 1]) for at in range(len(words))]
