"""Planted faults in the lower tiers: each breaks one thing, and a short workload notices."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from rig import Rig, kv_class, prompt_of

from kimicore.errors import RequestFailed
from kimicore.loading import Loader
from kimicore.rates import Rates
from kimicore.shelf import HostShelf
from kimicore.tiers import Tiers

BLOCK = 4
LAYOUTS = (
    (kv_class("full", 1, block_tokens=BLOCK),),
    (kv_class("window", 2, window=9, block_tokens=BLOCK), kv_class("full", 1, block_tokens=BLOCK)),
)
OUTCOMES: list[Any] = ["done", "done", "done", "half", "failed", "lost"]


def workload() -> None:
    """Raise where anything that the tiers promise does not hold."""
    for seed, classes in enumerate(LAYOUTS * 4):
        mixed(seed, classes)


def mixed(seed: int, classes: tuple[Any, ...]) -> None:
    """Requests with shared prefixes in a small arena over small tiers, with moves that end late, in part or not."""
    draw = random.Random(seed)
    doomed: set[int] = set()
    rig = Rig(
        12,
        classes=classes,
        block_tokens=BLOCK,
        max_batch_size=3,
        max_batch_tokens=16,
        host_slabs=draw.choice([5, 9, 40]),
        disk={} if seed % 3 else None,
        staging=seed % 3 == 1,
        disk_bytes=64 * 30,
        fault=lambda row: RequestFailed("planted") if row.plan.request in doomed else None,
    )
    rig.below.tiers.rates = {"host": Rates(1e18, 0.0), "disk": Rates(1e18, 0.0)}
    longest = rig.book.capacity_tokens
    gone = set()
    for _ in range(40):
        number = rig.submit(prompt_of(draw.randint(1, min(40, longest - 4)), draw.randint(0, 5)), 3)
        if draw.random() < 0.1:
            doomed.add(number)
        if draw.random() < 0.4:
            new = rig.news[draw.choice(sorted(rig.news))]
            rig.book.sink(list(new.prompt), len(new.prompt), new.salt)
        for _ in range(draw.randint(0, 6)):
            rig.step()
            if draw.random() < 0.6:
                rig.move(draw.randint(0, 5), draw.choice(OUTCOMES))
        if draw.random() < 0.1 and rig.book.cancel(number):
            gone.add(number)
    rig.finish()
    for number, out in rig.out.items():
        if number not in gone and number not in doomed and out.error is None:
            rig.assert_right(number)
    rig.assert_empty()
    stats = rig.book.stats()
    assert stats.loads > 0
    assert stats.host is not None
    assert stats.host.used_bytes <= stats.host.limit_bytes
    shelf = rig.below.tiers.disk
    if shelf is not None:
        assert shelf.used_bytes <= 64 * 30
        assert set(shelf) == set(rig.carrier.disk)


MUTANTS: list[Callable[[pytest.MonkeyPatch], None]] = []


def mutant(function: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Note a planted fault."""
    MUTANTS.append(function)
    return function


@mutant
def dropped_blocks_are_copied_too_late(patch: pytest.MonkeyPatch) -> None:
    real = Rig.before_writes
    late: list[int] = []

    def before_writes(self: Rig) -> None:
        late.append(1)
        if len(late) % 3 == 0:
            real(self)

    patch.setattr(Rig, "before_writes", before_writes)


@mutant
def what_did_not_arrive_counts_as_arrived(patch: pytest.MonkeyPatch) -> None:
    real = Loader.done

    def done(self: Loader, moved: Any) -> None:
        loading = self._of[moved.transfer.number]
        loading.arrived |= {(move.kind, move.target) for move in moved.transfer.moves}
        real(self, moved)

    patch.setattr(Loader, "done", done)


@mutant
def a_host_block_that_is_read_may_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostShelf, "pin", lambda self, kind, slot: None)
    patch.setattr(HostShelf, "unpin", lambda self, kind, slot: None)


@mutant
def a_late_load_gives_its_slots_back_at_once(patch: pytest.MonkeyPatch) -> None:
    real = Loader.begin

    def begin(self: Loader, now_s: float, cost: Any) -> Any:
        for loading in self._all:
            for kind, blocks in enumerate(loading.blocks):
                self._ledger.release(kind, [slot for _, slot in blocks], drop=True)
                blocks.clear()
        return real(self, now_s, cost)

    patch.setattr(Loader, "begin", begin)


@mutant
def a_failed_copy_is_kept(patch: pytest.MonkeyPatch) -> None:
    real = Tiers.done

    def done(self: Tiers, moved: Any, now_s: float) -> None:
        if moved.transfer.target == "disk":
            moved = type(moved)(moved.transfer, tuple(64 for _ in moved.stored), moved.begun_s, moved.ended_s)
        real(self, moved, now_s)

    patch.setattr(Tiers, "done", done)


@mutant
def room_is_made_before_what_is_written_is_held(patch: pytest.MonkeyPatch) -> None:
    real = Tiers.send

    def send(self: Tiers, source: Any, target: Any, moves: Any) -> Any:
        for move in moves if target == "disk" else ():
            slot = self.host_slot(move.kind, 0.0)
            if slot:
                self.host.abandon(move.kind, slot)
        return real(self, source, target, moves)

    patch.setattr(Tiers, "send", send)


@mutant
def the_disk_grows_for_ever(patch: pytest.MonkeyPatch) -> None:
    from kimicore.shelf import DiskShelf

    patch.setattr(DiskShelf, "overflow", lambda self, more_bytes=0: [])


@mutant
def a_host_slot_is_given_out_twice(patch: pytest.MonkeyPatch) -> None:
    real = HostShelf.reserve
    last: dict[int, int] = {}

    def reserve(self: HostShelf, kind: int) -> int:
        slot = real(self, kind)
        if slot % 3 == 2 and last.get(kind):
            return last[kind]
        last[kind] = slot
        return slot

    patch.setattr(HostShelf, "reserve", reserve)


def test_the_workload_passes() -> None:
    """Without a planted fault nothing is amiss."""
    workload()


@pytest.mark.parametrize("plant", MUTANTS, ids=lambda one: one.__name__)
def test_a_planted_fault_is_noticed(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workload fails when this one thing is broken."""
    plant(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017  (how it shows differs from fault to fault)
        workload()
