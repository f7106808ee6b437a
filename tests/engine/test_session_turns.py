"""What a turn of a session takes, how it can end, and that it ends whole or leaves no trace."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from kimicore import Choice, Engine, EngineConfig, InvalidRequest, PromptTooLong, RequestTimeout, Session, SyncEngine
from rigs.sessions import prompt_of
from rigs.settle import read, settled

pytestmark = pytest.mark.anyio
GREEDY: dict[str, Any] = {"temperature": 0.0}


# ---------------------------------------------------------------- what a turn takes


async def test_what_can_be_said(shared: Engine) -> None:
    """Text, text parts, a message and a list of messages are added in order, with further fields as they came."""
    session = shared.session(messages=[{"role": "system", "content": "Be brief."}])
    await session.chat("one", max_tokens=1, **GREEDY)
    await session.chat([{"type": "text", "text": "t"}, {"type": "text", "text": "wo"}], max_tokens=1, **GREEDY)
    await session.chat({"role": "tool", "content": "three", "name": "x"}, max_tokens=1, **GREEDY)
    await session.chat([{"role": "a", "content": "4"}, {"role": "b", "content": "5"}], max_tokens=1, **GREEDY)
    await session.chat("six", role="other", max_tokens=1, **GREEDY)
    said = [(one["role"], one["content"]) for one in session.messages if one["role"] != "assistant"]
    assert said == [
        ("system", "Be brief."), ("user", "one"), ("user", "two"), ("tool", "three"), ("a", "4"), ("b", "5"),
        ("other", "six"),
    ]  # fmt: skip
    assert session.messages[5]["name"] == "x"
    assert session.turns == 5
    session.messages[0]["content"] = "changed"
    assert session.messages[0]["content"] == "Be brief."


@pytest.mark.parametrize("content", [b"x", 7, None, [], [{"role": "user"}], [{"type": "image"}], {"content": "x"}])
async def test_what_cannot_be_said(shared: Engine, content: Any) -> None:
    """Anything else is refused before the turn begins, and names what is wrong."""
    session = shared.session()
    with pytest.raises(InvalidRequest, match=r"content|role"):
        await session.chat(content)
    with pytest.raises(InvalidRequest, match=r"content|role"):
        session.stream_chat(content)
    assert session.messages == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"tenant": 7}, {"tenant": "\ud800"}, {"template": b""}, {"template_variables": []}, {"messages": "hello"},
        {"messages": [{"role": "user"}]}, {"sink_after_turns": -1}, {"sink_turns": 0}, {"resume": 7}, {"resume": "a\0"},
    ],
    ids=repr,
)  # fmt: skip
async def test_wrong_sessions_are_refused_by_name(shared: Engine, wrong: dict[str, Any]) -> None:
    """Wrong arguments of a session raise at once and are named."""
    with pytest.raises(InvalidRequest, match=next(iter(wrong)).removeprefix("template_")):
        shared.session(**wrong)


# ---------------------------------------------------------------- turns that do not end well


async def test_a_failed_turn_leaves_no_trace(shared: Engine) -> None:
    """Wrong options, a time limit, and a prompt that is too long leave a session as it was, and it goes on."""
    session = shared.session()
    await session.chat("in the", max_tokens=3, **GREEDY)
    before = (session.messages, session.turns, session.token_ids)
    for error, content, options in (
        (InvalidRequest, "a", {"n": 2}),
        (InvalidRequest, "a", {"temperature": -1.0}),
        (InvalidRequest, "a", {"tier": "urgent"}),
        (InvalidRequest, "a\ud800", {}),
        (PromptTooLong, "the other " * 9000, {}),
        (RequestTimeout, "a", {"max_tokens": 7000, "ignore_eos": True, "timeout_s": 0.02}),
    ):
        with pytest.raises(error):
            await session.chat(content, **options)
        with pytest.raises(error):
            await read(session.stream_chat(content, **options))
        assert (session.messages, session.turns, session.token_ids) == before
    await session.chat("in the", max_tokens=3, **GREEDY)
    assert session.turns == 2
    await settled(shared)


async def test_a_stream_that_failed_need_not_be_closed(shared: Engine) -> None:
    """A stream whose request ended with an error holds up no later turn."""
    session = shared.session()
    stream = session.stream_chat("a", max_tokens=8000, ignore_eos=True, timeout_s=0.02)
    with pytest.raises(RequestTimeout):
        async for _ in stream:
            pass
    await session.chat("a", max_tokens=2)
    assert session.turns == 1
    await stream.aclose()


async def test_a_cancelled_turn_leaves_no_trace(shared: Engine) -> None:
    """Cancelling a turn leaves the session as it was, gives its blocks back, and the next turn can begin."""
    session = shared.session()
    await session.chat("in the", max_tokens=3, **GREEDY)
    before = (session.messages, session.token_ids)
    for delay_s in (0.0, 0.005, 0.03):
        with anyio.move_on_after(delay_s) as scope:
            await session.chat("on", max_tokens=8000, ignore_eos=True)
        assert scope.cancelled_caught
        assert (session.messages, session.token_ids) == before
    await session.chat("on", max_tokens=3, **GREEDY)
    assert session.turns == 2
    await settled(shared)


async def test_one_turn_at_a_time(shared: Engine) -> None:
    """A second turn while one is on its way is refused, whether either is a stream; the first is not disturbed."""
    session = shared.session()
    async with session.stream_chat("in the", max_tokens=40, ignore_eos=True) as chunks:
        await anext(chunks)
        with pytest.raises(InvalidRequest, match="one turn"):
            await session.chat("and", max_tokens=1)
        with pytest.raises(InvalidRequest, match="one turn"):
            await read(session.stream_chat("and", max_tokens=1))
        async for _ in chunks:
            pass
    assert session.turns == 1
    assert [one["content"] for one in session.messages] == ["in the", chunks.result().text]
    refused: list[Exception] = []

    async def one() -> None:
        try:
            await session.chat("and", max_tokens=30, ignore_eos=True)
        except InvalidRequest as error:
            refused.append(error)

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(one)
    assert len(refused) == 4
    assert session.turns == 2
    await settled(shared)


# ---------------------------------------------------------------- streams and forks


async def test_a_stream_that_is_left_does_not_enter(shared: Engine) -> None:
    """Leaving a stream's context, closing it, and dropping it leave the session as it was and let it go on."""
    session = shared.session()
    async with session.stream_chat("in the", max_tokens=8000, ignore_eos=True) as stream:
        await anext(stream)
    assert session.messages == []
    stream = session.stream_chat("in the", max_tokens=8000, ignore_eos=True)
    await anext(stream)
    await stream.aclose()
    assert session.messages == []
    stream = session.stream_chat("in the", max_tokens=8000, ignore_eos=True)
    await anext(stream)
    del stream
    gc.collect()
    never = session.stream_chat("in the")
    await session.chat("in the", max_tokens=2)
    await never.aclose()
    assert session.turns == 1
    await settled(shared)


async def test_forks_go_their_own_ways(shared: Engine, alone: Callable[..., Choice]) -> None:
    """A fork begins with all that was said, shares its cached blocks, and neither changes the other."""
    session = shared.session()
    await session.chat("in the other " * 5, max_tokens=8, **GREEDY)
    fork = session.fork()
    assert isinstance(fork, Session)
    assert (fork.messages, fork.token_ids) == (session.messages, session.token_ids)
    hits = []
    async with anyio.create_task_group() as group:

        async def one(of: Session, content: str) -> None:
            result = await of.chat(content, max_tokens=8, **GREEDY)
            hits.append(result.usage.cached_tokens)
            assert result.choices[0] == alone(prompt_of(of, result), max_tokens=8, **GREEDY)

        group.start_soon(one, session, "left")
        group.start_soon(one, fork, "right")
    assert min(hits) > 0
    assert session.messages[:2] == fork.messages[:2]
    assert (session.messages[2]["content"], fork.messages[2]["content"]) == ("left", "right")
    await settled(shared)


def test_the_sync_face_has_the_same_sessions(tiny: Path) -> None:
    """Plain calls give the same turns: in one piece, streamed, forked, refused from a second thread, left early."""
    with SyncEngine(tiny, EngineConfig(dtype="float32", kv_device_bytes="8MiB")) as engine:
        session = engine.session(messages=[{"role": "system", "content": "the"}])
        result = session.chat("in the other " * 5, max_tokens=8, **GREEDY)
        fork = session.fork()
        with session.stream_chat("on", max_tokens=8, **GREEDY) as chunks:
            text = "".join(chunk.text for chunk in chunks)
        assert chunks.result().usage.cached_tokens > len(result.token_ids)
        assert fork.chat("on", max_tokens=8, **GREEDY).text == text
        assert (fork.messages, fork.token_ids, fork.turns) == (session.messages, session.token_ids, 2)
        with session.stream_chat("left", max_tokens=8000, ignore_eos=True) as chunks:
            next(chunks)
            refused: list[InvalidRequest] = []

            def other() -> None:
                try:
                    session.chat("and")
                except InvalidRequest as error:
                    refused.append(error)

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            assert len(refused) == 1
        for options in ({"n": 2}, {"timeout_s": 0.0}):
            with pytest.raises((InvalidRequest, RequestTimeout)):
                session.chat("and", **options)
            with pytest.raises((InvalidRequest, RequestTimeout)):
                list(session.stream_chat("and", **options))
        assert fork.messages == session.messages
        assert session.chat("on", max_tokens=1).text == session.messages[-1]["content"]
