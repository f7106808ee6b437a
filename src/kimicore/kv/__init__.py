"""The KV cache's device side: the arena that blocks live in."""
