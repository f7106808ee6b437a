"""Shows with a real model that a policy, chosen by its name, changes who is served when."""

from __future__ import annotations

import anyio

import kimicore


async def served(batching: str) -> list[str]:
    """Return whose requests end, in order: there is one place, and the first tenant asks three times first."""
    # The limit on a policy's time is for real use; a busy machine must not decide what this shows.
    config = kimicore.EngineConfig(batching=batching, max_batch_size=1, kv_device_bytes="64MiB", policy_limit_s=60.0)
    ended: list[str] = []

    async def ask(engine: kimicore.Engine, tenant: str) -> None:
        await engine.generate("Once upon a time", max_tokens=16, ignore_eos=True, tenant=tenant)
        ended.append(tenant)

    async with kimicore.Engine("smollm2-135m-instruct", config) as engine, anyio.create_task_group() as tasks:
        for tenant in ("first", "first", "first", "second"):
            tasks.start_soon(ask, engine, tenant)
    return ended


for name, expected in (("fcfs", 3), ("tenant-turns", 1)):
    order = anyio.run(served, name)
    print(f"{name:13}", *order)
    assert order.index("second") == expected, order
