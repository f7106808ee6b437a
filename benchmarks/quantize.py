"""Ways to round a model's weights, by what they lose: one JSON line per map and method.

    python benchmarks/quantize.py [--model smollm2-135m-instruct] [--maps asymmetric,uniform-int4,...]
        [--methods nearest,awq,gptq,awq-gptq] [--samples 64] [--held-out 6]

A map may carry settings: ``asymmetric:ffn=int8``. The model is computed in float32, with its weights as they are read
and as each map and method leaves them (one matrix more exists at a time, no file is written). ``kl``: mean of
KL(float32 || rounded) in nats a token over ``--held-out`` windows of 256 tokens of a book in English, one of Chinese
classics and a program, none of which is in the calibration set; ``kl_by_text`` in that order; ``agreement``: share of
positions with the same most likely token. ``output_error``: squared error of the outputs of all rounded matrices over
the squared outputs, on the held-out windows as they enter each layer of the plain model, the mean over matrices;
missing where channels are scaled, whose matrices have other inputs. ``seconds``: of the rounding.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kimicore.kernels.packed_linear.layout import PackedWeight
from kimicore.model.load import open_source
from kimicore.model.modules import modules_of
from kimicore.policies.precision import ResolvedMap
from kimicore.policies.precision.named import policy_named, resolved_by
from kimicore.quantize.calibration import calibration_texts, calibration_tokens
from kimicore.quantize.decoder import Decoder
from kimicore.quantize.layers import LayerRounding, stored_weight
from kimicore.quantize.methods import QuantizeSettings
from kimicore.quantize.reading import ModelReader
from kimicore.text.tokenizer import Tokenizer

DATA = Path(__file__).parent.parent / "tests" / "data"
WINDOW = 256
Layer = dict[str, Tensor]


class Bench:
    """A model in float32, held-out windows, and its own distributions on them."""

    def __init__(self, options: argparse.Namespace) -> None:
        source = open_source(options.model)
        tokenizer = Tokenizer.from_source(source.text)
        held = {one: (DATA / one).read_text(encoding="utf-8") for one in ("alice.txt", "analects.txt", "ledger.py.txt")}
        self.texts = len(held)
        self.held = calibration_tokens(tokenizer, held, options.held_out, WINDOW)
        self.calibration = calibration_tokens(tokenizer, calibration_texts(), options.samples, WINDOW)
        self.reader = ModelReader.of(source)
        self.layers = range(len(self.reader.spec.layers))
        self.decoder = Decoder.make(self.reader.spec, WINDOW)
        self.table = self.reader.embedding()
        own = self.reader.own_head()
        self.head = self.table if own is None else own
        self.norm = self.reader.final_norm()
        self.wanted = self.scores([self.reader.layer(index) for index in self.layers])

    def scores(self, layers: list[Layer]) -> Tensor:
        """Return log-probabilities [N, T, V] of the held-out windows."""
        hidden = self.decoder.embed(self.table, self.held)
        for index, weights in enumerate(layers):
            hidden = self.decoder.layer(hidden, weights, index)
        return self.decoder.logits(hidden, self.norm, self.head).log_softmax(-1)

    def row(self, found: ResolvedMap, method: str) -> dict[str, Any]:
        """Return what a map and a method lose."""
        precisions = {one.module.name: one.precision for one in found.modules}
        rounding = LayerRounding(self.decoder, precisions, QuantizeSettings(method=method))
        calibrated = rounding.settings.method.calibrated
        hidden = self.decoder.embed(self.table, self.calibration) if calibrated else None
        began = time.perf_counter()
        layers, errors = [], []
        plain = self.decoder.embed(self.table, self.held)
        seconds = 0.0
        for index in self.layers:
            weights = self.reader.layer(index)
            began = time.perf_counter()
            stored, hidden = rounding.quantize(index, weights, hidden)
            seconds += time.perf_counter() - began
            if not rounding.settings.method.scaling:
                errors += self.output_errors(index, weights, stored, plain)
            plain = self.decoder.layer(plain, weights, index)
            layers.append({name: stored_weight(value) for name, value in stored.items()})
        logs = self.scores(layers)
        kl = (self.wanted.exp() * (self.wanted - logs)).sum(-1)
        agree = (self.wanted.argmax(-1) == logs.argmax(-1)).float()
        return {
            "kl": round(float(kl.mean()), 5),
            "kl_by_text": [round(float(kl[at :: self.texts].mean()), 5) for at in range(self.texts)],
            "agreement": round(float(agree.mean()), 4),
            "output_error": float(f"{sum(errors) / len(errors):.3g}") if errors else None,
            "seconds": round(seconds, 1),
        }

    def output_errors(self, index: int, weights: Layer, stored: dict[str, Any], hidden: Tensor) -> list[float]:
        """Return the relative squared output error of each rounded matrix of a layer."""
        decoder = self.decoder
        into = decoder.attention_in(hidden, weights)
        attended = decoder.attend(into, weights, index)
        after = decoder.after_attention(hidden, attended, weights)
        mlp_in = decoder.mlp_in(after, weights)
        inputs = {
            "o_proj": attended,
            "gate_proj": mlp_in,
            "up_proj": mlp_in,
            "down_proj": decoder.mlp_mid(mlp_in, weights),
        }
        errors = []
        for name, value in stored.items():
            if isinstance(value, PackedWeight):
                x = inputs.get(name.split(".")[-2], into)
                whole = x @ weights[name].t()
                errors.append(float((x @ stored_weight(value).t() - whole).square().sum() / whole.square().sum()))
        return errors


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--maps", default="asymmetric,asymmetric:ffn=int5,asymmetric:ffn=int8,uniform-int4")
    parser.add_argument("--methods", default="nearest,awq,gptq,awq-gptq")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--held-out", type=int, default=6)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    with torch.inference_mode():
        bench = Bench(options)
        modules = modules_of(bench.reader.spec)
        for text in options.maps.split(","):
            name, _, pair = text.partition(":")
            settings = dict([pair.split("=")]) if pair else {}
            found = resolved_by(policy_named(name, settings), modules)
            for method in options.methods.split(","):
                row = bench.row(found, method)
                print(json.dumps({"model": options.model, "map": text, "method": method, **row}), flush=True)


if __name__ == "__main__":
    main()
