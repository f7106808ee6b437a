"""Streams, stop strings and end tokens at the engine's face, on texts that are scripted token by token."""

from __future__ import annotations

import pytest

from kimicore import Engine, InvalidRequest
from rigs.chain import COUNT, GEMMA_START, START
from rigs.settle import ids_of, joined, read, settled

pytestmark = pytest.mark.anyio
GREEDY = {"temperature": 0.0}
BAD = "\ufffd"


async def test_characters_of_several_tokens_are_held_until_complete(script: Engine) -> None:
    """Characters that several tokens make arrive whole and once (smg-project/smg#710, abetlen/llama-cpp-python#372)."""
    chunks = await read(script.stream([START], **GREEDY))
    whole = await script.generate([START], **GREEDY)
    assert joined(chunks) == whole.text == "漏斗图잠깐만"
    assert not any(BAD in chunk.text for chunk in chunks)
    assert chunks[-1].finish_reason == "stop"
    assert chunks[-1].stop == 2
    assert ids_of(chunks) == whole.token_ids
    await settled(script)


async def test_characters_of_byte_pieces_arrive_whole(gemma_script: Engine) -> None:
    """A character that the vocabulary has only as bytes is sent once it is complete (smg-project/smg#710)."""
    chunks = await read(gemma_script.stream([GEMMA_START], **GREEDY))
    assert joined(chunks) == " oneꙮ two"
    assert not any(BAD in chunk.text for chunk in chunks)
    assert (chunks[-1].finish_reason, chunks[-1].stop) == ("stop", 106)
    await settled(gemma_script)


@pytest.mark.parametrize("tokens", [60, 61, 62])
async def test_a_cut_inside_a_character_shows_once_at_the_end(cycles: Engine, tokens: int) -> None:
    """Symbols are never cut between chunks; one cut by the limit reads as one U+FFFD in the last chunk
    (openvinotoolkit/openvino.genai#1356)."""
    prompt = [10813, 117, 251]
    chunks = await read(cycles.stream(prompt, max_tokens=tokens, **GREEDY))
    assert joined(chunks) == "🧭" * 20 + (BAD if tokens > 60 else "")
    assert not any(BAD in chunk.text for chunk in chunks[:-1])
    assert joined(await read(cycles.stream([COUNT], max_tokens=3, **GREEDY))) == "𝄞"
    await settled(cycles)


@pytest.mark.parametrize("text", ["漏斗图잠깐만", "žluťoučký"])
async def test_token_bytes_join_to_the_text(script: Engine, cycles: Engine, text: str) -> None:
    """Each log-probability's entry holds its token's raw bytes; joined they are the text's UTF-8
    (deepjavalibrary/djl-serving#3085)."""
    engine = script if text.startswith("漏") else cycles
    result = await engine.generate([START], logprobs=1, **GREEDY)
    assert result.text == text
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == list(result.token_ids)
    assert b"".join(entry.bytes for entry in result.logprobs[:-1]).decode() == text
    streamed = await read(engine.stream([START], logprobs=1, **GREEDY))
    entries = [entry for chunk in streamed for entry in chunk.logprobs or ()]
    assert tuple(entries) == result.logprobs


async def test_broken_text_is_refused_for_itself(shared: Engine) -> None:
    """Bytes and half a surrogate pair raise for their call, and others go on (guidance-ai/guidance#934)."""
    for prompt in (b"\xe6\xad", "a\ud83d", bytearray(b"ab"), 7, None, {"a": 1}):
        with pytest.raises(InvalidRequest):
            await shared.generate(prompt)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            await read(shared.stream(prompt))  # type: ignore[arg-type]
    await settled(shared)


# ---------------------------------------------------------------- stop strings


async def test_no_part_of_a_stop_string_is_shown(script: Engine) -> None:
    """What a stop string begins with is held back until it is decided (vllm-project/vllm#3574)."""
    chunks = await read(script.stream([COUNT], stop=[" three four"], max_tokens=6, **GREEDY))
    assert joined(chunks) == " one two"
    assert not any(" three" in chunk.text for chunk in chunks)
    assert (chunks[-1].finish_reason, chunks[-1].stop) == ("stop", " three four")
    included = await script.generate([COUNT], stop=[" three four"], include_stop=True, max_tokens=6, **GREEDY)
    assert included.text == " one two three four"
    flushed = await script.generate([COUNT], stop=[" three fourteen"], max_tokens=4, **GREEDY)
    assert (flushed.text, flushed.finish_reason) == (" one two three four", "length")
    await settled(script)


async def test_a_stop_string_that_nothing_resembles_holds_nothing_back(script: Engine) -> None:
    """Text that cannot begin a stop string comes with its own token (vllm-project/vllm#11089)."""
    plain = await read(script.stream([COUNT], max_tokens=6, **GREEDY))
    chunks = await read(script.stream([COUNT], stop=["@" * 40], max_tokens=6, **GREEDY))
    assert joined(chunks) == joined(plain) == " one two three four five six"
    assert all(chunk.text for chunk in chunks if chunk.token_ids)
    assert chunks[-1].finish_reason == "length"


async def test_empty_stop_strings_are_refused(shared: Engine) -> None:
    """An empty stop string is an error at once, an empty list means none (sgl-project/sglang#38712)."""
    for stop in ([""], "", ["", "END"]):
        with pytest.raises(InvalidRequest, match="stop"):
            await shared.generate([5], stop=stop)
    assert len((await shared.generate([5], stop=[], max_tokens=3, ignore_eos=True)).token_ids) == 3
    await settled(shared)


async def test_a_special_token_can_be_a_stop_string(script: Engine) -> None:
    """A stop string that is a special token's text is matched by its id, though the text hides it
    (vllm-project/vllm#792)."""
    result = await script.generate([START], stop=["<|im_end|>"], ignore_eos=True, max_tokens=40, **GREEDY)
    assert (result.text, result.finish_reason) == ("漏斗图잠깐만", "stop")
    assert result.choices[0].stop == "<|im_end|>"
    with pytest.raises(InvalidRequest, match="im_end"):
        await script.generate([START], stop=["a<|im_end|>"])
    await settled(script)


# ---------------------------------------------------------------- end tokens, counts, reasons


async def test_the_prompt_does_not_count_for_the_minimum(shared: Engine) -> None:
    """min_tokens counts generated tokens alone (NVIDIA/TensorRT-LLM#12358)."""
    result = await shared.generate(list(range(5, 45)), min_tokens=20, max_tokens=50, logit_bias={2: 100.0}, **GREEDY)
    assert 2 not in result.token_ids[:20]
    assert result.token_ids[20:] == (2,)
    assert result.finish_reason == "stop"


@pytest.mark.parametrize("end", [1, 106])
async def test_every_end_token_waits_for_the_minimum(gemma_script: Engine, end: int) -> None:
    """A model's several end tokens are all held back, and all end the text afterwards (vllm-project/vllm#15407)."""
    result = await gemma_script.generate([GEMMA_START], min_tokens=5, max_tokens=9, logit_bias={end: 100.0}, **GREEDY)
    assert not {1, 106} & set(result.token_ids[:5])
    assert result.token_ids[5:] == (end,)
    assert (result.finish_reason, result.choices[0].stop) == ("stop", end)
    await settled(gemma_script)


@pytest.mark.parametrize("tokens", [1, 5, 20])
async def test_counts_at_the_length_limit(shared: Engine, tokens: int) -> None:
    """At the limit the counts are the limit (lmstudio-ai/lmstudio-bug-tracker#2335)."""
    result = await shared.generate([5, 6], max_tokens=tokens, ignore_eos=True, seed=1)
    assert result.usage.completion_tokens == len(result.token_ids) == tokens
    assert result.finish_reason == "length"
    assert result.usage.prompt_tokens == 2


async def test_ignoring_the_end_ignores_all_of_it(script: Engine) -> None:
    """With ignore_eos no end token of the model ends a chat, nor any default stop (vectorch-ai/ScaleLLM#304)."""
    result = await script.chat(
        [{"role": "user", "content": "Hello"}], ignore_eos=True, max_tokens=200, logit_bias={2: 100.0}, **GREEDY
    )
    assert result.token_ids == (2,) * 200
    assert (result.text, result.finish_reason) == ("", "length")
    await settled(script)
