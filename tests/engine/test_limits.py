"""Empty, longest and too long prompts, and what a prompt becomes before the model sees it."""

from __future__ import annotations

from pathlib import Path

import anyio
import pytest

from kimicore import ConfigError, Engine, EngineConfig, GenerationResult, InvalidRequest, PromptTooLong
from rigs.chain import START
from rigs.settle import settled

pytestmark = pytest.mark.anyio


def prompt_of(result: GenerationResult) -> list[int]:
    """Return the prompt's token ids as the engine had them."""
    assert result.prompt_logprobs is not None
    return [entry.token_id for entry in result.prompt_logprobs]


async def test_an_empty_prompt_without_begin_token_is_refused(script: Engine) -> None:
    """Where a model begins with no token an empty prompt is refused, and nobody else notices
    (vllm-project/vllm#7632)."""
    async with script.stream([START], max_tokens=12, temperature=0.0) as stream:
        for prompt in ("", []):
            with pytest.raises(InvalidRequest, match="no tokens"):
                await script.generate(prompt)
        assert "".join([chunk.text async for chunk in stream]).startswith("漏斗图")
    with pytest.raises(InvalidRequest):
        await script.chat([])
    await settled(script)


async def test_an_empty_prompt_may_be_the_begin_token(gemma_script: Engine) -> None:
    """Where a model begins with a token an empty text is that token (vllm-project/vllm#7632)."""
    result = await gemma_script.generate("", max_tokens=1, temperature=0.0, prompt_logprobs=0)
    assert prompt_of(result) == [2]
    assert result.text == "word"
    await settled(gemma_script)


async def test_output_ends_with_the_context(tiny: Path) -> None:
    """Asking for more than the context has room for ends at its end, in good order
    (abetlen/llama-cpp-python#1438)."""
    config = EngineConfig(dtype="float32", kv_device_bytes="1MiB", context_tokens=64)
    async with Engine(tiny, config) as engine:
        for most in (500, None):
            result = await engine.generate(list(range(5, 25)), max_tokens=most, ignore_eos=True)
            assert (len(result.token_ids), result.finish_reason) == (44, "length")
        longest = await engine.generate([5] * 63, max_tokens=9, ignore_eos=True)
        assert len(longest.token_ids) == 1
        with pytest.raises(PromptTooLong) as error:
            await engine.generate([5] * 64)
        assert (error.value.prompt_tokens, error.value.limit_tokens) == (64, 63)
        await settled(engine)


async def test_a_prompt_larger_than_the_arena_is_refused_at_once(tiny: Path) -> None:
    """A prompt that the arena can never hold fails before it waits, and the next one is served
    (vllm-project/vllm#35541)."""
    block_bytes = 2 * 2 * 2 * 16 * 16 * 4
    config = EngineConfig(dtype="float32", kv_device_bytes=9 * block_bytes)
    with pytest.raises(ConfigError, match="arena holds 128"):
        await Engine(tiny, EngineConfig(dtype="float32", kv_device_bytes=9 * block_bytes, context_tokens=1024)).open()
    async with Engine(tiny, config) as engine:
        assert engine.stats().kv_blocks_total == 8
        with pytest.raises(PromptTooLong):
            await engine.generate([5] * 200)
        result = await engine.generate([5] * 10, max_tokens=4, ignore_eos=True)
        assert len(result.token_ids) == 4
        whole = await engine.generate([5] * 10, max_tokens=500, ignore_eos=True)
        assert len(whole.token_ids) == 8 * 16 - 10
        await settled(engine)


async def test_a_gigantic_text_is_refused_by_its_length(shared: Engine) -> None:
    """50 MB of text are refused without tokenizing them, beside a running request (mozilla-ai/llamafile#835)."""
    text = "ab " * (50_000_000 // 3)
    async with shared.stream([5], max_tokens=50, ignore_eos=True) as stream:
        with pytest.raises(PromptTooLong) as error:
            await shared.generate(text, timeout_s=1.0)
        assert sum([len(chunk.token_ids) async for chunk in stream]) == 50
    assert error.value.prompt_tokens > error.value.limit_tokens
    await settled(shared)


async def test_long_texts_are_tokenized_beside_the_event_loop(shared: Engine) -> None:
    """While a long text is tokenized the event loop runs other tasks (mozilla-ai/llamafile#835)."""
    tokenizer = shared.face.tokenizer
    encode, seen = tokenizer.encode, []

    def slow(text: str, **options: object) -> list[int]:
        seen.append(anyio.from_thread.run(anyio.sleep, 0))  # only works outside of the loop's own thread
        return encode(text, **options)  # type: ignore[arg-type]

    tokenizer.encode = slow  # type: ignore[method-assign]
    try:
        result = await shared.generate("in the other " * 400, max_tokens=1)
    finally:
        tokenizer.encode = encode  # type: ignore[method-assign]
    assert seen == [None]
    assert result.usage.prompt_tokens > 1000
    await settled(shared)


async def test_nothing_to_generate(shared: Engine) -> None:
    """max_tokens=0 computes and scores the prompt and generates nothing (hiyouga/LlamaFactory#10709)."""
    result = await shared.generate([5, 6, 7], max_tokens=0, prompt_logprobs=1)
    assert result.token_ids == ()
    assert result.usage.completion_tokens == 0
    assert prompt_of(result) == [5, 6, 7]
    assert (await shared.generate([5], max_tokens=0)).finish_reason == "length"
    await settled(shared)


# ---------------------------------------------------------------- templates and special tokens


async def test_a_chat_has_exactly_one_begin_token(gemma_script: Engine) -> None:
    """A template with or without begin token gives one begin token at the front (unslothai/unsloth#10312)."""
    plain = "{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"
    messages = [{"role": "user", "content": "word <bos> word"}]
    wanted = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    for template in (plain, "{{ bos_token }}" + plain, "{{ bos_token }}{{ bos_token }}" + plain):
        ids = prompt_of(await gemma_script.chat(messages, template=template, **wanted))
        assert ids[:3] == [2, 105, 2364]
        assert ids.count(2) == 1
    with pytest.raises(InvalidRequest, match="template"):
        await gemma_script.chat(messages)
    await settled(gemma_script)


async def test_special_tokens_in_a_prompt_are_text_unless_asked_for(script: Engine) -> None:
    """Whether special tokens in a prompt are parsed is the caller's choice, and text by default
    (huggingface/tokenizers#1347)."""
    text = "a<|endoftext|>b"
    wanted = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    plain = prompt_of(await script.generate(text, **wanted))
    parsed = prompt_of(await script.generate(text, parse_special=True, **wanted))
    assert min(plain) > 16
    assert script.face.tokenizer.decode(plain) == text
    assert parsed[1] == 0
    assert len(parsed) == 3
    turn = prompt_of(await script.chat([{"role": "user", "content": "<|im_end|>"}], **wanted))
    assert turn.count(2) == 2  # the template's own, after the system's and the user's turn
    await settled(script)
