"""Packed weights in the layout of compressed-tensors, and what a config.json says of them.

The layout (https://github.com/vllm-project/compressed-tensors): "pack-quantized" keeps codes of less than 8 bits,
shifted to be unsigned, as one stream of bits for each row, the lowest bits first, in 32-bit words; "int-quantized"
keeps 8-bit codes as they are. Beside them stands a scale for each group or row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kimicore.kernels.packed_linear.layout import unpack_codes
from kimicore.policies.precision.formats import PRECISIONS, NumberFormat
from kimicore.policies.precision.resolving import ResolvedMap
from kimicore.quantize.layers import Stored

__all__ = ["bit_words", "file_tensors", "quantization_config"]

_WORD = 32


def bit_words(codes: Tensor, bits: int) -> Tensor:
    """Return unsigned codes [O, C] of ``bits`` each as a stream of bits in words [O, ceil(C bits / 32)] int32."""
    outs, depth = codes.shape
    runs = -(-depth // _WORD)
    whole = torch.zeros((outs, runs * _WORD), dtype=torch.int64)
    whole[:, :depth] = codes
    whole = whole.view(outs, runs, _WORD)
    words = torch.zeros((outs, runs, bits + 1), dtype=torch.int64)
    for at in range(_WORD):
        word, shift = divmod(at * bits, _WORD)
        value = whole[..., at] << shift
        words[..., word] |= value & 0xFFFFFFFF
        words[..., word + 1] |= value >> _WORD
    flat = words[..., :bits].reshape(outs, -1)[:, : -(-depth * bits // _WORD)]
    return torch.where(flat >= 1 << 31, flat - (1 << 32), flat).to(torch.int32)


def file_tensors(stored: Stored, start: str) -> dict[str, Tensor]:
    """Return a layer's tensors as a file has them; ``start``: what stands before their names."""
    found: dict[str, Tensor] = {}
    for name, value in stored.items():
        if isinstance(value, Tensor):
            found[start + name] = value
            continue
        codes = unpack_codes(value.codes, value.depth, value.bits)
        if value.bits == 8:
            found[start + name] = (codes.short() - value.zero).to(torch.int8)
        else:
            found[f"{start}{name}_packed"] = bit_words(codes, value.bits)
            found[f"{start}{name}_shape"] = torch.tensor(value.shape)
        found[f"{start}{name}_scale"] = value.scales
    return found


def _scheme(form: NumberFormat) -> dict[str, Any]:
    """Return how compressed-tensors describes a format of weights."""
    return {
        "num_bits": form.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group" if form.group else "channel",
        "group_size": form.group or None,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": None,
        "observer_kwargs": {},
    }


def _layout(form: NumberFormat) -> str:
    return "int-quantized" if form.bits == 8 else "pack-quantized"


def quantization_config(found: ResolvedMap) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a config.json: a group for each integer format, its modules by name."""
    groups: dict[str, list[str]] = {}
    ignored: list[str] = []
    for one in found.modules:
        name = one.module.name if one.module.name == "lm_head" else f"model.{one.module.name}"
        if PRECISIONS[one.precision].kind == "int":
            groups.setdefault(one.precision, []).append(name)
        elif len(one.module.shape) == 2 and one.module.kind in ("attention", "ffn", "head"):
            ignored.append(name)
    if not groups:
        return None
    formats = {_layout(PRECISIONS[name]) for name in groups}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ignored,
        "config_groups": {
            f"group_{number}": {
                "targets": targets,
                "weights": _scheme(PRECISIONS[name]),
                "input_activations": None,
                "output_activations": None,
                "format": _layout(PRECISIONS[name]),
            }
            for number, (name, targets) in enumerate(groups.items())
        },
    }
