"""What TLS costs: `python -m tests.trials.bench_tls`. Pages from process to process, and first tokens of a whole
cluster, plain and encrypted in turns, all over loopback. Ratios are of the two in one round, which the same noise has
seen."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from cluster.flags.client_credentials import ClientTls
from tests.certificates import Authority
from tests.cluster.processes import Client, ProcessCluster, running_cluster
from tests.unit.transfer import page_owner
from tests.unit.transfer.makers import make_certificates, make_memory, make_transport
from tests.unit.worker.rig import prompt_of
from tools.clients.connect import tls_endpoint
from twostroke.base.ids import Epoch, PageId
from twostroke.config import CacheConfig, ModelConfig
from twostroke.transfer.base import Identity, PageCopy, PageEndpoint, ReadOutcome

PAGE_BYTES, PAGES = 360 << 10, 182
PROMPT_TOKENS = 512
PULLS, ANSWERS = 40, 60
KINDS = ("plain", "encrypted")

Once = Callable[[str, int], Awaitable[float]]
"""Seconds of one of a kind in a round."""


async def compare(what: str, rounds: int, once: Once) -> None:
    for kind in KINDS:
        await once(kind, rounds)  # connections are there, and memory is touched
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(rounds):
        for kind in KINDS if number % 2 else reversed(KINDS):
            taken[kind].append(await once(kind, number))
    ratios = [encrypted / plain for plain, encrypted in zip(taken["plain"], taken["encrypted"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = ", ".join(f"{kind} {statistics.median(times) * 1e3:.1f} ms" for kind, times in taken.items())
    print(f"{what}: {medians}; encrypted over plain {middle:.2f} (half of {rounds} rounds: {low:.2f} to {high:.2f})")


async def pulls() -> None:
    """64 MiB from another process, over one peer."""
    owners, peers = [], {}
    memory = make_memory("host", PAGES, PAGE_BYTES)
    for kind, made in zip(KINDS, ("tcp", "tcp-tls"), strict=True):
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        options = {"group": "host", "pages": PAGES, "page_bytes": PAGE_BYTES, "seed": 1, "incarnation": 1}
        options |= {"worker_id": "owner", "fingerprint": "same", "token": "secret", "kinds": [made]}
        owner = multiprocessing.get_context("spawn").Process(target=page_owner.run, args=(theirs, options), daemon=True)
        owner.start()
        owners.append((owner, ours))
        endpoint = PageEndpoint.unpack((await asyncio.to_thread(ours.recv))[0])
        transport = make_transport(made)
        await transport.open(memory, Identity(f"reader-{kind}", Epoch.begin(1), "same", "secret"))
        peers[kind] = transport, await transport.connect(endpoint, 20.0)
    copies = [PageCopy(PageId(page), PageId(page), 0) for page in range(PAGES)]

    async def pull(kind: str, number: int) -> float:
        del number
        transport, peer = peers[kind]
        begun_s = time.perf_counter()
        transfer = transport.pull(peer, copies, 60.0)
        result = await transport.wait(transfer)
        taken_s = time.perf_counter() - begun_s
        await transport.fence(transfer)
        assert result.outcome is ReadOutcome.DONE, result
        return taken_s

    await compare("a pull of 64 MiB", PULLS, pull)
    for transport, _ in peers.values():
        await transport.close()
    for owner, _ in owners:
        owner.kill()


async def first_tokens(folder: Path) -> None:
    """A prompt of 11 MiB of pages: client, router, prefill worker, decode worker, and back."""
    endpoints, own = Authority(folder, "endpoints"), Authority(folder, "own")
    model = ModelConfig(model=f"paced:prefill_tokens_per_s=1e6,step_ms=1,page_bytes={PAGE_BYTES},max_model_len=2048")
    endpoint = ClientTls(ca=endpoints.file.read_bytes(), name="localhost")
    tls = {
        "tls": endpoints.config(shown := endpoints.issue("endpoint")),
        "cluster_tls": own.config(own.issue("worker")),
    }
    client = ClientTls(ca=endpoint.ca, name=endpoint.name, cert=str(shown.cert), key=str(shown.key))
    async with AsyncExitStack() as stack:

        async def cluster(**options: object) -> ProcessCluster:
            cache = CacheConfig(kv_cache_memory_bytes=256 << 20)
            running = running_cluster(
                prefill=1, decode=1, model=model, cache=cache, policy="random", transports=("tcp",), **options
            )  # type: ignore[arg-type]  # certificates
            return await stack.enter_async_context(running)

        clients = {
            "plain": Client((await cluster()).grpc),
            "encrypted": Client((await cluster(**tls)).grpc, tls_endpoint(client)),
        }

        async def ask(kind: str, number: int) -> float:
            begun_s = time.perf_counter()
            async for message in clients[kind].stream(prompt_of(PROMPT_TOKENS, seed=number), max_tokens=1):
                if message.token_ids:
                    return time.perf_counter() - begun_s
            raise AssertionError("no token came")

        await compare(f"first tokens, {PROMPT_TOKENS} tokens of prompt", ANSWERS, ask)
        for each in clients.values():
            await each.close()


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tests.trials.bench_tls", description=__doc__).parse_args()
    with tempfile.TemporaryDirectory() as made:
        make_certificates(Path(made))
        asyncio.run(pulls())
        asyncio.run(first_tokens(Path(made)))
