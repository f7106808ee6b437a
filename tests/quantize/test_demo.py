"""The demo models, which come as GGUF files: the written folder is complete, and others load it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from tests.quantize.test_folder import resolved
from tests.quantize.test_layers import whole_logits

from kimicore.model.load import open_source
from kimicore.quantize.methods import QuantizeSettings
from kimicore.quantize.reading import ModelReader
from kimicore.quantize.run import quantize_model


@pytest.mark.parametrize("path", ["smollm2_path", "gemma_path"])
def test_a_gguf_file_becomes_a_folder(path: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Quantized from a GGUF file, a demo model has the same logits in transformers as its weights have here."""
    source = request.getfixturevalue(path)
    found = resolved(source, "asymmetric", {"ffn": "int4-g32"})
    made = quantize_model(source, tmp_path / "out", found, QuantizeSettings(method="nearest"))
    config = json.loads((made.folder / "config.json").read_text())
    assert config["architectures"][0].endswith("ForCausalLM")
    assert made.ffn_share == 1.0
    reader = ModelReader.of(open_source(made.folder))
    layers = [reader.layer(index) for index in range(len(reader.spec.layers))]
    tokenizer = transformers.AutoTokenizer.from_pretrained(made.folder)
    ids = torch.tensor([tokenizer.encode("The capital of France is Paris, and that of Italy is")])
    with torch.inference_mode():
        model = transformers.AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float32)
        theirs = model(ids).logits
        ours = whole_logits(reader, layers, ids)
    gap = (ours.log_softmax(-1) - theirs.log_softmax(-1)).abs().max()
    assert gap < 5e-3
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
