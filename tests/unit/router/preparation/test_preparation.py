"""Requests are prepared without holding the event loop: by processes that end with their router, tenant by tenant."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.endpoints.app import build_http_app
from router.metrics import RouterMetrics
from router.preparation import preparer, process, work_process
from router.preparation.prepare import prepare
from router.preparation.prepared_texts import PreparedTexts
from router.preparation.preparer import ProcessPreparer
from router.preparation.process import MOST_BYTES, most_bytes
from router.requests.request_handler import RequestHandler
from router.requests.work import PreparationOutcome, Work
from router.text.chat_template import ChatTemplate
from router.text.prompts import ChatPrompt
from router.text.tokenizer import ByteText, load_text
from tests.inline_preparer import InlinePreparer
from tests.unit.router.conftest import FACTS, ScriptedDispatcher
from tests.unit.router.requests import endless_reader
from twostroke.base.errors import (
    ContextLengthExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    Overloaded,
    RequestTooLarge,
)
from twostroke.rpc.v1 import inference_pb2

MIB = 1 << 20

CHAT_WITH_METADATA = {"messages": [{"role": "user", "content": "hi"}] * 8, "user": "u", "metadata": "x" * 5000}


def work_of(kind: str, body: Any, facts: Any = FACTS) -> Work:
    return Work(kind, body if isinstance(body, bytes) else json.dumps(body).encode(), "toy", facts)


@contextlib.asynccontextmanager
async def running(text: Any = None, model_dir: str = "", text_cache_bytes: int = 0) -> AsyncIterator[ProcessPreparer]:
    prepares = ProcessPreparer(text or ByteText(), model_dir, PreparedTexts(text_cache_bytes, RouterMetrics()))
    task = asyncio.create_task(prepares.run())
    try:
        yield prepares
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class Ticker:
    """How long work holds the event loop: a task that wants to run every 2 ms notes what its longest gap takes.

    Time is the loop's own on the processor, so that a gap in which other processes have it is none.
    """

    async def __aenter__(self) -> Ticker:
        self.worst_s = 0.0
        self._task = asyncio.create_task(self._run())
        await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *error: object) -> None:
        await asyncio.sleep(0.01)
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            before_s = time.thread_time()
            await asyncio.sleep(0.002)
            self.worst_s = max(self.worst_s, time.thread_time() - before_s)


WORD = "word "
CHAT = {"messages": [{"role": "user", "content": WORD * 20_000}]}
LARGE: dict[str, tuple[str, Any]] = {
    "a chat": ("/v1/chat/completions", CHAT),
    "many messages": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 100}] * 2000}),
    "a text": ("/v1/completions", {"prompt": WORD * 20_000}),
    "many prompts, one bad": ("/v1/completions", {"prompt": [WORD * 30] * 1000 + [""]}),
    "many tokens": ("/v1/completions", {"prompt": [5] * 200_000}),
    "many objects": ("/v1/completions", b'{"prompt": [' + b"{}," * 200_000 + b"1]}"),
    "tokenize": ("tokenize", {"prompt": WORD * 20_000, "return_token_strs": True}),
    "detokenize": ("detokenize", {"tokens": [5] * 200_000}),
    "a text over gRPC": (
        "grpc_tokenize",
        inference_pb2.TokenizeRequest(text=WORD * 20_000).SerializeToString(),
    ),
    "tokens over gRPC": (
        "grpc_generate",
        inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5] * 500_000)).SerializeToString(),
    ),
}


async def test_no_large_request_holds_the_event_loop(smollm2_dir) -> None:
    """A quarter of what the same work takes where it is done on the loop, in the same run, would be a hold."""
    text = load_text(str(smollm2_dir))
    facts = dataclasses.replace(FACTS, max_model_len=8192, pool_tokens=8192, vocab_size=49152)
    held: dict[str, tuple[float, float]] = {}
    async with running(text, str(smollm2_dir)) as prepares:
        await prepares.prepare(work_of("/v1/completions", {"prompt": "a " * 2500}, facts), "")
        await prepares.prepare(work_of("tokenize", {"prompt": "a" * 200_000}, facts), "")
        for name, (kind, body) in LARGE.items():
            work = work_of(kind, body, facts)
            async with Ticker() as inline:
                there = await InlinePreparer(text).prepare(work, "")
            lateness = []
            for _ in range(2):
                async with Ticker() as ticker:
                    here = await prepares.prepare(work, "")
                lateness.append(ticker.worst_s)
            assert type(here.error) is type(there.error), name
            assert here.tokens == there.tokens, name
            held[name] = (min(lateness), inline.worst_s)
    held_s, inline_s = (sum(column) for column in zip(*held.values(), strict=True))
    assert held_s < inline_s / 4, held


REGEX_TOOL = {
    "type": "custom",
    "custom": {"name": "f", "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "a+"}}},
}
ALTERNATIVES = {"type": "object", "properties": {"a": {"oneOf": [{"const": 1}, {"const": 2}]}}}
ESCAPED = json.dumps({"prompt": "x", "structured_outputs": {"json": ALTERNATIVES}}).replace("oneOf", r"\u006FneO\u0066")
SHORT: dict[str, tuple[str, Any]] = {
    "a regex": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [REGEX_TOOL]}),
    "alternatives": ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": ALTERNATIVES}}),
    "alternatives with escapes": ("/v1/completions", ESCAPED.encode()),
}


@pytest.mark.parametrize(("kind", "body"), SHORT.values(), ids=SHORT)
async def test_a_short_body_whose_checks_may_take_long_is_read_by_a_process(
    kind: str, body: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running() as prepares:
        assert (await prepares.prepare(work_of("/v1/completions", {"prompt": "x"}), "")).error is None
        here = prepare(work_of(kind, body), ByteText())
        monkeypatch.delattr(preparer, "prepare")  # what prepares on the event loop
        there = await prepares.prepare(work_of(kind, body), "")
        assert there.value == here.value
        assert repr(there.error) == repr(here.error)
        with pytest.raises(NameError):
            await prepares.prepare(work_of("/v1/completions", {"prompt": "x"}), "")


async def test_a_prepared_request_is_the_same_from_a_process() -> None:
    async with running() as prepares:
        for kind, body in (
            ("/v1/completions", {"prompt": ["a" * 60] * 100, "n": 2, "stop": ["x"]}),
            (
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "hi"}] * 8, "user": "u", "metadata": "x" * 5000},
            ),
            ("tokenize", {"prompt": "a" * 5000, "model": "other"}),
        ):
            work = work_of(kind, body)
            there, here = await prepares.prepare(work, ""), prepare(work, ByteText())
            assert there.value == here.value
            assert repr(there.error) == repr(here.error)


async def test_what_lies_in_the_working_directory_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "router").mkdir()
    (tmp_path / "router" / "__init__.py").write_text("open('was_run', 'w')")
    monkeypatch.chdir(tmp_path)
    async with running() as prepares:
        assert (await prepares.prepare(work_of("tokenize", {"prompt": "a" * 5000}), "")).error is None
    assert not (tmp_path / "was_run").exists()


async def test_a_process_that_is_killed_is_replaced_and_its_request_read_again() -> None:
    async with running() as prepares:
        work = work_of("tokenize", {"prompt": "a" * 200, "x": "a" * 200_000})
        assert (await prepares.prepare(work, "")).value
        child = prepares._large._child
        assert child is not None
        os.kill(child._process.pid, signal.SIGKILL)
        assert (await prepares.prepare(work, "")).value
    assert child._process.returncode == -signal.SIGKILL


async def test_sigterm_to_the_whole_group_ends_no_process_that_reads_requests() -> None:
    """systemd tells every process of a service: the router drains first."""
    async with running() as prepares:
        work = work_of("tokenize", {"prompt": "a" * 200, "x": "a" * 200_000})
        assert (await prepares.prepare(work, "")).value
        child = prepares._large._child
        assert child is not None
        os.kill(child._process.pid, signal.SIGTERM)
        assert (await prepares.prepare(work, "")).value
        assert prepares._large._child is child


async def test_a_request_that_takes_too_long_is_refused_and_the_next_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as prepares:
        work = work_of("tokenize", {"prompt": "a" * 200, "x": "a" * 200_000})
        await prepares.prepare(work, "")
        monkeypatch.setattr(prepares._large, "_program", dataclasses.replace(preparer._READER, work_s=0.0))
        assert isinstance((await prepares.prepare(work, "")).error, RequestTooLarge)
        monkeypatch.undo()
        assert (await prepares.prepare(work, "")).value


async def test_a_small_body_that_takes_too_much_processor_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as prepares:
        endless = dataclasses.replace(preparer._SMALL_READER, module=endless_reader.__name__, cpu_s=0.1)
        monkeypatch.setattr(prepares._small, "_program", endless)
        outcome = await prepares.prepare(work_of("tokenize", {"prompt": "a", "x": "a" * 5000}), "")
        assert isinstance(outcome.error, RequestTooLarge)
        assert "takes more than 0.1 s" in outcome.error.message
    assert preparer._SMALL_READER.cpu_s == preparer.SMALL_S


async def test_tenants_take_turns_and_who_leaves_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    prepares = ProcessPreparer(ByteText(), "", PreparedTexts(0, RouterMetrics()))
    lane, order = prepares._large, []

    async def outcome(waiting: Any) -> PreparationOutcome:
        order.append(waiting.work.body[:1])
        return PreparationOutcome(value=b"")

    monkeypatch.setattr(lane, "_outcome_of", outcome)
    monkeypatch.setattr(work_process, "MOST_WAITING_BYTES", 3 * MIB)

    def ask(tenant: str, name: bytes) -> asyncio.Task[PreparationOutcome]:
        return asyncio.create_task(lane.prepare(Work("/v1/chat/completions", name * MIB, "toy", FACTS), tenant))

    asked = [ask("one", b"a"), ask("one", b"b"), ask("one", b"c"), ask("two", b"d"), ask("two", b"e")]
    refused = ask("one", b"f")
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await refused
    asked.pop(1).cancel()
    await asyncio.sleep(0)
    serving = asyncio.create_task(lane.run())
    await asyncio.gather(*asked)
    assert order == [b"a", b"d", b"c", b"e"]
    assert lane._queues == {}
    serving.cancel()


def test_what_can_never_fit_is_refused_before_it_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ByteText()
    monkeypatch.setattr(text, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    for kind, body in (
        ("/v1/completions", {"prompt": "a" * 300}),
        ("/v1/completions", {"prompt": ["a", "a" * 300]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 300}]}),
    ):
        error = prepare(work_of(kind, body), text).error
        assert isinstance(error, ContextLengthExceeded), body
        assert "maximum context length is 256 tokens" in error.message


def test_tokenize_counts_more_than_the_model_takes_up_to_a_bound() -> None:
    for count, is_taken in ((300, True), (1 << 17, True), ((1 << 17) + 1, False)):
        for work in (
            work_of("tokenize", {"prompt": "a" * count}),
            work_of("grpc_tokenize", inference_pb2.TokenizeRequest(text="a" * count).SerializeToString()),
        ):
            assert (prepare(work, ByteText()).error is None) is is_taken


def test_tokens_of_a_request_that_is_refused_in_the_end_are_counted() -> None:
    outcome = prepare(work_of("/v1/completions", {"prompt": ["a" * 100] * 9 + [""]}), ByteText())
    assert isinstance(outcome.error, InvalidRequest)
    assert outcome.tokens == 900


def test_tools_and_calls_reach_a_template_that_takes_them() -> None:
    source = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name }}={{ c.function.arguments.at }}{% endfor %};{% endfor %}"  # noqa: E501
    tool = {"type": "function", "function": {"name": "look"}}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"at": "sky"}}}
    chat = ChatPrompt(messages=({"role": "assistant", "content": "", "tool_calls": [call]},), tools=(tool,))
    assert ChatTemplate(source, {}).render(chat) == "look assistant:look=sky;"


async def test_a_body_above_what_may_wait_is_read_alone_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work_process, "MOST_WAITING_BYTES", 100_000)
    work = work_of("tokenize", {"prompt": "a" * 200, "x": "a" * 200_000})
    async with asyncio.timeout(60), running() as prepares:
        assert [(await prepares.prepare(work, "")).error for _ in range(2)] == [None, None]


async def test_equal_bodies_that_wait_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    monkeypatch.setattr(Work, "__eq__", lambda *both: compared.append(both))
    lane = ProcessPreparer(ByteText(), "", PreparedTexts(0, RouterMetrics()))._large
    asked = [asyncio.create_task(lane.prepare(work_of("/v1/chat/completions", b"a" * 10), "")) for _ in range(9)]
    await asyncio.sleep(0)
    asked[-1].cancel()
    await asyncio.sleep(0)
    assert not compared
    for task in asked:
        task.cancel()


async def test_a_router_that_may_not_start_a_process_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def start(*_: Any, **__: Any) -> Any:
        raise BlockingIOError("Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        patch.setattr(asyncio, "create_subprocess_exec", start)
        async with asyncio.timeout(60), running() as prepares:
            work = work_of("tokenize", {"prompt": "a" * 200, "x": "a" * 5_000})
            assert isinstance((await prepares.prepare(work, "")).error, InternalError)
            patch.undo()
            assert (await prepares.prepare(work, "")).error is None


async def test_a_process_that_reads_requests_is_told_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_PASSWORD", "hush-hush")
    async with running() as prepares:
        assert (await prepares.prepare(work_of("tokenize", {"prompt": "a", "x": "a" * 5_000}), "")).error is None
        child = prepares._small._child
        assert child is not None
        said = await asyncio.to_thread(Path(f"/proc/{child._process.pid}/environ").read_bytes)
    assert b"PATH=" in said
    assert b"hush" not in said


async def test_requests_that_wait_when_their_router_ends_are_refused() -> None:
    async with running() as prepares:
        lane, work = prepares._large, work_of("tokenize", {"prompt": "a", "x": "a" * 200_000})
        asked = [asyncio.create_task(prepares.prepare(work, "")) for _ in range(3)]
        while len(lane._queues) == 0 or len(lane._queues[""].waiting) != 2:
            await asyncio.sleep(0)
    async with asyncio.timeout(60):
        asked.append(asyncio.create_task(prepares.prepare(work, "")))
        outcomes = await asyncio.gather(*asked)
    assert all(isinstance(outcome.error, Draining) for outcome in outcomes)


def test_one_request_takes_no_more_than_half_of_its_containers_memory(tmp_path: Path) -> None:
    limit = tmp_path / "memory.max"
    assert most_bytes(limit) == MOST_BYTES
    for said, most in (("max", MOST_BYTES), (str(1 << 30), 512 << 20), (str(1 << 40), MOST_BYTES)):
        limit.write_text(said + "\n")
        assert most_bytes(limit) == most


class Held(InlinePreparer):
    """Keeps requests waiting, and notes who waits."""

    def __init__(self) -> None:
        super().__init__(ByteText())
        self.waiting: list[str] = []

    async def prepare(self, work: Work, tenant: str) -> PreparationOutcome:
        self.waiting.append(tenant)
        try:
            await asyncio.Event().wait()
        finally:
            self.waiting.remove(tenant)
        raise AssertionError


async def test_without_keys_addresses_take_turns_and_who_waits_is_held_to_its_deadline() -> None:
    held = Held()
    app = build_http_app(RequestHandler(ScriptedDispatcher(), held, RouterMetrics(), model="toy"), max_body_bytes=MIB)

    async def ask(host: str, path: str, timeout_s: float) -> httpx.Response:
        transport = httpx.ASGITransport(app, client=(host, 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as http:
            return await http.post(path, json={"prompt": "a"}, headers={"x-request-timeout-s": str(timeout_s)})

    long = [asyncio.create_task(ask(host, "/v1/completions", 600)) for host in ("10.0.0.1", "10.0.0.2")]
    async with asyncio.timeout(60):
        while len(held.waiting) < 2:
            await asyncio.sleep(0.01)
        assert sorted(held.waiting) == ["10.0.0.1", "10.0.0.2"]
        assert (await ask("10.0.0.1", "/v1/completions", 0.1)).status_code == 504
    for task in long:
        task.cancel()
    await asyncio.wait(long)
    assert held.waiting == []


def test_what_is_nested_too_deeply_for_its_template_is_the_clients_mistake(smollm2_dir: Path) -> None:
    text = load_text(smollm2_dir)
    for depth in range(900, 1000, 5):
        nested = '{"a":' + "[" * depth + '"<|im_start|>"' + "]" * depth + "}"
        variables = f'{{"messages":[{{"role":"user","content":"x"}}],"chat_template_kwargs":{nested}}}'.encode()
        called = {"type": "function", "function": {"name": "f", "arguments": nested}}
        said = {
            "messages": [
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": None, "tool_calls": [called]},
            ]
        }
        for body in (variables, said):
            outcome = prepare(work_of("/v1/chat/completions", body), text)
            assert outcome.error is None or isinstance(outcome.error, InvalidRequest)


async def test_what_is_nested_too_deeply_for_a_reply_is_refused_where_it_is_read() -> None:
    async with running() as prepares:
        handler = RequestHandler(ScriptedDispatcher(), prepares, RouterMetrics(), model="toy")
        transport = httpx.ASGITransport(build_http_app(handler, max_body_bytes=MIB))
        async with httpx.AsyncClient(transport=transport, base_url="http://toy") as http:
            statuses = []
            for depth in (400, *range(700, 1000, 5)):
                parameters = '{"a":' * depth + "1" + "}" * depth
                tool = f'{{"type": "function", "name": "f", "parameters": {parameters}}}'
                body = f'{{"input": "hi", "stream": true, "tool_choice": "none", "tools": [{tool}]}}'
                got = await http.post("/v1/responses", content=body, headers={"content-type": "application/json"})
                statuses.append(got.status_code)
    assert (statuses[0], statuses[-1], set(statuses)) == (200, 400, {200, 400})


def test_a_process_without_memory_for_an_answer_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    class HasEndedError(Exception):
        pass

    def end() -> None:
        raise HasEndedError

    def read(stream: object) -> None:
        raise MemoryError

    monkeypatch.setattr(process, "_write", lambda said: None)
    monkeypatch.setattr(process, "_read", read)
    monkeypatch.setattr(process.os, "abort", end)
    with pytest.raises(HasEndedError):
        process._RoutersSegments().find([b"k" * 16])
