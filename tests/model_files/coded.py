"""Writes quantized matrices as other tools do, a number at a time, and says what they mean; independent of the package.

Layouts: compressed-tensors 0.20 (``compressors/pack_quantized/helpers.py``) and, for codes that no 32 bits hold whole,
its releases before 0.15; AutoAWQ 0.2.9 (``modules/linear/gemm.py``); AutoGPTQ 0.7.1 (``nn_modules/qlinear``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from attrs import frozen

AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


@frozen
class Written:
    """A quantized matrix: its parts by the last words of their names, and the float32 weights [O, C] that they mean."""

    parts: dict[str, torch.Tensor]
    values: torch.Tensor


def stream(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [R, N] behind each other, bit by bit, in little-endian words [R, W]."""
    words = -(-codes.shape[1] * bits // 32)
    out = np.zeros((len(codes), words), dtype=np.uint32)
    for row, line in enumerate(codes.tolist()):
        number = sum(code << (bits * at) for at, code in enumerate(line))
        out[row] = [number >> (32 * word) & 0xFFFFFFFF for word in range(words)]
    return out.view(np.int32)


def spaced(codes: np.ndarray, bits: int, places: tuple[int, ...] | None = None) -> np.ndarray:
    """Codes [R, N], as many in a word as fit whole: [R, W]; ``places``: which code stands at each place of a word."""
    each = 32 // bits
    words = -(-codes.shape[1] // each)
    out = np.zeros((len(codes), words), dtype=np.uint32)
    for row in range(len(codes)):
        for word in range(words):
            for place in range(each):
                at = word * each + (places[place] if places else place)
                if at < codes.shape[1]:
                    out[row, word] |= np.uint32(int(codes[row, at]) << (bits * place))
    return out.view(np.int32)


def _meant(codes: np.ndarray, zeros: np.ndarray, scales: torch.Tensor, of: np.ndarray) -> torch.Tensor:
    """(code - zero) * scale with the group of each input: codes [O, C], zeros and scales [O, G], groups [C]."""
    whole = torch.from_numpy((codes.astype(np.int64) - zeros.astype(np.int64)[:, of]).astype(np.float32))
    return whole * scales.float()[:, torch.from_numpy(of)]


def _tensor(words: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(words))


def _numbers(
    source: int | torch.Tensor, outs: int, depth: int, bits: int, of: np.ndarray, dtype: torch.dtype, symmetric: bool
) -> Any:
    """Codes, zeros and scales: random ones of a seed, or those of a weight rounded to nearest in its groups."""
    groups = int(of.max()) + 1
    if isinstance(source, torch.Tensor):
        return _rounded(source, bits, of, groups, dtype, symmetric)
    random = np.random.default_rng(source)
    codes = random.integers(0, 1 << bits, (outs, depth))
    zeros = random.integers(0, 1 << bits, (outs, groups))
    scales = torch.from_numpy(random.uniform(0.005, 0.03, (outs, groups)).astype(np.float32)).to(dtype)
    if symmetric:
        zeros[:] = 1 << (bits - 1)
    return codes, zeros, scales


def _rounded(weight: torch.Tensor, bits: int, of: np.ndarray, groups: int, dtype: torch.dtype, symmetric: bool) -> Any:
    codes = np.zeros(weight.shape, dtype=np.int64)
    zeros = np.zeros((len(weight), groups), dtype=np.int64)
    scales = torch.zeros((len(weight), groups), dtype=dtype)
    top = (1 << bits) - 1
    for group in range(groups):
        own = weight[:, torch.from_numpy(of == group)].float()
        low, high = own.amin(dim=1), own.amax(dim=1)
        if symmetric:
            high = torch.maximum(high, -low)
            low = -high
        scales[:, group] = ((high - low) / top).to(dtype)
        step = scales[:, group].float()
        zero = torch.full_like(step, 1 << (bits - 1)) if symmetric else torch.round(-low / step).clamp(0, top)
        zeros[:, group] = zero.numpy().astype(np.int64)
        codes[:, of == group] = torch.round(own / step[:, None] + zero[:, None]).clamp(0, top).numpy()
    return codes, zeros, scales


def compressed(
    source: int | torch.Tensor,
    outs: int,
    depth: int,
    *,
    bits: int = 4,
    group: int = 0,
    symmetric: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    form: str = "stream",
    order: np.ndarray | None = None,
) -> Written:
    """A matrix of compressed-tensors; ``group`` 0: whole rows. ``form``: "stream", "spaced", or "bytes"."""
    of = np.arange(depth) // (group or depth) if order is None else order
    codes, zeros, scales = _numbers(source, outs, depth, bits, of, dtype, symmetric)
    middle = 1 << (bits - 1)
    parts: dict[str, torch.Tensor] = {"weight_scale": scales}
    if form == "bytes":
        parts["weight"] = _tensor((codes - middle).astype(np.int8))
        if not symmetric:
            parts["weight_zero_point"] = _tensor((zeros - middle).astype(np.int8))
    else:
        pack = stream if form == "stream" else spaced
        parts["weight_packed"] = _tensor(pack(codes, bits))
        parts["weight_shape"] = torch.tensor([outs, depth])
        if not symmetric:
            parts["weight_zero_point"] = _tensor(pack(zeros.T, bits).T)
    if order is not None:
        parts["weight_g_idx"] = torch.from_numpy(order.astype(np.int32))
    return Written(parts, _meant(codes, zeros, scales, of))


def awq(source: int | torch.Tensor, outs: int, depth: int, *, group: int = 0) -> Written:
    """A matrix of AutoAWQ's GEMM version: 4 bits, inputs first, eight outputs in a word."""
    of = np.arange(depth) // (group or depth)
    codes, zeros, scales = _numbers(source, outs, depth, 4, of, torch.float16, False)
    parts = {
        "qweight": _tensor(spaced(codes.T, 4, AWQ_PLACES)),
        "qzeros": _tensor(spaced(zeros.T, 4, AWQ_PLACES)),
        "scales": scales.T.contiguous(),
    }
    return Written(parts, _meant(codes, zeros, scales, of))


def gptq(
    source: int | torch.Tensor,
    outs: int,
    depth: int,
    *,
    bits: int = 4,
    group: int = 0,
    version: int = 1,
    order: np.ndarray | None = None,
) -> Written:
    """A matrix of GPTQ: words along the inputs; ``version`` 1 stores zeros one less, modulo their bits."""
    of = np.arange(depth) // (group or depth) if order is None else order
    codes, zeros, scales = _numbers(source, outs, depth, bits, of, torch.float16, False)
    stored = (zeros - 1) % (1 << bits) if version == 1 else zeros
    parts = {
        "qweight": _tensor(spaced(codes, bits).T),
        "qzeros": _tensor(spaced(stored.T, bits)),
        "scales": scales.T.contiguous(),
        "g_idx": torch.from_numpy(of.astype(np.int32)),
    }
    return Written(parts, _meant(codes, zeros, scales, of))


def act_order(seed: int, depth: int, group: int) -> np.ndarray:
    """Groups of inputs as act-order leaves them: each has as many, in no order."""
    return np.random.default_rng(seed).permutation(np.arange(depth) // group)


GROUP_128: dict[str, Any] = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}


def compressed_config(form: str = "pack-quantized", ignore: list[str] | None = None, **weights: Any) -> dict[str, Any]:
    """A quantization config of compressed-tensors with one group for all linear layers."""
    group = {"targets": ["Linear"], "weights": {**GROUP_128, **weights}, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"] if ignore is None else ignore,
        "quantization_status": "compressed",
    }


KINDS = ("packed", "zeros", "bytes", "awq", "gptq", "act-order")


def written_as(kind: str, weight: torch.Tensor) -> Written:
    """A weight in one of the kinds of folders, in groups of 32 where the kind has groups."""
    outs, depth = weight.shape
    if kind in ("packed", "zeros"):
        return compressed(weight, outs, depth, group=32, symmetric=kind == "packed")
    if kind == "bytes":
        return compressed(weight, outs, depth, bits=8, form="bytes")
    if kind == "awq":
        return awq(weight, outs, depth, group=32)
    order = act_order(outs, depth, 32) if kind == "act-order" else None
    return gptq(weight, outs, depth, group=32, order=order)


def config_as(kind: str) -> dict[str, Any]:
    """The quantization config of a kind of folder."""
    if kind in ("packed", "zeros"):
        return compressed_config(group_size=32, symmetric=kind == "packed")
    if kind == "bytes":
        return compressed_config("int-quantized", num_bits=8, strategy="channel", group_size=None)
    if kind == "awq":
        return {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": kind == "act-order"}


def quantized(
    tensors: Mapping[str, torch.Tensor], kind: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """A model's tensors with all its projections quantized, and the same with the weights that these mean."""
    coded: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            coded[name] = plain[name] = tensor
            continue
        written = written_as(kind, tensor)
        plain[name] = written.values
        coded |= {f"{name.removesuffix('weight')}{word}": part for word, part in written.parts.items()}
    return coded, plain
