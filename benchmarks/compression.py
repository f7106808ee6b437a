"""What the codecs of the SSD tier make of real keys and values: one JSON line per model, type and codec.

    python benchmarks/compression.py [--models smollm2-135m-instruct,gemma-3-270m] [--tokens 1536] [--passes 5]

A prompt of English, code and Chinese runs through a model, and the full blocks of its arena, of all KV classes, are
encoded and decoded one by one on one thread, each payload dropped before the next, as a tier that writes and reads
them does. ``ratio`` is raw over stored bytes; MB/s are of raw bytes in the thread's own time (what others take of the
processor does not count) and medians of the passes over all blocks. Every decoded block is compared with what was
encoded.

Types: ``bfloat16`` and ``float32`` are what the model computes in that type. ``float16`` and ``int8`` are the float32
run's KV, rounded (one of the demo models overflows float16 within its layers). int8 is symmetric, from -127 to 127:
keys with a scale per channel within a block, values with a scale per token; the scales themselves are left out.

Codecs: those of ``kimicore.kv.codec``, of which ``auto`` is the tier's default, and ``planes + zstd N``: zstd's own
level N over each plane. A load reads some records while it decodes others, so it is as fast as the slower of both:
``load_mb_per_s`` is the smaller of the rate of decoding and that of reading, in raw bytes, for a disk that reads
``--read`` GB/s. ``auto`` must be the fastest by that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zstandard
from numpy.typing import NDArray

from engine import machine
from kimicore.kernels.byte_planes import select_byte_planes
from kimicore.kernels.registry import select_ops
from kimicore.kv.arena import Arena, slab_bytes
from kimicore.kv.codec import Codec
from kimicore.model.batch import Batch
from kimicore.model.kv_layout import kv_classes
from kimicore.model.load import open_source
from kimicore.model.spec import spec_from_config
from kimicore.model.transformer import Transformer
from kimicore.text.tokenizer import Tokenizer

TEXTS = Path(__file__).parent.parent / "tests" / "data"
DTYPES = ("bfloat16", "float16", "int8", "float32")
BLOCK_TOKENS, CHUNK_TOKENS = 16, 512

Encode = Callable[[memoryview], Any]
Decode = Callable[[Any, memoryview], None]
Blocks = list[NDArray[np.uint8]]


def prompt(tokenizer: Tokenizer, tokens: int) -> list[int]:
    """Return a third each of a story, a program and Chinese, the rest from the story."""
    parts = [tokenizer.encode((TEXTS / name).read_text()) for name in ("ledger.py.txt", "analects.txt")]
    rest = [one for part in parts for one in part[: tokens // 3]]
    story = tokenizer.encode((TEXTS / "alice.txt").read_text())
    return story[: tokens - len(rest)] + rest


def computed(model: str, dtype: torch.dtype, tokens: int) -> list[torch.Tensor]:
    """Return the KV of the prompt, per class [blocks, L, 2, KH, block_tokens, D]."""
    source = open_source(model)
    spec = spec_from_config(source.config)
    ids = prompt(Tokenizer.from_source(source.text), tokens)
    transformer = Transformer.load(spec, source, select_ops("cpu", dtype), dtype)
    classes = kv_classes(spec, str(dtype).removeprefix("torch."), BLOCK_TOKENS)
    blocks = len(ids) // BLOCK_TOKENS
    arena = Arena(classes, (blocks + 2) * slab_bytes(classes))
    ends = range(CHUNK_TOKENS, blocks * BLOCK_TOKENS + CHUNK_TOKENS, CHUNK_TOKENS)
    slots = [torch.arange(1, blocks + 1) * per for per in arena.blocks_per_slab]
    with torch.inference_mode():
        for end in (min(one, blocks * BLOCK_TOKENS) for one in ends):
            at = torch.arange((end - 1) // CHUNK_TOKENS * CHUNK_TOKENS, end)
            batch = Batch(
                token_ids=torch.tensor(ids)[at],
                positions=at,
                row_starts=torch.tensor([0, len(at)], dtype=torch.int32),
                contexts=torch.tensor([end], dtype=torch.int32),
                block_tables=tuple(one.to(torch.int32)[None] for one in slots),
                slots=tuple(one[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS for one in slots),
                rope_tokens=None,
                selected=torch.empty(0, dtype=torch.int64),
            )
            transformer.forward(batch, arena.views)
    found = [view[places] for view, places in zip(arena.views, slots, strict=True)]
    assert all(one.isfinite().all() for one in found)
    return found


def quantized(kv: torch.Tensor) -> torch.Tensor:
    """Return int8: keys scaled per channel within a block, values per token."""
    parts = []
    for which, dim in ((0, -2), (1, -1)):
        part = kv[:, :, which]
        scale = part.abs().amax(dim, keepdim=True).clamp_min(1e-30) / 127
        parts.append((part / scale).round().to(torch.int8))
    return torch.stack(parts, dim=2)


def blocks_of(model: str, tokens: int) -> Iterator[tuple[str, int, Blocks]]:
    """Yield each type's name, its size in bytes and the bytes of all blocks."""
    for name in ("bfloat16", "float32"):
        kv = computed(model, getattr(torch, name), tokens)
        forms = {name: kv}
        if name == "float32":
            forms = {"float16": [one.half() for one in kv], "int8": [quantized(one) for one in kv], **forms}
        for form, parts in forms.items():
            flat = [one.flatten(1).contiguous() for one in parts]
            yield form, flat[0].element_size(), [line for one in flat for line in one.view(torch.uint8).numpy()]


def of_codec(name: str, level: int, item_bytes: int) -> tuple[Encode, Decode]:
    """Return a codec's two ways; what is encoded is its payload and number."""
    codec = Codec(name, level)
    return (
        lambda raw: codec.encode(raw, item_bytes),
        lambda encoded, out: codec.decode(encoded.codec, encoded.payload, out, item_bytes),
    )


def plain_planes(level: int, item_bytes: int) -> tuple[Encode, Decode]:
    """Return zstd's own level over each plane, stored planes where a frame is no shorter."""
    ops, compressor = select_byte_planes(), zstandard.ZstdCompressor(level=level)
    decompressor = zstandard.ZstdDecompressor()

    def encode(raw: memoryview) -> list[bytes]:
        planes = np.empty((item_bytes, len(raw) // item_bytes), np.uint8)
        ops.split(np.frombuffer(raw, np.uint8), planes)
        return [min((compressor.compress(plane.data), plane.tobytes()), key=len) for plane in planes]

    def decode(parts: Sequence[bytes], out: memoryview) -> None:
        size = len(out) // item_bytes
        whole = [part if len(part) == size else decompressor.decompress(part) for part in parts]
        ops.join([np.frombuffer(one, np.uint8) for one in whole], np.frombuffer(out, np.uint8))

    return encode, decode


def stored_bytes(encoded: Any) -> int:
    """Return the payload's length."""
    return sum(map(len, encoded)) if isinstance(encoded, list) else len(encoded.payload)


def contestants(item_bytes: int) -> dict[str, tuple[Encode, Decode]]:
    """Return what is compared, by name."""
    return {
        "raw": of_codec("raw", 1, item_bytes),
        "zstd 1": of_codec("zstd", 1, item_bytes),
        "zstd 3": of_codec("zstd", 3, item_bytes),
        "planes + zstd -1": plain_planes(-1, item_bytes),
        "planes + zstd 1": plain_planes(1, item_bytes),
        "planes + zstd 3": plain_planes(3, item_bytes),
        "planes-zstd": of_codec("planes-zstd", 1, item_bytes),
        "planes-packed": of_codec("planes-packed", 1, item_bytes),
        "auto": of_codec("auto", 1, item_bytes),
    }


def measure(blocks: Blocks, encode: Encode, decode: Decode, passes: int, read_gb_per_s: float) -> dict[str, Any]:
    """Return the ratio and both speeds over all blocks; each block is compared."""
    raw_bytes = sum(one.size for one in blocks)
    stored, encode_s, decode_s = 0, [], []
    out = np.empty(max(one.size for one in blocks), np.uint8)
    for _ in range(passes + 1):
        stored, spent = 0, [0.0, 0.0]
        for block in blocks:
            room = out[: block.size]
            begun = time.thread_time()
            encoded = encode(block.data)
            between = time.thread_time()
            decode(encoded, room.data)
            spent[1] += time.thread_time() - between
            spent[0] += between - begun
            assert np.array_equal(room, block)
            stored += stored_bytes(encoded)
        encode_s.append(spent[0])
        decode_s.append(spent[1])
    load_s = max(stored / read_gb_per_s / 1e9, statistics.median(decode_s[1:]))
    return {  # the first pass sets up what each thread has of its own
        "ratio": round(raw_bytes / stored, 3),
        "encode_mb_per_s": round(raw_bytes / statistics.median(encode_s[1:]) / 1e6),
        "decode_mb_per_s": round(raw_bytes / statistics.median(decode_s[1:]) / 1e6),
        "load_mb_per_s": round(raw_bytes / load_s / 1e6),
    }


def main() -> None:
    """Read the command line and print the lines."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--models", default="smollm2-135m-instruct,gemma-3-270m")
    parser.add_argument("--dtypes", default=",".join(DTYPES), help=f"of {', '.join(DTYPES)}")
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--read", type=float, default=1.84, help="GB/s that the disk reads")
    options = parser.parse_args()
    wanted = options.dtypes.split(",")
    if not set(wanted) <= set(DTYPES):
        parser.error(f"--dtypes {options.dtypes}: must be of {', '.join(DTYPES)}")
    planes = select_byte_planes().implementation
    zstd = ".".join(map(str, zstandard.ZSTD_VERSION))
    print(json.dumps({"case": "machine", "zstd": zstd, "byte_planes": planes, **machine()}), flush=True)
    for model in options.models.split(","):
        for dtype, item_bytes, blocks in blocks_of(model, options.tokens):
            if dtype not in wanted:
                continue
            case = {
                "model": model,
                "dtype": dtype,
                "blocks": len(blocks),
                "block_bytes": sorted({b.size for b in blocks}),
            }
            for name, (encode, decode) in contestants(item_bytes).items():
                found = measure(blocks, encode, decode, options.passes, options.read)
                print(json.dumps({**case, "codec": name, **found}), flush=True)


if __name__ == "__main__":
    main()
