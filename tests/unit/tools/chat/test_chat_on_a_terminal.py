"""`twostroke chat` in a terminal, as somebody types who meets it for the first time; the server is played."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from aiohttp import web

from tools.chat.server import GrpcServer, Sampling
from tools.cli import main
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

PATIENCE_S = 60.0
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


class PlayedServer:
    """Answers "endless" without an end, refuses "too long", and else says what it was told last."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.left = threading.Event()
        """A client has gone in the middle of an answer."""

    async def models(self, request: web.Request) -> web.Response:
        del request
        card = {"id": "toy", "recommended_sampling": {"temperature": 0.2, "top_p": 0.9}}
        return web.json_response({"object": "list", "data": [card]})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        asked = body["messages"][-1]["content"]
        if asked == "too long":
            error = {"message": "maximum context length is 5 tokens", "type": "invalid_request_error"}
            return web.json_response({"error": error | {"code": "context_length_exceeded"}}, status=400)
        answer = web.StreamResponse()
        await answer.prepare(request)
        try:
            for _ in range(1_000_000 if asked == "endless" else 1):
                chunk = {"choices": [{"index": 0, "delta": {"content": f"**you** said {asked} "}}]}
                await answer.write(f"data: {json.dumps(chunk)}\n\n".encode())
                await asyncio.sleep(0.02)
        except (ConnectionError, asyncio.CancelledError):
            self.left.set()
            raise
        await answer.write(b"data: [DONE]\n\n")
        return answer


@contextmanager
def played() -> Iterator[tuple[PlayedServer, str]]:
    """On a thread of its own; HOST:PORT."""
    server, address = PlayedServer(), Future[str]()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        app = web.Application()
        app.add_routes([web.get("/v1/models", server.models), web.post("/v1/chat/completions", server.chat)])
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        address.set_result(f"{host}:{port}")
        await stop.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield server, address.result(PATIENCE_S)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


ON_A_TERMINAL = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.login_tty(0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
"""Tests that a shell runs in the background ignore Ctrl-C, and so would their children."""


class Terminal:
    """A program on a pseudo terminal."""

    def __init__(self, *command: str, **variables: str) -> None:
        self._ours, theirs = pty.openpty()
        self.screen = ""
        self.process = subprocess.Popen(
            [sys.executable, "-c", ON_A_TERMINAL, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=os.environ | {"TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"} | variables,
        )
        os.close(theirs)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def until(self, is_so: Callable[[str], bool]) -> None:
        """Waits until what was printed since the last call is as it should be."""
        since, give_up_s = len(self.screen), time.monotonic() + PATIENCE_S
        while not is_so(self.screen[since:]):
            assert time.monotonic() < give_up_s, self.screen
            if select.select([self._ours], [], [], 0.1)[0]:
                try:
                    self.screen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(self._ours, 65536).decode("latin-1"))
                except OSError:  # it has ended
                    assert is_so(self.screen[since:]), self.screen
                    return

    def until_prompt(self, after: str) -> None:
        """Waits until that was printed and the next line may be typed."""
        self.until(lambda text: ">" in text.partition(after)[2])

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)


def test_a_conversation_outlives_an_interrupted_answer_and_a_refused_question(tmp_path: Path) -> None:
    with played() as (server, address):
        command = [sys.executable, "-m", "tools.cli", "chat", "--http", address, "--top-p", "0.5"]
        terminal = Terminal(*command, XDG_STATE_HOME=str(tmp_path))
        try:
            terminal.until_prompt("Ctrl-D leaves")
            assert f"toy at {address}" in terminal.screen
            terminal.type("hello\r")
            terminal.until_prompt("**you** said hello")
            terminal.type("endless\r")
            terminal.until(lambda text: text.count("endless") > 3)
            terminal.type(CTRL_C)
            terminal.until_prompt("(ended)")
            assert server.left.wait(PATIENCE_S), "the server goes on with an answer that nobody wants"
            terminal.type("too long\r")
            terminal.until_prompt("maximum context length is 5 tokens (/new")
            terminal.type("/system be brief\r")
            terminal.until_prompt("system: be brief")
            terminal.type(f"{UP}{UP}{UP}{UP}\r")
            terminal.until_prompt("**you** said hello")
            terminal.type(CTRL_D)
            assert terminal.process.wait(PATIENCE_S) == 0
        finally:
            terminal.end()
    first, *_, last = server.bodies
    assert (first["temperature"], first["top_p"]) == (0.2, 0.5), "a flag comes before what the model recommends"
    roles = [message["role"] for message in last["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant", "user"], "without what was refused"
    assert last["messages"][4]["content"].startswith("**you** said endless"), "what came of it is remembered"
    history = tmp_path / "twostroke" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    assert "+too long" in history.read_text()


def test_piped_answers_are_plain_and_a_refused_line_does_not_end_them(tmp_path: Path) -> None:
    with played() as (_, address):
        done = subprocess.run(
            [sys.executable, "-m", "tools.cli", "chat", "--http", address],
            input="one\ntoo long\n\ntwo\n",
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"XDG_STATE_HOME": str(tmp_path)},
        )
    assert done.stdout == "**you** said one \n\n**you** said two \n"
    assert "maximum context length" in done.stderr
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


class PlayedInference(inference_pb2_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.asked: list[inference_pb2.GenerateRequest] = []

    async def GetModel(self, request: inference_pb2.GetModelRequest, context: Any) -> inference_pb2.GetModelResponse:  # noqa: N802
        del request, context
        recommended = inference_pb2.SamplingOptions(temperature=0.2, top_k=7)
        return inference_pb2.GetModelResponse(model="toy", recommended_sampling=recommended)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Any:  # noqa: N802
        del context
        self.asked.append(request)
        yield inference_pb2.GenerateResponse(text="hello", resume_token="a")


async def test_over_grpc_the_recommended_sampling_is_used_as_well() -> None:
    server, service = grpc.aio.server(), PlayedInference()
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        chat = GrpcServer([f"127.0.0.1:{port}"], Sampling(temperature=0.0, max_tokens=3), "", None)
        assert [piece async for piece in chat.answer([{"role": "user", "content": "hi"}])] == ["hello"]
    finally:
        await server.stop(None)
    asked = service.asked[0]
    assert (asked.sampling.temperature, asked.sampling.top_k, asked.stop.max_tokens) == (0.0, 7, 3)
    assert not asked.sampling.HasField("top_p")


def test_one_question_that_is_refused_ends_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with played() as (_, address):
        assert main(["chat", "--http", address, "too long"]) == 2
    assert capsys.readouterr().err == "twostroke: maximum context length is 5 tokens\n"
