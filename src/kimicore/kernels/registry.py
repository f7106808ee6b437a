"""The frozen table of operations: which implementation serves each, chosen once at load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from attrs import evolve, field, fields, frozen

from kimicore.errors import ConfigError
from kimicore.kernels.block_mass import native as native_block_mass
from kimicore.kernels.block_mass import reference as reference_block_mass
from kimicore.kernels.build import compile_all
from kimicore.kernels.choose_blocks import native as native_choose_blocks
from kimicore.kernels.choose_blocks import reference as reference_choose_blocks
from kimicore.kernels.gated_act import native as native_gated_act
from kimicore.kernels.gated_act import reference as reference_gated_act
from kimicore.kernels.gumbel import GumbelOp
from kimicore.kernels.gumbel import native as native_gumbel
from kimicore.kernels.gumbel.reference import gumbel
from kimicore.kernels.key_summary import native as native_key_summary
from kimicore.kernels.key_summary import reference as reference_key_summary
from kimicore.kernels.kv_quantize import native as native_kv_quantize
from kimicore.kernels.kv_quantize import reference as reference_kv_quantize
from kimicore.kernels.linear import native as native_linear
from kimicore.kernels.linear import reference as reference_linear
from kimicore.kernels.linear.floor import row_floor, row_invariant_linear
from kimicore.kernels.linear.shapes import few_shapes_linear
from kimicore.kernels.ops import (
    ArrangeOp,
    BlockMassOp,
    ChooseBlocksOp,
    GatedActOp,
    KeySummaryOp,
    KvQuantizeOp,
    LinearOp,
    PackedLinearInt8Op,
    PackedLinearOp,
    PackedRowsOp,
    PagedAttentionOp,
    QuantizedAttentionOp,
    RmsNormOp,
    RotaryWriteOp,
)
from kimicore.kernels.packed_linear import native as native_packed_linear
from kimicore.kernels.packed_linear import reference as reference_packed_linear
from kimicore.kernels.paged_attention import native as native_paged_attention
from kimicore.kernels.paged_attention import quantized, quantized_native, tiled
from kimicore.kernels.paged_attention import reference as reference_attention
from kimicore.kernels.rms_norm import native as native_rms_norm
from kimicore.kernels.rms_norm import reference as reference_rms_norm
from kimicore.kernels.rotary_write import native as native_rotary
from kimicore.kernels.rotary_write import reference as reference_rotary
from kimicore.kernels.team.native import parallel_entry
from kimicore.kernels.trial import TRIALS

__all__ = ["OpOrigin", "Ops", "describe", "select_ops"]

_OFF: Final = "native kernels are turned off"
_PROBED_SHAPES: Final = ((576, 576), (1536, 576), (576, 1536), (1024, 2048))


@frozen
class OpOrigin:
    """Which implementation serves an operation, and why it was chosen."""

    op: str
    implementation: str
    why: str


@frozen(eq=False)
class Ops:
    """The operations that a model runs on; each field is called as its reference is."""

    linear: LinearOp
    rms_norm: RmsNormOp
    rotary_write: RotaryWriteOp
    gated_act: GatedActOp
    paged_attention: PagedAttentionOp
    block_mass: BlockMassOp
    gumbel: GumbelOp
    key_summary: KeySummaryOp
    choose_blocks: ChooseBlocksOp
    kv_quantize: KvQuantizeOp
    quantized_attention: QuantizedAttentionOp
    packed_linear: PackedLinearOp
    packed_linear_int8: PackedLinearInt8Op
    packed_rows: PackedRowsOp
    arrange: ArrangeOp
    origins: tuple[OpOrigin, ...] = field(default=(), kw_only=True)


def _short(why: str) -> str:
    return f"no native version: {why}"


def _tried(op: str, load: Callable[[], tuple[Any, str]], dtype: torch.dtype) -> tuple[Any | None, str]:
    found, why = load()
    if found is not None and op in TRIALS and not TRIALS[op](found, dtype):
        return None, f"{why}, but its results differ from the reference"
    return found, why


def _linear(dtype: torch.dtype, native: bool, shapes: Sequence[tuple[int, int]]) -> tuple[LinearOp, OpOrigin]:
    found, why = _tried("linear", lambda: native_linear.load(dtype), dtype) if native else (None, _OFF)
    if found is not None:
        rows = native_linear.most_rows(dtype)
        few = "" if rows == native_linear.ALL_ROWS else f" for up to {rows} rows, torch above"
        return found, OpOrigin("linear", "native", why + few)
    if dtype != torch.float32:
        return few_shapes_linear(), OpOrigin("linear", "torch", _short(why))
    floor = row_floor(shapes or _PROBED_SHAPES, dtype)
    if floor is None:
        remark = "a row's bits may depend on the batch: no number of rows was found from which they do not"
        return reference_linear.linear, OpOrigin("linear", "torch", f"{_short(why)}; {remark}")
    remark = f"rows are padded to {floor}, so that a row's bits do not depend on the batch"
    return row_invariant_linear(floor), OpOrigin("linear", "torch", f"{_short(why)}; {remark}")


def _paged_attention(dtype: torch.dtype, native: bool) -> tuple[PagedAttentionOp, OpOrigin]:
    found, why = _tried("paged_attention", native_paged_attention.load, dtype) if native else (None, _OFF)
    if found is not None:
        return found, OpOrigin("paged_attention", "native", why)
    if dtype == torch.float32:
        return tiled.paged_attention, OpOrigin("paged_attention", "torch, tiled", _short(why))
    return reference_attention.paged_attention, OpOrigin("paged_attention", "torch", _short(why))


def _quantized_attention(dtype: torch.dtype, native: bool) -> tuple[QuantizedAttentionOp, OpOrigin]:
    found, why = _tried("quantized_attention", quantized_native.load, dtype) if native else (None, _OFF)
    if found is not None:
        return found, OpOrigin("quantized_attention", "native", why)
    if dtype == torch.float32:
        return quantized.tiled_quantized_attention, OpOrigin("quantized_attention", "torch, tiled", _short(why))
    return quantized.quantized_attention, OpOrigin("quantized_attention", "torch", _short(why))


def _chosen(
    op: str, load: Callable[[], tuple[Any, str]], reference: Any, dtype: torch.dtype, native: bool
) -> tuple[Any, OpOrigin]:
    found, why = _tried(op, load, dtype) if native else (None, _OFF)
    if found is None:
        return reference, OpOrigin(op, "torch", _short(why))
    return found, OpOrigin(op, "native", why)


def _packed_linear_int8(
    product: PackedLinearOp, dtype: torch.dtype, native: bool
) -> tuple[PackedLinearInt8Op, OpOrigin]:
    load = partial(native_packed_linear.load_int8, dtype)
    found, why = _tried("packed_linear_int8", load, dtype) if native else (None, _OFF)
    if found is not None:
        return found, OpOrigin("packed_linear_int8", "native", why)
    remark = f"{_short(why)}; inputs are rounded to 8 bits, and multiplied by packed_linear"
    return reference_packed_linear.after_rounding(product), OpOrigin("packed_linear_int8", "torch", remark)


def _chosen_alike(dtype: torch.dtype) -> list[tuple[str, Callable[[], tuple[Any, str]], Any]]:
    """Return the operations that are native where they can be, and else their reference: (name, load, reference)."""
    return [
        ("rms_norm", native_rms_norm.load, reference_rms_norm.rms_norm),
        ("rotary_write", native_rotary.load, reference_rotary.rotary_write),
        ("gated_act", native_gated_act.load, reference_gated_act.gated_act),
        ("block_mass", native_block_mass.load, reference_block_mass.block_mass),
        ("gumbel", native_gumbel.load, gumbel),
        ("key_summary", native_key_summary.load, reference_key_summary.key_summary),
        ("choose_blocks", native_choose_blocks.load, reference_choose_blocks.choose_blocks),
        ("kv_quantize", native_kv_quantize.load, reference_kv_quantize.kv_quantize),
        ("packed_linear", partial(native_packed_linear.load, dtype), reference_packed_linear.packed_linear),
        ("arrange", partial(native_packed_linear.load_arrange, dtype), reference_packed_linear.arrange),
        ("packed_rows", partial(native_packed_linear.load_rows, dtype), reference_packed_linear.packed_rows),
    ]


def select_ops(device: str, dtype: torch.dtype, *, native: bool = True, shapes: Sequence[tuple[int, int]] = ()) -> Ops:
    """Return the table for ``device`` ("cpu") and ``dtype``, compiling what is not in the cache yet.

    ``native`` False keeps to torch. ``shapes``: the weights' (O, C), for which torch's float32 product is
    examined where it has to serve. Never fails for want of a compiler: :func:`describe` tells. Raises
    ConfigError for a device or type that is not served.
    """
    if device != "cpu":
        raise ConfigError(f"device={device!r}: must be 'cpu'")
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ConfigError(f"dtype={dtype}: must be float32, bfloat16 or float16")
    if native:
        compile_all(sorted(Path(__file__).parent.glob("*/*.cpp")))
    found: dict[str, tuple[Any, OpOrigin]] = {
        "linear": _linear(dtype, native, shapes),
        "paged_attention": _paged_attention(dtype, native),
        "quantized_attention": _quantized_attention(dtype, native),
    }
    for op, load, reference in _chosen_alike(dtype):
        found[op] = _chosen(op, load, reference, dtype, native)
    found["packed_linear_int8"] = _packed_linear_int8(found["packed_linear"][0], dtype, native)
    origins = [found[one.name][1] for one in fields(Ops) if one.name in found]
    if native and parallel_entry() is None:
        remark = "; on one thread, since the team of threads could not be built"
        origins = [evolve(o, why=o.why + remark) if o.implementation == "native" else o for o in origins]
    return Ops(**{op: implementation for op, (implementation, _) in found.items()}, origins=tuple(origins))


def describe(ops: Ops) -> tuple[tuple[str, str, str], ...]:
    """Return ``(operation, implementation, why)`` for every operation, for a report."""
    return tuple((origin.op, origin.implementation, origin.why) for origin in ops.origins)
