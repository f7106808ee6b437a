"""The text side of a model folder: copied from a folder, or written for a GGUF file's vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kimicore.errors import ModelLoadError
from kimicore.model.source import WeightSource
from kimicore.quantize.files import disk_errors, write_json, write_text
from kimicore.text.gguf_tokenizer import parts_from_gguf
from kimicore.text.source import TextSource
from kimicore.text.tokenizer import Tokenizer

__all__ = ["write_text_files"]

_COPIED: Final = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
)
_SPACE: Final = "\u2581"
_PROBES: Final = (
    "The quick brown fox, 12,345.67 times!\n\n  def f(x):\n\treturn x ** 2  # ok",
    "子曰：「學而時習之」 2024年5月1日",
    "Größe naïve Ελλάδα 한국어 🙂\u200d🚀 e\u0301",
    " leading and trailing ",
)


def write_text_files(source: WeightSource, folder: Path) -> None:
    """Write into ``folder`` what a tokenizer and a chat template are made of.

    Raises :class:`~kimicore.ModelLoadError` where a GGUF vocabulary cannot be told by a ``tokenizer.json``.
    """
    if source.text.gguf is None:
        for name in _COPIED:
            if (source.path / name).is_file():
                with disk_errors(folder / name):
                    shutil.copyfile(source.path / name, folder / name)
        return
    text = source.text
    tree, name_of = _tokenizer_tree(text)
    content = json.dumps(tree, ensure_ascii=False)
    _check(text, content.encode())
    write_text(folder / "tokenizer.json", content)
    ids = {"bos": text.bos_id, "eos": text.eos_ids[0] if text.eos_ids else None, "pad": text.pad_id}
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": text.add_bos,
        "add_eos_token": text.add_eos,
        "clean_up_tokenization_spaces": False,
    }
    for name, number in ids.items():
        if number is not None:
            settings[f"{name}_token"] = name_of(number)
    write_json(folder / "tokenizer_config.json", settings)
    generation = {"bos_token_id": text.bos_id, "eos_token_id": list(text.eos_ids), "pad_token_id": text.pad_id}
    write_json(
        folder / "generation_config.json", {key: value for key, value in generation.items() if value is not None}
    )
    if text.chat_template is not None:
        write_text(folder / "chat_template.jinja", text.chat_template)


def _tokenizer_tree(text: TextSource) -> tuple[dict[str, Any], Callable[[int], str]]:
    """Return the ``tokenizer.json`` of a GGUF vocabulary, complete by itself, and a function from ids to tokens."""
    assert text.gguf is not None
    ends = [one for one in (text.bos_id, *text.eos_ids) if one is not None]
    parts = parts_from_gguf(text.gguf, ends)
    tree: dict[str, Any] = json.loads(parts.parsing.to_str())

    def name_of(number: int) -> str:
        return str(parts.parsing.id_to_token(number))

    if parts.space_prefix:
        prepend = {"type": "Prepend", "prepend": _SPACE}
        tree["normalizer"] = {"type": "Sequence", "normalizers": [prepend, tree["normalizer"]]}
    if text.add_bos and text.bos_id is not None:
        tree["post_processor"] = _begins_with(name_of(text.bos_id), text.bos_id)
    return tree, name_of


def _begins_with(token: str, number: int) -> dict[str, Any]:
    """Return the post-processor that puts a token before each text."""

    def special(kind: int) -> dict[str, Any]:
        return {"SpecialToken": {"id": token, "type_id": kind}}

    def sequence(name: str, kind: int) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": kind}}

    return {
        "type": "TemplateProcessing",
        "single": [special(0), sequence("A", 0)],
        "pair": [special(0), sequence("A", 0), special(1), sequence("B", 1)],
        "special_tokens": {token: {"id": token, "ids": [number], "tokens": [token]}},
    }


def _check(text: TextSource, content: bytes) -> None:
    """Refuse a tokenizer that, read again, gives other ids than the vocabulary that it was made from."""
    again = TextSource(
        tokenizer_json=content,
        gguf=None,
        chat_template=text.chat_template,
        bos_id=text.bos_id,
        eos_ids=text.eos_ids,
        pad_id=text.pad_id,
        add_bos=text.add_bos,
        add_eos=text.add_eos,
    )
    own, other = Tokenizer.from_source(text), Tokenizer.from_source(again)
    for probe in _PROBES:
        if own.encode(probe) != other.encode(probe):
            raise ModelLoadError(f"tokenizer.json: cannot tell this vocabulary: {probe!r} would have other ids")
