"""The clients of routers that share a port, and what they notice when one of the routers is killed."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import time
from collections.abc import Mapping

import grpc.aio
import httpx
import openai
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests import metrics_page
from tests.cluster.served import Server, wait_until
from tools.clients.resuming import ResumingClient

STOCK_CLIENTS = 4
WHOLE_TOKENS = 60
STREAM_TOKENS = 400
"""More than half a second of steps, so that the kill comes within."""
BODY = {"temperature": 0, "seed": 1, "ignore_eos": True}
CONNECT_S = 5.0
"""Time for a new connection's answer, on a busy machine."""
PACE_S = 0.02


async def lose_a_router(doomed: Mapping[str, str], pid: int, server: Server) -> None:
    """Kills the router under load, and goes on until it serves again."""
    http = doomed["http"]
    client = openai.AsyncOpenAI(base_url=f"http://{http}/v1", api_key="none")
    expected = await whole(client)
    whole_stream = await resumable(http)
    is_over = asyncio.Event()

    async def use() -> int:
        """A stock client repeats whole answers by itself, and never fails."""
        async with openai.AsyncOpenAI(base_url=f"http://{http}/v1", api_key="none") as stock:
            for count in itertools.count(1):
                assert await whole(stock) == expected
                if is_over.is_set():
                    return count
        raise AssertionError("endless")

    async with asyncio.TaskGroup() as load:
        users = [load.create_task(use()) for _ in range(STOCK_CLIENTS)]
        streams = [load.create_task(resumable(http)) for _ in range(4)]
        plain = [load.create_task(plain_stream(client)) for _ in range(4)]
        open_there = await asyncio.to_thread(until_open, doomed)
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        newcomers = load.create_task(connect_again_and_again(http, is_over))
        await asyncio.to_thread(wait_until, lambda: not psutil.pid_exists(pid))
        newcomers_over_grpc = load.create_task(call_again_and_again(doomed["grpc"], is_over))
        assert [await stream for stream in streams] == [whole_stream] * 4
        cut = sum([not await stream for stream in plain])
        await asyncio.to_thread(server.until_printed, "router-0 ended with status -9; it is started again")
        is_over.set()
    await client.close()
    assert cut <= open_there
    assert min(user.result() for user in users) > 1
    assert newcomers.result() > 10
    assert newcomers_over_grpc.result() > 1
    print(f"killed with {open_there} open; {cut} plain streams were cut; load for {time.monotonic() - killed_s:.1f} s")


def until_open(router: Mapping[str, str]) -> int:
    """Returns how many requests are open there, once some are."""
    found = 0

    def has_some() -> bool:
        nonlocal found
        found = int(metrics_page.total(router["metrics"], "twostroke_open_requests"))
        return found >= 3

    wait_until(has_some)
    return found


async def whole(client: openai.AsyncOpenAI) -> str:
    done = await client.completions.create(
        model="tiny", prompt="Why?", max_tokens=WHOLE_TOKENS, temperature=0, seed=1, extra_body={"ignore_eos": True}
    )
    return done.choices[0].text


async def plain_stream(client: openai.AsyncOpenAI) -> bool:
    """Whether the stream has come to its end: nobody resumes it."""
    stream = await client.completions.create(
        model="tiny", prompt="How?", max_tokens=STREAM_TOKENS, stream=True, extra_body={"ignore_eos": True}
    )
    try:
        return [chunk.choices[0].finish_reason async for chunk in stream][-1] == "length"
    except (openai.APIError, httpx.TransportError):  # the client passes httpx's own on
        return False


async def resumable(http: str) -> str:
    """The text of a stream whose client goes on with it at whatever router the port leads to."""
    async with ResumingClient(http=[http]) as client:
        body = {"prompt": "Who?", "max_tokens": STREAM_TOKENS, **BODY}
        return "".join([chunk["choices"][0]["text"] async for chunk in client.stream("/v1/completions", body)])


async def connect_again_and_again(http: str, is_over: asyncio.Event) -> int:
    """Makes new connections, each of which must be answered; returns how many."""
    host, _, port = http.rpartition(":")
    for count in itertools.count(1):
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            assert (await reader.readline()).split()[1] == b"200"
            writer.close()
        if is_over.is_set():
            return count
        await asyncio.sleep(PACE_S)
    raise AssertionError("endless")


async def call_again_and_again(address: str, is_over: asyncio.Event) -> int:
    """Calls over a new connection each time; returns how often."""
    own = [("grpc.use_local_subchannel_pool", 1)]
    for count in itertools.count(1):
        async with grpc.aio.insecure_channel(address, options=own) as channel:
            question = health_pb2.HealthCheckRequest(service="live")
            said = await health_pb2_grpc.HealthStub(channel).Check(question, timeout=CONNECT_S)
            assert said.status == health_pb2.HealthCheckResponse.SERVING
        if is_over.is_set():
            return count
        await asyncio.sleep(PACE_S)
    raise AssertionError("endless")
