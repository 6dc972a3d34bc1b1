"""From a target to a client that is connected, and to one that has answered."""

from __future__ import annotations

import asyncio
import resource
import time

from tools.bench.client import Client
from tools.bench.endpoints import Endpoints
from tools.bench.load import PlannedRequest, Segment, Speller, Stream
from tools.bench.options import DEFAULT_VOCAB_SIZE, Target
from tools.bench.report import form_is_refused
from twostroke.base.errors import ConfigError, PeerLost, ServeError

POLL_S = 0.5
PROBE = PlannedRequest(0, (Segment(Stream.PROBE, 0, 8),), output_tokens=2, due_s=None)
FORM_HINT = "write URL,text where token ids are refused as prompt, and URL,no-ignore-eos where unknown fields are"


async def connect(target: Target, seed: int, vocab_size: int | None) -> Client:
    """Returns a client. Only the module of that client is imported."""
    if target.grpc is not None:
        from tools.bench.grpc_client import GrpcClient, served_vocab_size

        vocab_size = vocab_size or await served_vocab_size(target)
        return GrpcClient(target, Speller(vocab_size, seed), time.perf_counter)
    from tools.bench.http_client import HttpClient

    return await HttpClient.connect(target, Speller(vocab_size or DEFAULT_VOCAB_SIZE, seed), time.perf_counter)


async def wait_until_ready(target: Target, seed: int, vocab_size: int | None, wait_s: float) -> None:
    """Waits until a short request has been answered. Raises ConfigError or PeerLost where `wait_s` was not enough."""
    give_up_s = time.monotonic() + wait_s
    while True:
        try:
            return await answer_probe(target, seed, vocab_size)
        except ServeError:
            if time.monotonic() >= give_up_s:
                raise
        await asyncio.sleep(POLL_S)


async def all_ready(endpoints: Endpoints) -> None:
    """Waits until every server has answered a short request. Raises ConfigError or PeerLost."""
    allow_many_sockets()
    for endpoint in endpoints.all:
        await wait_until_ready(endpoint.target, endpoints.seed, endpoints.vocab_size, endpoints.wait_s)


async def answer_probe(target: Target, seed: int, vocab_size: int | None) -> None:
    client = await connect(target, seed, vocab_size)
    try:
        failure = (await client.prepare(PROBE)()).failure
    finally:
        await client.close()
    if failure is None:
        return
    message = f"{target.name} does not answer a short request: {failure.kind} ({failure.message})"
    if form_is_refused({failure.kind}, target):
        raise ConfigError(f"{message}; {FORM_HINT}", field="url")
    raise PeerLost(message, field="url")


def allow_many_sockets() -> None:
    """Raises the limit of open sockets: an open loop against a slow server may hold thousands."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
