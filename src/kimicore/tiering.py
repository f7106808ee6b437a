"""Building the lower tiers of the KV cache from the settings."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

from attrs import frozen

from kimicore.clock import Clock
from kimicore.config import EngineConfig
from kimicore.errors import ConfigError
from kimicore.kv.arena import Arena
from kimicore.kv.disk import DiskStore
from kimicore.kv.host import HostArena
from kimicore.ledger import Ledger
from kimicore.memory import available_bytes
from kimicore.mover import Mover
from kimicore.plugins import faults_of, resolve
from kimicore.prefix import KeyContext
from kimicore.shelf import DiskShelf, HostShelf
from kimicore.tiers import BATCH, Tiers

__all__ = ["LowerTiers", "lower_tiers"]

DEFAULT_DISK_BYTES = 8 << 30
LEAST_DISK_BYTES = 16 << 20
STAGING_BYTES = 128 << 20


@frozen
class LowerTiers:
    """What is built for the tiers below the device: the carrier, the bookkeeping, and the secret of the block keys."""

    mover: Mover
    tiers_of: Callable[[Ledger], Tiers]
    secret: bytes | None


def lower_tiers(config: EngineConfig, arena: Arena, contexts: Sequence[KeyContext], clock: Clock) -> LowerTiers | None:
    """Return the tiers that the settings ask for, None where they ask for none.

    Raises :class:`~kimicore.ConfigError` for a host arena that memory does not hold, and a folder that cannot serve.
    """
    wanted = config.kv_host_bytes or 0
    if not wanted and config.kv_disk_dir is None:
        return None
    slabs = wanted // arena.slab_bytes
    if wanted:
        available = available_bytes()
        if wanted + arena.total_bytes > available:  # neither has taken its pages yet
            raise ConfigError(
                f"kv_host_bytes={wanted}: only {available} bytes of memory are available, and the KV arena of the "
                f"device takes {arena.total_bytes} of them; lower one of them"
            )
        if slabs < 1 + len(arena.classes):
            least = (1 + len(arena.classes)) * arena.slab_bytes
            raise ConfigError(f"kv_host_bytes={wanted}: at least {least} bytes are needed, or 0 for none")
    else:
        slabs = max(2 * BATCH + 1, STAGING_BYTES // arena.slab_bytes)
    store = _store(config)
    try:
        host = HostArena(arena.classes, arena.slab_bytes, slabs)
    except BaseException:
        if store is not None:
            store.close()
        raise
    layouts = [blake2b(one.kv_class, digest_size=16).digest() for one in contexts]
    mover = Mover(arena.classes, arena.memory.numpy(), host.memory, store, layouts, clock, readers=config.io_threads)

    def tiers_of(ledger: Ledger) -> Tiers:
        eviction = resolve("eviction", config.eviction, config.policy.get("eviction"))
        faults = faults_of("eviction", config.eviction, config)
        shelf = HostShelf(arena.classes, arena.slab_bytes, slabs, eviction, faults=faults)
        disk = None
        if store is not None:
            entries = [(one.key, one.stored_bytes) for one in store.entries()]
            disk = DiskShelf(store.stats().live_bytes + store.room_bytes, entries)
        return Tiers(
            ledger,
            shelf,
            disk,
            staging=not wanted,
            admission=config.kv_disk_uses,
        )

    return LowerTiers(mover, tiers_of, None if store is None else store.secret)


def _store(config: EngineConfig) -> DiskStore | None:
    if config.kv_disk_dir is None:
        return None
    limit = config.kv_disk_bytes
    try:
        folder = Path(config.kv_disk_dir).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"kv_disk_dir={config.kv_disk_dir!r}: {error} write the path in full") from error
    if limit is None:
        near = next((path for path in (folder, *folder.absolute().parents) if path.is_dir()), Path("/"))
        limit = min(DEFAULT_DISK_BYTES, shutil.disk_usage(near).free // 2)
    if limit < LEAST_DISK_BYTES:
        raise ConfigError(f"kv_disk_bytes={limit}: at least {LEAST_DISK_BYTES} bytes are needed; raise it")
    return DiskStore.open(folder, limit)
