"""What a model folder's JSON files say about the text side. Nothing in a folder is ever executed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kimicore.model.mapped import fault, parse_json, read_bounded
from kimicore.text.source import TextSource

__all__ = ["MAX_JSON_BYTES", "folder_text", "read_object"]

MAX_JSON_BYTES = 8 << 20
_MAX_TOKENIZER_BYTES = 64 << 20
_MAX_ID = 1 << 31


def read_object(folder: Path, name: str, *, must: bool = False) -> dict[str, Any]:
    """Return a JSON file of a folder as an object, {} where the file is not there and need not be."""
    path = folder / name
    if not must and not path.exists():
        return {}
    return parse_json(read_bounded(path, MAX_JSON_BYTES), path, "content")


def _ids(value: Any, path: Path, where: str) -> tuple[int, ...]:
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    for entry in values:
        if isinstance(entry, bool) or not isinstance(entry, int) or not -1 <= entry < _MAX_ID:
            raise fault(path, where, f"{repr(entry)[:60]} is no token id")
    return tuple(entry for entry in values if entry >= 0)


def _name_of(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


class _Lookup:
    """Ids of special tokens by their text; tokenizer.json is only parsed where the short way does not know one."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], tokenizer_json: bytes) -> None:
        self.path = folder / "tokenizer.json"
        self.content = tokenizer_json
        self.known: dict[str, int] = {}
        self.parsed: dict[str, Any] | None = None
        decoder = settings.get("added_tokens_decoder")
        if isinstance(decoder, dict):
            for key, entry in decoder.items():
                name = _name_of(entry)
                if name is not None and key.isascii() and key.isdigit() and len(key) < 10:
                    self.known[name] = int(key)

    def tree(self) -> dict[str, Any]:
        if self.parsed is None:
            self.parsed = parse_json(self.content, self.path, "content")
        return self.parsed

    def id(self, name: str | None) -> int | None:
        if name is None or name in self.known:
            return None if name is None else self.known[name]
        for token, number in self._vocabulary():
            if token == name and isinstance(number, int) and not isinstance(number, bool) and 0 <= number < _MAX_ID:
                return number
        return None

    def _vocabulary(self) -> Iterator[tuple[Any, Any]]:
        added = self.tree().get("added_tokens")
        if isinstance(added, list):
            yield from ((entry.get("content"), entry.get("id")) for entry in added if isinstance(entry, dict))
        model = self.tree().get("model")
        vocabulary = model.get("vocab") if isinstance(model, dict) else None
        if isinstance(vocabulary, dict):
            yield from vocabulary.items()

    def first_and_last(self) -> tuple[str | None, str | None]:
        """Return the special tokens that the file's post-processor puts around a single text."""
        return _around(self.tree().get("post_processor"))


def _around(step: Any) -> tuple[str | None, str | None]:
    if not isinstance(step, dict):
        return None, None
    if step.get("type") == "Sequence" and isinstance(step.get("processors"), list):
        for inner in step["processors"]:
            found = _around(inner) if not isinstance(inner, dict) or inner.get("type") != "Sequence" else (None, None)
            if found != (None, None):
                return found
    single = step.get("single")
    if step.get("type") != "TemplateProcessing" or not isinstance(single, list) or len(single) < 2:
        return None, None
    pieces = [piece.get("SpecialToken") if isinstance(piece, dict) else None for piece in (single[0], single[-1])]
    names = [piece.get("id") if isinstance(piece, dict) else None for piece in pieces]
    first, last = (name if isinstance(name, str) else None for name in names)
    return first, last


def _template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_bounded(path, MAX_JSON_BYTES).decode() or None
        except UnicodeDecodeError as error:
            raise fault(path, "content", f"not UTF-8 at byte {error.start}") from error
    value = settings.get("chat_template")
    if isinstance(value, list):  # several by name: one of them is for plain chats
        named = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
        value = named.get("default")
    if value is not None and not isinstance(value, str):
        raise fault(folder / "tokenizer_config.json", "chat_template", f"must be text, is {type(value).__name__}")
    return value or None


def folder_text(folder: Path, config: Mapping[str, Any]) -> TextSource:
    """Return the text side of a model folder.

    Read are tokenizer.json, tokenizer_config.json, generation_config.json and chat_template.jinja; ids in
    ``config`` fill what they leave open. Raises :class:`~kimicore.ModelLoadError`.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        others = [name for name in ("tokenizer.model", "vocab.json", "vocab.txt") if (folder / name).exists()]
        hint = f"; {', '.join(others)} alone is not enough: save the model with its fast tokenizer" if others else ""
        raise fault(path, "file", f"is missing{hint}")
    content = read_bounded(path, _MAX_TOKENIZER_BYTES)
    settings = read_object(folder, "tokenizer_config.json")
    generation = read_object(folder, "generation_config.json")
    lookup = _Lookup(folder, settings, content)
    files = {"generation_config.json": generation, "config.json": config}

    def ids(key: str) -> tuple[int, ...]:
        own = lookup.id(_name_of(settings.get(key)))
        found = [] if own is None else [own]
        for name, values in files.items():
            found += _ids(values.get(f"{key}_id"), folder / name, f"{key}_id")
        return tuple(dict.fromkeys(found))

    bos, pad = ids("bos_token"), ids("pad_token")
    add = {}
    for key, place in (("add_bos_token", 0), ("add_eos_token", 1)):
        value = settings.get(key)
        if value is not None and not isinstance(value, bool):
            raise fault(folder / "tokenizer_config.json", key, f"must be true or false, is {repr(value)[:60]}")
        add[key] = value if value is not None else lookup.first_and_last()[place] is not None
    if add["add_bos_token"] and not bos:
        first = lookup.id(lookup.first_and_last()[0])
        if first is None:
            raise fault(folder / "tokenizer_config.json", "add_bos_token", "is set, but no file names the token")
        bos = (first,)
    return TextSource(
        tokenizer_json=content,
        gguf=None,
        chat_template=_template(folder, settings),
        bos_id=bos[0] if bos else None,
        eos_ids=ids("eos_token"),
        pad_id=pad[0] if pad else None,
        add_bos=add["add_bos_token"],
        add_eos=add["add_eos_token"],
    )
