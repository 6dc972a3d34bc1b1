"""A router that hands over or drains: clients that still read their answer, or still send their prompt, are served."""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from router.branches import BRANCHES
from router.metrics import RouterMetrics
from router.server import RouterServer
from router.text.tokenizer import ByteText
from tests.inline_preparer import InlinePreparer
from tests.listener_thread import QuickRouterServer
from tests.trials.chaos.neighbours.wire import (
    ACK,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PING,
    SETTINGS,
    WINDOW,
    frame,
    message,
)
from tests.unit.router.conftest import ScriptedDispatcher, _plain
from tests.unit.router.dialects.kserve.test_infer import ask
from tests.unit.router.grpc_listener.test_listener import connected, fields, next_frame
from twostroke.config import EndpointsConfig, ListenConfig, RouterConfig, RoutingConfig
from twostroke.rpc.v1 import kserve_pb2_grpc

SMALL_WINDOWS = struct.pack(">HI", 4, 60)
"""The client reads answers in pieces of so many bytes."""
PAUSE_S = 0.25
GRACE_S = 60.0


async def drain_in_place_of_hand_over(server: RouterServer) -> None:
    handing = asyncio.create_task(server.hand_over(GRACE_S))
    await asyncio.sleep(PAUSE_S)
    handing.cancel()
    await asyncio.gather(handing, return_exceptions=True)
    await server.drain(GRACE_S)


LEAVING: dict[str, Callable[[RouterServer], Any]] = {
    "hand over": lambda server: server.hand_over(GRACE_S),
    "drain": lambda server: server.drain(GRACE_S),
    "drain in place of a hand over": drain_in_place_of_hand_over,
}


@contextlib.asynccontextmanager
async def leaving(how: str) -> AsyncIterator[tuple[RouterServer, asyncio.Event, asyncio.Task[None]]]:
    """A router that leaves when the event is set, and closes its ports then, as `python -m router` does."""
    dispatcher, metrics, begins = ScriptedDispatcher(), RouterMetrics(), asyncio.Event()
    dispatcher.script = lambda request, index: _plain("x" * 200)
    config = RouterConfig(
        listen=ListenConfig(http_port=0, grpc_port=0),
        served_model_name="toy",
        routing=RoutingConfig(seed=1),
        endpoints=EndpointsConfig(),
    )
    parts = (config, dispatcher, InlinePreparer(ByteText(), metrics), metrics)
    server = QuickRouterServer(*parts, router_id="router-0", recorder=dispatcher.recorder, branches=BRANCHES)
    is_up = asyncio.Event()

    async def run_router() -> None:
        async with server.serving():
            is_up.set()
            await begins.wait()
            await LEAVING[how](server)

    running = asyncio.create_task(run_router())
    await is_up.wait()
    try:
        yield server, begins, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def trailer_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, pause_s: float = 0.0) -> bytes:
    """Reads an answer, and returns the header fields at its end."""
    while True:
        kind, flags, _, payload = await next_frame(reader)
        if kind == PING and not flags & ACK:
            writer.write(frame(PING, ACK, 0, payload))
        if kind == SETTINGS and not flags & ACK:
            writer.write(frame(SETTINGS, ACK))
        if kind == DATA:
            await asyncio.sleep(pause_s)
            writer.write(frame(WINDOW, 0, 1, struct.pack(">I", len(payload))))
        if kind == HEADERS and flags & END_STREAM:
            return payload


CALL = fields("ModelInfer", service="inference.GRPCInferenceService")
ASKED = message(ask(stream=False, parameters={"max_tokens": 200}).SerializeToString())


@pytest.mark.parametrize("how", LEAVING)
async def test_a_client_that_reads_slowly_gets_its_whole_answer_over_grpc(how: str) -> None:
    async with leaving(how) as (server, begins, running), asyncio.timeout(GRACE_S):
        async with connected(server.addresses.grpc, SMALL_WINDOWS) as (reader, writer):
            writer.write(frame(HEADERS, END_HEADERS, 1, CALL) + frame(DATA, END_STREAM, 1, ASKED))
            while (await next_frame(reader))[0] != HEADERS:
                pass
            begins.set()
            await asyncio.sleep(8 * PAUSE_S)
            assert b"grpc-status\x010" in await trailer_of(reader, writer, PAUSE_S)
        await running


async def test_a_prompt_that_is_on_its_way_is_answered_by_a_router_that_hands_over() -> None:
    async with leaving("hand over") as (server, begins, running), asyncio.timeout(GRACE_S):
        async with connected(server.addresses.grpc) as (reader, writer):
            writer.write(frame(HEADERS, END_HEADERS, 1, CALL) + frame(DATA, 0, 1, ASKED[:20]))
            await asyncio.sleep(PAUSE_S)
            begins.set()
            await asyncio.sleep(8 * PAUSE_S)
            writer.write(frame(DATA, END_STREAM, 1, ASKED[20:]))
            assert b"grpc-status\x010" in await trailer_of(reader, writer)
        await running


@pytest.mark.parametrize("how", LEAVING)
async def test_a_stream_in_which_nothing_is_asked_does_not_hold_it_up(how: str) -> None:
    async with leaving(how) as (server, begins, running), grpc.aio.insecure_channel(server.addresses.grpc) as channel:
        call = kserve_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer()
        await call.write(ask(stream=False, parameters={"max_tokens": 5}))
        assert (await call.read()).infer_response.outputs
        begins.set()
        done, _ = await asyncio.wait([running], timeout=GRACE_S / 2)
        assert done
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("how", LEAVING)
async def test_who_asks_what_it_serves_is_sent_elsewhere(how: str, caplog: pytest.LogCaptureFixture) -> None:
    async with leaving(how) as (server, begins, running), grpc.aio.insecure_channel(server.addresses.grpc) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await call.read()).list_services_response.service
        begins.set()
        assert await call.code() is grpc.StatusCode.UNAVAILABLE
        await running
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("how", LEAVING)
async def test_who_watches_its_health_does_not_hold_it_up(how: str) -> None:
    async with leaving(how) as (server, begins, running), grpc.aio.insecure_channel(server.addresses.grpc) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status
        begins.set()
        done, _ = await asyncio.wait([running], timeout=GRACE_S / 2)
        assert done
        assert await watch.code() is grpc.StatusCode.UNAVAILABLE
