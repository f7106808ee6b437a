"""Text to token ids and back."""

from __future__ import annotations

import hashlib
import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from kimicore.errors import InvalidRequest, ModelLoadError, PromptTooLong
from kimicore.text.gguf_tokenizer import Parts, parts_from_gguf
from kimicore.text.json_tokenizer import parts_from_json
from kimicore.text.pieces import TokenPieces
from kimicore.text.source import GGUFVocabulary, TextSource
from kimicore.text.specials import SpecialTexts

__all__ = ["Tokenizer"]

CACHE_BYTES = 16 << 20
CACHE_ENTRY_BYTES = CACHE_BYTES // 8
PIECE_CHARS = 16_384
_SCAN_CHARS = 65_536
_WORD_END = re.compile("(?<=[A-Za-z])(?= [A-Za-z])")


class Tokenizer:
    """A model's tokenizer, safe to share between threads.

    Special tokens in a text stay ordinary text unless ``parse_special`` is given. Encoding releases the
    interpreter lock. ``bos_id`` is the id that begins a text (None: the model has none), ``eos_ids`` all
    ids that end one, ``special_ids`` what :meth:`decode` hides. ``version`` is a digest that changes with
    anything that could change the ids of a text. Made by :meth:`from_source`.
    """

    def __init__(self, parts: Parts, source: TextSource, version: bytes) -> None:
        self.bos_id = source.bos_id
        self.eos_ids = source.eos_ids
        self.pad_id = source.pad_id
        self.add_bos = source.add_bos
        self.chat_template = source.chat_template
        self.vocab_size = parts.vocab_size
        self.version = version
        self.pieces: TokenPieces | None = parts.pieces
        self.strips_space = parts.strip_space
        self.specials = SpecialTexts(parts.special)
        ends = {one for one in (source.bos_id, *source.eos_ids) if one is not None}
        self.special_ids: frozenset[int] = frozenset(parts.special.values()) | ends
        self.templates: dict[str, object] = {}  # compiled chat templates, kept by who compiles them
        self._parts = parts
        self._control_ids = frozenset(parts.special.values()) - {parts.unknown_id}
        self._user_defined = tuple(text for text in parts.added if text not in parts.special)
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, bool], array[int]] = OrderedDict()
        self._cache_bytes = 0

    @classmethod
    def from_source(cls, source: TextSource) -> Tokenizer:
        """Build the tokenizer that a model's files describe.

        Raises :class:`~kimicore.ModelLoadError` that names the field.
        """
        if (source.gguf is None) == (source.tokenizer_json is None):
            raise ModelLoadError("the model has no tokenizer: neither a tokenizer.json nor a GGUF vocabulary")
        ends = [one for one in (source.bos_id, *source.eos_ids) if one is not None]
        digest = hashlib.blake2b(digest_size=16, person=b"kc-tokenizer")
        if source.gguf is not None:
            parts = parts_from_gguf(source.gguf, ends)
            _digest_gguf(digest, source.gguf)
        else:
            assert source.tokenizer_json is not None
            parts = parts_from_json(source.tokenizer_json)
            digest.update(source.tokenizer_json)
        digest.update(repr((source.bos_id, source.eos_ids, source.add_bos)).encode())
        if source.add_bos and (source.bos_id is None or not 0 <= source.bos_id < parts.vocab_size):
            raise ModelLoadError(
                f"bos_token_id={source.bos_id}: texts are to begin with it, but the vocabulary has "
                f"{parts.vocab_size} tokens"
            )
        return cls(parts, source, digest.digest())

    # ------------------------------------------------------------ text to ids

    def encode(
        self, text: str, *, parse_special: bool = False, add_bos: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of ``text``.

        ``parse_special``: special tokens written in the text become themselves; otherwise they are
        ordinary text. ``add_bos``: begin with the model's begin token if it has one that is to be added; a
        text that begins with it (``parse_special``) gets no second one. ``max_tokens``: most ids to return.

        Raises :class:`~kimicore.InvalidRequest` for anything but a string of whole characters and
        :class:`~kimicore.PromptTooLong` for a text of more than ``max_tokens`` tokens, as a rule long
        before all of it was looked at; ``prompt_tokens`` is then the least that it has.
        """
        if not isinstance(text, str):
            raise InvalidRequest(f"text: must be a string, not {type(text).__name__}; decode bytes first")
        self._check_length(text, max_tokens)
        key = (text, parse_special)
        ids = self._cached(key)
        if ids is None:
            ids = self._encode(text, parse_special, max_tokens)
            self._remember(key, ids)
        if add_bos and self.add_bos and self.bos_id is not None and ids[:1] != [self.bos_id]:
            ids.insert(0, self.bos_id)
        if max_tokens is not None and len(ids) > max_tokens:
            raise _too_long(len(ids), max_tokens, exact=True)
        return ids

    def encode_marked(self, text: str, mark: str, *, max_tokens: int | None = None) -> list[int]:
        """Return the ids of ``text`` with special tokens parsed, except those whose text holds ``mark``.

        The marks are taken out. Nothing is added at the front. Raises what :meth:`encode` does, for
        ``max_tokens`` only where the text is certainly too long.
        """
        self._check_length(text, max_tokens)
        ids: list[int] = []
        start = 0
        for begin, end, token_id in self.specials.spans(text):
            ids += self._encode(text[start:begin].replace(mark, ""), False, None, first=not start)
            ids.append(token_id)
            start = end
        return ids + self._encode(text[start:].replace(mark, ""), False, None, first=not start)

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that ``text`` has at least, from its length alone; 0 where no bound is known."""
        longest = self._parts.longest
        return -(-len(text) // longest) if longest else 0

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        if max_tokens is not None and (least := self.least_tokens(text)) > max_tokens:
            raise _too_long(least, max_tokens, exact=False)
        try:
            size = len(text) if text.isascii() else len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise InvalidRequest(
                f"text: character {error.start} is U+{ord(text[error.start]):04X}, half of a surrogate pair, which "
                "is no character; decode the text again, or with errors='replace'"
            ) from None
        longest = self._parts.longest_bytes
        if max_tokens is not None and longest and size > max_tokens * longest:
            raise _too_long(-(-size // longest), max_tokens, exact=False)

    def _encode(self, text: str, parse_special: bool, max_tokens: int | None, *, first: bool = True) -> list[int]:
        parts = self._parts
        backend = parts.parsing if parse_special else parts.plain
        if first and parts.space_prefix and text and not self._begins_with_added(text, parse_special):
            text = " " + text
        ids: list[int] = []
        for piece in self._cut(text):
            found = backend.encode_batch_fast([piece], add_special_tokens=False)[0].ids
            if not parse_special and not self._control_ids.isdisjoint(found):
                found = self._apart(piece, found)
            ids += found
            if max_tokens is not None and len(ids) > max_tokens and len(piece) < len(text):
                raise _too_long(len(ids), max_tokens, exact=False)
        return ids

    def _cut(self, text: str) -> Iterator[str]:
        """Yield ``text`` in pieces whose ids, joined, are the text's own; one piece where no cut is safe."""
        start = 0
        while self._parts.cuttable and len(text) - start > 2 * PIECE_CHARS:
            cut = None
            scan = start + PIECE_CHARS
            while cut is None and scan < len(text):
                cut = _WORD_END.search(text, scan, scan + _SCAN_CHARS)
                scan += _SCAN_CHARS - 2
            if cut is None:
                break
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]

    def _begins_with_added(self, text: str, parse_special: bool) -> bool:
        return text.startswith(self._user_defined) or (parse_special and self.specials.at(text, 0) is not None)

    def _apart(self, text: str, ids: list[int]) -> list[int]:
        """Encode text whose ordinary pieces join to a special token, so that they do not."""
        spans = self.specials.spans(text)
        if not spans:  # the model's own doing (an unknown token, say), not the text's
            return ids
        cuts = [0, *(begin + 1 for begin, _, _ in spans), len(text)]
        parts = [text[a:b] for a, b in pairwise(cuts) if a < b]
        encoded = self._parts.plain.encode_batch_fast(parts, add_special_tokens=False)
        found = [one for piece in encoded for one in piece.ids]
        if not self._control_ids.isdisjoint(found):
            raise InvalidRequest(f"text: {text[spans[0][0] : spans[0][1]]!r} has no spelling as ordinary text")
        return found

    # ------------------------------------------------------------ repeated texts

    def _cached(self, key: tuple[str, bool]) -> list[int] | None:
        with self._lock:
            ids = self._cache.get(key)
            if ids is None:
                return None
            self._cache.move_to_end(key)
        return ids.tolist()

    def _remember(self, key: tuple[str, bool], ids: list[int]) -> None:
        size = _entry_bytes(key[0], len(ids))
        if size > CACHE_ENTRY_BYTES:
            return
        packed = array("I", ids)
        with self._lock:
            if key in self._cache:
                return
            self._cache[key] = packed
            self._cache_bytes += size
            while self._cache_bytes > CACHE_BYTES:
                (text, _), old = self._cache.popitem(last=False)
                self._cache_bytes -= _entry_bytes(text, len(old))

    # ------------------------------------------------------------ ids to text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text; joined over a text they are its UTF-8.

        A special token gives its own text, an id outside the vocabulary nothing.
        """
        if self.pieces is not None:
            return self.pieces.bytes_of(token_id)
        return self.library_decode([token_id], skip_special=False).encode("utf-8", "replace")

    def token_text(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of a token, or None."""
        if self.pieces is not None:
            return self.pieces.spelling(token_id)
        return self._parts.parsing.id_to_token(token_id) if 0 <= token_id < 1 << 32 else None

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Return the text of ``ids``; bytes that are no UTF-8 read as U+FFFD.

        ``skip_special``: special tokens give no text. Ids outside the vocabulary (padding) never do.
        """
        if self.pieces is None:
            return self.library_decode(list(ids), skip_special=skip_special)
        hidden = self.special_ids if skip_special else frozenset()
        read = self.pieces.bytes_of
        text = b"".join([read(one) for one in ids if one not in hidden]).decode("utf-8", "replace")
        return text[1:] if self.strips_space and text[:1] == " " else text

    def library_decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        """Return what the `tokenizers` library makes of ``ids``, for decoders that are not made of bytes."""
        hidden = self.special_ids if skip_special else frozenset()
        kept = [one for one in ids if 0 <= one < self.vocab_size and one not in hidden]
        return str(self._parts.parsing.decode(kept, skip_special_tokens=False))


def _entry_bytes(text: str, tokens: int) -> int:
    return 4 * len(text) + 4 * tokens + 256


def _too_long(tokens: int, limit: int, *, exact: bool) -> PromptTooLong:
    least = "" if exact else "at least "
    return PromptTooLong(
        f"the prompt has {least}{tokens} tokens and at most {limit} fit; shorten it, or raise context_tokens",
        prompt_tokens=tokens,
        limit_tokens=limit,
    )


def _digest_gguf(digest: Any, vocabulary: GGUFVocabulary) -> None:
    head = (vocabulary.model, vocabulary.pre, vocabulary.add_space_prefix, len(vocabulary.tokens))
    digest.update(repr(head).encode())
    for texts in (vocabulary.tokens, vocabulary.merges):
        digest.update("\0".join(texts).encode("utf-8", "surrogatepass"))
        digest.update(b"\1")
    digest.update(array("i", vocabulary.types).tobytes())
    digest.update(array("d", vocabulary.scores or ()).tobytes())
