"""What the book does about the tiers below the device: loads for those who wait, copies of what may have to go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from kimicore.contracts import BlockKey, StepCost, StepLimits
from kimicore.loading import Loader
from kimicore.moves import Transfer, Transferred
from kimicore.prefix import Chains, first_seen
from kimicore.requests import Request
from kimicore.roster import Roster
from kimicore.sinking import Sink, Sinking
from kimicore.tiers import Tiers

__all__ = ["Below"]


class Below:
    """The lower tiers of one book; used between steps."""

    def __init__(self, roster: Roster, tiers: Tiers, limits: StepLimits) -> None:
        self.tiers = tiers
        self._roster, self._ledger = roster, roster.ledger
        self._loader = Loader(roster, tiers, limits)
        self._sinking = Sinking(tiers)
        roster.wanted = self._want

    def _want(self, request: Request) -> None:
        self.tiers.want(key for chain in request.chains if chain for key in chain.keys[: request.sealed])

    def tend(self, now_s: float, cost: StepCost) -> list[Transfer]:
        """Return the block moves to begin now: up, for requests that wait; to disk, where the host runs short.

        Every one has to be told to :meth:`moved` when it is over, whatever came of it. Before each view.
        """
        roster, ledger = self._roster, self._ledger
        ledger.now_s = now_s
        self._loader.expire(now_s)
        while ledger.slabs.usable <= len(roster.running) and roster.loosen():
            pass
        if roster.solo is not None:  # it is alone because nothing may stand in its way
            return []
        found = self._loader.begin(now_s, cost)
        if self._sinking.open:
            found += self._sinking.lower(now_s)
        return found + self.tiers.lower(now_s)

    def moved(self, transfers: Iterable[Transferred], now_s: float) -> None:
        """Take in transfers that are over."""
        self._ledger.now_s = now_s
        for one in transfers:
            self.tiers.done(one, now_s)
            if one.transfer.target == "device":
                self._loader.done(one)
            elif one.transfer.source == "device":
                self._roster.cache_age += 1

    def sink(self, chains: Chains, tokens: int) -> Sink:
        """Have those blocks written to disk that a sequence of so many tokens needs to go on, wherever they are now."""
        ledger = self._ledger
        size = ledger.block_tokens
        tokens = tokens // size * size  # whole blocks are found again, and a window is as wide as it is seen from there
        blocks: list[tuple[int, BlockKey]] = []
        for kind, chain in enumerate(chains):
            if chain is None:
                continue
            first = first_seen(tokens, ledger.windows[kind], size)
            blocks += [(kind, key) for key in chain.keys[first : tokens // size]]
        return self._sinking.ask(blocks)

    def check_integrity(self, held: Sequence[Counter[int]]) -> None:
        """Raise AssertionError where loads, moves and tiers do not agree; adds what loads hold to ``held``."""
        for kind, own in enumerate(held):
            own.update(self._loader.held(kind))
        self._loader.check_integrity()
        self.tiers.check_integrity()
