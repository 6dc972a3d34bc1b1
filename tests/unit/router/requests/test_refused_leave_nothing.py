"""What a refused request held is freed with its answer, not when the garbage collector comes by."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

import grpc
import grpc.aio
import pytest

from twostroke.base.errors import ServeError, without_frames
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

SENT = b"a" * 3000
CLIENTS = ("httpx", "httpx._models", "httpx._content")
BODIES = [
    ("/v1/completions", b'{"prompt": "' + SENT + b'", "model": "none"}'),
    ("/v1/completions", b'{"prompt": "' + SENT + b'"}'),
    ("/v1/completions", b"[" * 3000),
    ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "' + SENT + b'"}], "stream": true}'),
    ("/tokenize", b'{"prompt": 5}'),
]


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def garbage() -> list[object]:
    """Errors and parts of requests in cycles that only the collector finds."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        ours = [each for each in gc.garbage if type(each).__module__ not in CLIENTS]
        held = [part for each in ours for part in gc.get_referents(each)]
        return [part for part in held if isinstance(part, ServeError) or (isinstance(part, bytes) and SENT in part)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_over_http(frontend, path, body):
    headers = {"content-type": "application/json"}
    assert (await frontend.http.post(path, content=body, headers=headers)).status_code >= 400
    with no_collection():
        assert (await frontend.http.post(path, content=body, headers=headers)).status_code >= 400
        assert garbage() == []


@pytest.mark.parametrize(
    "request_sent", [{"text": SENT.decode()}, {"text": "a", "model": "x"}, {"text": "a", "stop": {"max_tokens": 10**6}}]
)
async def test_over_grpc(frontend, request_sent):
    generate = inference_pb2_grpc.InferenceStub(frontend.channel).Generate
    with no_collection():
        with pytest.raises(grpc.aio.AioRpcError):
            _ = [message async for message in generate(inference_pb2.GenerateRequest(**request_sent))]
        assert garbage() == []


def test_the_errors_behind_an_error_forget_their_frames_too():
    try:
        try:
            raise KeyError("inner")
        except KeyError as inner:
            raise ServeError("outer") from inner
    except ServeError as outer:
        error = without_frames(outer)
    assert isinstance(error.__cause__, KeyError)
    assert error.__traceback__ is None
    assert error.__cause__.__traceback__ is None
