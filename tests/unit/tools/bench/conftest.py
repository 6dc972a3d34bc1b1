"""Tiny servers that misbehave on request, and options as the command line makes them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cluster.flags.parser import Parser
from tools.bench import add_arguments
from tools.bench.options import BenchOptions, options_from
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

STEP_S = 0.002
NARROW = 3
"""Requests that the behaviour "narrow" has room for."""

Parse = Callable[..., BenchOptions]


@pytest.fixture
def arguments() -> Callable[..., argparse.Namespace]:
    def parse(*flags: str) -> argparse.Namespace:
        parser = Parser()
        add_arguments(parser)
        return parser.parse_args(flags)

    return parse


@pytest.fixture
def options(arguments: Callable[..., argparse.Namespace]) -> Parse:
    return lambda *flags: options_from(arguments(*flags))


def _sse(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"


class FakeOpenAI:
    """Answers by the model's name; the behaviours "x|y" alternate over requests."""

    def __init__(self) -> None:
        self.url = ""
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.open = 0
        self.peak_open = 0
        self.opened = asyncio.Condition()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.completions, methods=["POST"]),
            ]
        )

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "steady"}]})

    async def completions(self, request: Request) -> Response:
        body = json.loads(await request.body())
        behaviours = body["model"].split("|")
        behaviour = behaviours[len(self.bodies) % len(behaviours)]
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if behaviour == "reject" or (behaviour == "narrow" and self.open >= NARROW):
            return JSONResponse({"error": {"message": "queue full", "type": "overloaded_error"}}, status_code=429)
        if behaviour == "no-ids":
            return JSONResponse({"error": {"message": "prompt must be a string"}}, status_code=400)
        if not body["stream"]:
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            return JSONResponse({"choices": [{"text": "x", "finish_reason": "length"}], "usage": usage})
        return StreamingResponse(self._counted(self._stream(behaviour, body)), media_type="text/event-stream")

    async def _counted(self, stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self.open += 1
        self.peak_open = max(self.peak_open, self.open)
        async with self.opened:
            self.opened.notify_all()
        try:
            await self.may_answer.wait()
            async for chunk in stream:
                yield chunk
        finally:
            self.open -= 1

    async def _stream(self, behaviour: str, body: dict[str, Any]) -> AsyncIterator[bytes]:
        count = body["max_tokens"]
        per_event = 2 if behaviour == "double" else 1
        if behaviour == "silent":
            await asyncio.Event().wait()
        if "messages" in body:
            yield _sse({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for position in range(0, count, per_event):
            await asyncio.sleep(STEP_S)
            if behaviour == "breaks" and position == 2:
                yield _sse({"error": {"message": "worker died", "type": "server_error"}})
                return
            if behaviour == "cut" and position == 2:
                return
            finish = "length" if position + per_event >= count else None
            text = "hi" * per_event
            choice = {"delta": {"content": text}} if "messages" in body else {"text": text}
            yield _sse({"choices": [{**choice, "finish_reason": finish}], "usage": None})
        if behaviour != "no-usage":
            prompt_tokens = 7 if "messages" in body else len(body["prompt"])
            details = {"prompt_tokens_details": {"cached_tokens": 3}}
            usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count, **details}
            yield _sse({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


class Server(uvicorn.Server):
    """Says when it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepts = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepts.set()


@contextlib.asynccontextmanager
async def _serve(app: Starlette) -> AsyncIterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none", timeout_graceful_shutdown=1)
    server = Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        await server.accepts.wait()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()


@pytest.fixture
async def openai_server() -> AsyncIterator[FakeOpenAI]:
    fake = FakeOpenAI()
    async with _serve(fake.app) as url:
        fake.url = url
        yield fake


class FakeInference(inference_pb2_grpc.InferenceServicer):
    vocab_size = 300

    def __init__(self) -> None:
        self.address = ""
        self.requests: list[inference_pb2.GenerateRequest] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        self.requests.append(request)
        if request.model == "reject":
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue full")
        if request.model == "silent":
            await asyncio.Event().wait()
        count = request.stop.max_tokens
        for position in range(count):
            await asyncio.sleep(STEP_S)
            if request.model == "cut" and position == 2:
                return
            reason = "length" if position == count - 1 else ""
            yield inference_pb2.GenerateResponse(token_ids=[position], finish_reason=reason)
        usage = inference_pb2.Usage(prompt_tokens=len(request.token_ids.ids), completion_tokens=count, cached_tokens=5)
        yield inference_pb2.GenerateResponse(usage=usage)

    async def Tokenize(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def Abort(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    async def GetModel(self, request: Any, context: Any) -> inference_pb2.GetModelResponse:  # noqa: N802
        return inference_pb2.GetModelResponse(vocab_size=self.vocab_size)


@pytest.fixture
async def grpc_server() -> AsyncIterator[FakeInference]:
    fake = FakeInference()
    server = grpc.aio.server()
    inference_pb2_grpc.add_InferenceServicer_to_server(fake, server)
    fake.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield fake
    finally:
        await server.stop(None)
