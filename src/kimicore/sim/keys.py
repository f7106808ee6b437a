"""Names of blocks for a trace: prompts that share a trace's block ids share blocks of the ledger."""

from __future__ import annotations

from collections.abc import Sequence

from kimicore.prefix import BlockKeys, KeyChain, KeyContext
from kimicore.sim.traces import TraceRequest

__all__ = ["TraceKeys"]

_UNIQUE = b"own"


class TraceKeys(BlockKeys):
    """Makes chains of keys from the ids of traces; tokens are not looked at.

    A block of the ledger is named by the trace's last block that it reaches into, with all that come before it, and by
    its place. So two requests share exactly the blocks that lie within their common ids, whatever the two sizes
    are. Blocks beyond the ids, or of the output, are each request's own.
    """

    def __init__(self, block_tokens: int) -> None:
        super().__init__(block_tokens, b"")
        self._requests: dict[bytes, tuple[TraceRequest, int]] = {}
        self._nodes: dict[tuple[object, int], int] = {}

    def salt(self, request: TraceRequest, number: int) -> bytes:
        """Return the salt under which the book asks for the request's chain, once."""
        salt = number.to_bytes(8, "little")
        self._requests[salt] = (request, number)
        return salt

    def forget(self, salt: bytes) -> None:
        """Drop a request that the book did not take."""
        self._requests.pop(salt, None)

    def chains(
        self, contexts: Sequence[KeyContext], salt: bytes, rope: bytes | None, prompt_tokens: int = 0
    ) -> tuple[KeyChain, ...]:
        """Return the chain of the request that has this salt."""
        request, number = self._requests.pop(salt[8:])  # behind its length
        return (TraceChain(number, self.block_tokens, self._shared(request)),)

    def of_prompt(self, request: TraceRequest) -> list[bytes]:
        """Return the keys of all blocks that a prompt's ids cover, the last one also where it is not full."""
        return self._shared(request, self.block_tokens - 1)

    def _shared(self, request: TraceRequest, missing_tokens: int = 0) -> list[bytes]:
        """Return the keys of blocks that others could have as well, which may lack so many tokens at the end."""
        if not request.blocks:
            return []
        nodes, path = self._nodes, []
        node: object = request.tenant
        for one in request.blocks:
            node = nodes.setdefault((node, one), len(nodes) + 1)
            path.append(node)
        size, per = self.block_tokens, request.block_tokens
        covered = min(request.prompt_tokens, len(path) * per)
        ends = range(size, covered + 1 + missing_tokens, size)
        return [b"%d.%d" % (path[(min(end, covered) - 1) // per], end) for end in ends]


class TraceChain(KeyChain):
    """The keys of one request; those that it shares come first."""

    __slots__ = ("_own",)

    def __init__(self, number: int, block_tokens: int, shared: list[bytes]) -> None:
        super().__init__(None, block_tokens)
        self.keys = shared
        self._own = _UNIQUE + number.to_bytes(8, "little")

    def extend(self, tokens: Sequence[int], blocks: int) -> list[bytes]:
        """Return at least ``blocks`` keys."""
        keys, own = self.keys, self._own
        if len(keys) < blocks:
            keys.extend([own + at.to_bytes(4, "little") for at in range(len(keys), blocks)])
        return keys
