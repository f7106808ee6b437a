"""What has ended is forgotten."""

from __future__ import annotations

import gc
import weakref

from rig import Output, Rig

from kimicore.requests import Request


def test_no_request_outlives_its_end():
    """After 5,000 tiny requests, half of them cancelled, not one request object is left (vllm-mlx#154)."""

    def requests() -> int:
        gc.collect()
        return sum(type(one) is Request for one in gc.get_objects())

    before = requests()  # what other tests have left
    rig = Rig(slabs=200, max_batch_size=64, max_batch_tokens=512)
    living: list[weakref.ref[object]] = []
    for at in range(5000):
        number = rig.submit([at % 50, at // 50 % 50, 3], 1, timeout_s=1e6)
        living.append(weakref.ref(rig.news.pop(number)))
        del rig.out[number]
        rig.out = Ignore()
        if at % 2:
            rig.book.cancel(number)
        if at % 50 == 49:
            while not rig.book.idle:
                rig.commit(rig.bind())
            rig.steps.clear()
    assert requests() <= before
    assert not any(one() for one in living)
    assert len(rig.book._deadlines) < 200


class Ignore(dict):
    """Outputs that nobody reads."""

    def __missing__(self, key: int):
        return Output()
