"""One life of a worker: starting, serving, draining, ending, and what is left afterwards."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from decode_worker.worker import DecodeWorker
from prefill_worker.worker import PrefillWorker
from tests.lora import random_tensors, write_adapter
from tests.unit.worker.callers import Router, router_to
from tests.unit.worker.rig import TOKEN, decode, eventually, expected_tokens, paced, prefill, prompt_of, worker_config
from twostroke.base.errors import ConfigError, EngineLost, PeerLost, RankLost
from twostroke.base.ids import Epoch
from twostroke.config import ModelConfig, Role, WorkerPorts
from twostroke.engine.adapters.paced import PacedAdapters
from twostroke.models.adapters.peft import read_adapter
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.v1 import control_pb2, control_pb2_grpc, worker_pb2
from twostroke.scheduler.cost import Budget
from twostroke.worker.host import WorkerHost

PROMPT = prompt_of(100)
GRPC_ENDS_S = 60.0


def open_files() -> dict[str, str]:
    found = {}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found[entry.name] = os.readlink(entry)
        except OSError:
            continue  # the directory's own descriptor
    return found


def page_memories() -> int:
    gc.collect()  # what earlier tests left to be collected
    return sum("twostroke-pages" in target for target in open_files().values())


def scraped(address: str) -> bytes:
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        return answer.read()


async def _a_busy_epoch() -> None:
    async with prefill() as source, decode() as target, router_to(target) as router:
        await router.answer(PROMPT, 5, source=source)
        assert b"twostroke_sampled_tokens_total" in await asyncio.to_thread(scraped, target.info.metrics_address)
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not others, f"tasks are left: {others}"


def test_nothing_is_left_of_a_worker_that_has_shut_down() -> None:
    gc.collect()
    memories = page_memories()  # of other tests, whose engines hang for good
    asyncio.run(_a_busy_epoch())
    gc.collect()  # gRPC's own threads and sockets end with the last of its objects, each in its own time
    threads, files = set(threading.enumerate()), len(open_files())
    for _ in range(3):
        asyncio.run(_a_busy_epoch())
    gc.collect()
    assert page_memories() <= memories
    give_up_s = time.monotonic() + GRPC_ENDS_S
    while len(open_files()) > files or set(threading.enumerate()) - threads:
        left = {thread.name for thread in set(threading.enumerate()) - threads}
        assert time.monotonic() < give_up_s, f"threads: {left}; files, of {files}: {open_files()}"
        time.sleep(0.05)


async def test_run_returns_after_shutdown_even_with_requests_and_pulls_open() -> None:
    slow = paced(prefill_tokens_per_s=100)
    async with prefill(model=slow) as source:
        worker = DecodeWorker(worker_config(Role.DECODE, model=paced(step_ms=20)))
        run_task = asyncio.create_task(worker.run())
        router = await Router(await worker.ready()).connect()
        running = await router.open(prompt_of(40, seed=1), 1000, request_id="running")
        await router.open(PROMPT, 5, request_id="pulling", source=source)
        await eventually(lambda: source.worker._open_work() == 1 and len(running.tokens) > 1)
        await worker.shutdown()
        async with asyncio.timeout(60):
            await run_task
        await router.aclose()


async def test_a_worker_that_is_cancelled_ends_like_one_that_is_shut_down() -> None:
    before = page_memories()
    worker = PrefillWorker(worker_config(Role.PREFILL))
    run_task = asyncio.create_task(worker.run())
    info = await worker.ready()
    run_task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run_task
    assert page_memories() == before
    host, _, port = info.address.rpartition(":")
    with socket.socket() as probe:
        assert probe.connect_ex((host, int(port))) != 0


async def test_ranks_that_are_lost_by_an_adapter_end_the_epoch_as_ranks_that_are_lost_by_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose(slots: PacedAdapters, digest: bytes, prepared: object) -> None:
        raise RankLost("rank 1 of 2 died: signal 9")

    monkeypatch.setattr(PacedAdapters, "put", lose)
    folder = write_adapter(tmp_path, random_tensors())
    adapter = worker_pb2.Weights(digest=read_adapter(folder).digest, path=str(folder))
    worker = DecodeWorker(worker_config(Role.DECODE))
    run_task = asyncio.create_task(worker.run())
    router = await Router(await worker.ready()).connect()
    message = router.message(PROMPT, 5)
    message.request.weights.CopyFrom(adapter)
    await router.send(message)
    with pytest.raises(EngineLost, match="rank 1 of 2 died: signal 9"):
        await run_task
    assert worker._host is not None
    assert worker._host.engine.is_lost
    await router.aclose()


async def test_a_port_in_use_is_told_by_run_and_ready_and_nothing_is_left() -> None:
    before = page_memories()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        worker = DecodeWorker(worker_config(Role.DECODE, ports=WorkerPorts(rpc=taken.getsockname()[1])))
        ready = asyncio.create_task(worker.ready())
        with pytest.raises(ConfigError, match="port is in use"):
            await worker.run()
        with pytest.raises(ConfigError, match="port is in use"):
            await ready
    assert page_memories() == before


async def test_a_failure_after_loading_is_told_to_whoever_waits_until_it_is_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = page_memories()

    async def broken(self) -> None:
        raise ConfigError("no such interface")

    monkeypatch.setattr(WorkerHost, "open", broken)
    worker = DecodeWorker(worker_config(Role.DECODE))
    ready = asyncio.create_task(worker.ready())
    with pytest.raises(ConfigError, match="no such interface"):
        await worker.run()
    with pytest.raises(ConfigError, match="no such interface"):
        await asyncio.wait_for(ready, 60)
    assert page_memories() == before


async def test_a_model_that_is_not_here_is_refused_before_anything_is_started() -> None:
    worker = DecodeWorker(worker_config(Role.DECODE, model=ModelConfig(model="nobody/has-this")))
    with pytest.raises(ConfigError, match="nobody/has-this"):
        await worker.run()


async def test_a_worker_that_does_not_serve_cannot_drain() -> None:
    with pytest.raises(PeerLost, match="decode-0 is not serving"):
        await DecodeWorker(worker_config(Role.DECODE)).drain(1)


async def test_a_bug_in_the_loop_ends_the_life_and_its_watcher_sees_it() -> None:
    worker = DecodeWorker(worker_config(Role.DECODE))
    run_task = asyncio.create_task(worker.run())
    await worker.ready()
    assert worker._host is not None

    def broken(_: Budget) -> None:
        raise ZeroDivisionError("a bug")

    worker._host.scheduler.plan = broken  # type: ignore[method-assign]
    worker._host.loop.wake()
    with pytest.raises(ExceptionGroup) as seen:
        await asyncio.wait_for(run_task, 60)
    assert seen.group_contains(ZeroDivisionError)


async def test_draining_waits_for_open_work_and_says_how_much_is_left() -> None:
    async with decode(model=paced(step_ms=10)) as worker, router_to(worker) as router:
        got = await router.open(PROMPT, 40)
        await eventually(lambda: len(got.tokens) > 1)
        assert await worker.worker.drain(0.05) == 1
        assert await worker.worker.drain(10) == 0
        await got.done.wait()
        assert got.tokens == expected_tokens(PROMPT, 40)


async def test_drain_over_rpc_is_seen_in_state_and_health() -> None:
    async with decode() as worker:
        channel = PeerChannel(worker.info.address, TOKEN)
        control = control_pb2_grpc.ControlStub(channel.channel)
        before = await control.GetServerInfo(control_pb2.GetServerInfoRequest(), metadata=channel.metadata)
        assert before.state == control_pb2.WORKER_STATE_SERVING
        answer = await control.Drain(control_pb2.DrainRequest(deadline_s=1), metadata=channel.metadata)
        assert answer.open_requests == 0
        after = await control.GetServerInfo(control_pb2.GetServerInfoRequest(), metadata=channel.metadata)
        assert after.state == control_pb2.WORKER_STATE_DRAINING
        await channel.close()


async def test_a_worker_says_what_it_is_and_how_loaded() -> None:
    async with decode(model=paced(step_ms=10)) as worker, router_to(worker) as router:
        channel = PeerChannel(worker.info.address, TOKEN)
        control = control_pb2_grpc.ControlStub(channel.channel)
        info = await control.GetServerInfo(control_pb2.GetServerInfoRequest(), metadata=channel.metadata)
        assert (info.server_id, info.role, info.epoch) == ("decode-0", "decode", worker.info.epoch)
        assert (info.fingerprint, info.metrics_address) == (worker.info.fingerprint, worker.info.metrics_address)
        model = await control.GetModelInfo(control_pb2.GetModelInfoRequest(), metadata=channel.metadata)
        assert (model.block_size, model.pool_pages, model.max_model_len) == (16, 128, 4096)
        got = await router.open(PROMPT, 30)
        await eventually(lambda: len(got.tokens) > 3)
        load = (await control.GetLoad(control_pb2.GetLoadRequest(), metadata=channel.metadata)).workers[0].load
        assert (load.running, load.waiting, load.pages_total) == (1, 0, 128)
        states = load.pages_free + load.pages_cached + load.pages_arriving + load.pages_active + load.pages_quarantined
        assert states == load.pages_total
        assert load.pages_active >= 7
        assert load.seconds_per_step >= 0.01
        await got.done.wait()
        await channel.close()


async def test_every_life_has_its_own_epoch_and_the_incarnation_it_was_given() -> None:
    epochs = []
    for incarnation in (4, 4, 5):
        worker = PrefillWorker(worker_config(Role.PREFILL))
        run_task = asyncio.create_task(worker.run(incarnation))
        epochs.append(Epoch.parse((await worker.ready()).epoch))
        await worker.shutdown()
        await run_task
    assert [epoch.incarnation for epoch in epochs] == [4, 4, 5]
    assert epochs[0] != epochs[1]
