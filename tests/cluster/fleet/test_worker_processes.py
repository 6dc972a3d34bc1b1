"""Workers and those who pull from them as processes of their own: killed, frozen, told to end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from typing import IO

import pytest

from tests.cluster.forked import MOST_BYTES, WORKER_MODULES, ForkedProcess, fork
from tests.cluster.processes import PATIENCE_S
from tests.process_table import has_stopped
from tests.trials.chaos.injection.process import command_of
from tests.unit.worker.callers import Puller, Router, router_to
from tests.unit.worker.rig import BLOCK, decode, eventually, expected_tokens, paced, prefill, prompt_of, worker_config
from twostroke.config import CacheConfig, ModelConfig, Role, RuntimeConfig, ScheduleConfig, WorkerConfig
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2
from twostroke.transfer.base import Transfer
from twostroke.worker.host import ReadyInfo

PROMPT = prompt_of(8 * BLOCK + 5)
LARGE_PAGES = ModelConfig(model="paced:page_bytes=65536,max_model_len=512")
BY_BLOCK = ScheduleConfig(max_num_seqs=8, max_num_batched_tokens=BLOCK)


class Process:
    """A child that runs a module. Create it with `process`."""

    def __init__(self, child: ForkedProcess, errors: IO[bytes]) -> None:
        self.child = child
        self._errors = errors

    async def line(self) -> str:
        return (await asyncio.wait_for(self.child.stdout.readline(), PATIENCE_S)).decode()

    def signal(self, number: signal.Signals) -> None:
        self.child.send_signal(number)

    async def end(self) -> tuple[int, str]:
        """(exit code, stderr) once it has ended by itself."""
        code = await asyncio.wait_for(self.child.wait(), PATIENCE_S)
        return code, self.errors

    @property
    def errors(self) -> str:
        """Its stderr so far."""
        return os.pread(self._errors.fileno(), MOST_BYTES, 0).decode()


@contextlib.asynccontextmanager
async def process(*command: str, told: str = "") -> AsyncIterator[Process]:
    """`told` is what it reads from stdin."""
    with tempfile.TemporaryFile() as errors:
        child = await fork(*command, loads=WORKER_MODULES, stderr=errors)
        try:
            child.stdin.write(told.encode())
            child.stdin.close()
            yield Process(child, errors)
        finally:
            child.kill()
            await child.wait()


@contextlib.asynccontextmanager
async def worker_process(config: WorkerConfig) -> AsyncIterator[tuple[Process, ReadyInfo]]:
    async with process(*command_of(f"{config.role.value}_worker"), told=config.to_json()) as running:
        yield running, ReadyInfo(**json.loads(await running.line()))


def source_at(info: ReadyInfo) -> worker_pb2.PageSource:
    return worker_pb2.PageSource(worker_id=info.worker_id, address=info.address, epoch=info.epoch)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_lease_ends_with_its_puller(end: signal.Signals) -> None:
    async with prefill() as source:
        info = source.info
        async with process(
            sys.executable, "-m", "tests.cluster.puller", info.address, info.epoch, info.fingerprint
        ) as puller:
            assert await puller.line() == "pulled\n"
            assert source.host.pool.count(PageState.ACTIVE) == 8
            puller.signal(end)
            await source.idle()


@pytest.mark.parametrize(
    ("end", "transport"),
    [
        (signal.SIGKILL, "shm"),
        pytest.param(signal.SIGKILL, "tcp", marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, "shm", marks=pytest.mark.slow),
        (signal.SIGSTOP, "tcp"),
    ],
)
async def test_a_source_that_ends_during_a_pull_costs_the_client_nothing(end: signal.Signals, transport: str) -> None:
    config = worker_config(
        Role.PREFILL,
        model=paced(prefill_tokens_per_s=100),
        schedule=BY_BLOCK,
        runtime=RuntimeConfig(transports=(transport,)),
    )
    async with worker_process(config) as (source, info), decode() as target, router_to(target) as router:
        got = await router.open(PROMPT, 5, source=source_at(info))
        await eventually(lambda: target.metric("pull_bytes_total", transport=transport) > 0)
        source.signal(end)
        async with asyncio.timeout(PATIENCE_S):
            await got.done.wait()
        assert got.tokens == expected_tokens(PROMPT, 5)
        assert target.metric("pull_failures_total", reason="peer_lost") == 1


@pytest.mark.parametrize(
    ("end", "is_split"),
    [
        (signal.SIGKILL, False),
        pytest.param(signal.SIGKILL, True, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, False, marks=pytest.mark.slow),
        (signal.SIGSTOP, True),
    ],
)
async def test_a_peer_that_ends_during_a_fetch_costs_the_client_nothing(
    end: signal.Signals, is_split: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = worker_config(Role.PREFILL, "holder", runtime=RuntimeConfig(transports=("tcp",)))
    async with (
        worker_process(config) as (peer, info),
        prefill("source") as source,
        decode() as target,
        router_to(target) as router,
    ):
        async with contextlib.aclosing(Puller(info)) as puller:
            await puller.pages(puller.pull(PROMPT[: 6 * BLOCK]), 6)
        computing = source if is_split else target
        for transport in computing.host.transports:
            monkeypatch.setattr(transport, "pull", after_the_end_of(peer, end, transport.pull))
        prefix = PeerPrefix(source_at(info), 6)
        got = await router.answer(PROMPT, 5, source=source if is_split else None, peer=prefix)
        assert got.tokens == expected_tokens(PROMPT, 5)
        reasons = ("peer_lost", "transfer_failed", "cancelled")
        assert sum(computing.metric("peer_pull_failures_total", reason=reason) for reason in reasons) == 1
        assert computing.metric("peer_pulled_blocks_total") == 0


def after_the_end_of(peer: Process, end: signal.Signals, pull: Callable[..., Transfer]) -> Callable[..., Transfer]:
    """The peer has announced its pages, and they are about to be read, when it ends or stands still."""

    def pull_too_late(*arguments) -> Transfer:
        peer.signal(end)
        while not has_stopped(peer.child.pid):
            time.sleep(0.001)
        return pull(*arguments)

    return pull_too_late


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_decode_worker_that_is_told_to_end_finishes_what_is_open(number: signal.Signals) -> None:
    async with worker_process(worker_config(Role.DECODE, model=paced(step_ms=10))) as (worker, info):
        router = await Router(info).connect()
        got = await router.open(PROMPT, 60)
        await eventually(lambda: len(got.tokens) > 3)
        worker.signal(number)
        await got.done.wait()
        assert got.tokens == expected_tokens(PROMPT, 60)
        await router.aclose()
        code, errors = await worker.end()
        assert code == 0
        assert "Traceback" not in errors, errors


async def test_a_second_signal_does_not_wait() -> None:
    async with worker_process(worker_config(Role.DECODE, model=paced(step_ms=50))) as (worker, info):
        router = await Router(info).connect()
        got = await router.open(PROMPT, 1500)
        await eventually(lambda: len(got.tokens) > 1)
        worker.signal(signal.SIGTERM)
        await eventually(lambda: "draining" in worker.errors)  # two that come before the first is seen are one
        worker.signal(signal.SIGTERM)
        code, errors = await worker.end()
        assert code == 0
        assert "Traceback" not in errors, errors
        assert not got.done.is_set()
        await router.aclose()


async def test_a_prefill_worker_that_is_told_to_end_waits_for_open_pulls() -> None:
    config = worker_config(Role.PREFILL, model=paced(prefill_tokens_per_s=400), schedule=BY_BLOCK)
    async with worker_process(config) as (worker, info), contextlib.aclosing(Puller(info)) as puller:
        call = puller.pull(prompt_of(8 * BLOCK))
        await puller.pages(call, 1)
        worker.signal(signal.SIGTERM)
        await puller.pages(call, 7)
        call.cancel()
        code, errors = await worker.end()
        assert code == 0
        assert "Traceback" not in errors, errors


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "192.0.2.1"}, "cannot listen on 192.0.2.1"),
        ({"runtime": RuntimeConfig(transports=("pigeon",))}, "pigeon"),
        (
            {"model": LARGE_PAGES, "cache": CacheConfig(kv_cache_memory_bytes=8 << 20, host_cache_bytes=5000)},
            "--host-cache 5000 holds 0 pages of 65536 bytes; at l",
        ),
        (
            {"cache": CacheConfig(kv_cache_memory_bytes=8 << 20, disk_cache_bytes=1 << 30, disk_cache_dir="/proc/x")},
            "--disk-cache-dir /proc/x cannot be used: No such file",
        ),
    ],
)
async def test_a_worker_that_cannot_start_says_why_in_one_line(settings: dict, words: str) -> None:
    """A launcher passes that line on: `test_serve.py`."""
    config = worker_config(Role.DECODE).replace(**settings)
    async with process(sys.executable, "-m", "decode_worker", told=config.to_json()) as worker:
        code, errors = await worker.end()
        assert code == 2
        assert "Traceback" not in errors
        assert errors.splitlines()[-1].startswith("ConfigError: ")
        assert words in errors
