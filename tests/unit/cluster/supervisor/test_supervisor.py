"""The supervisor without Ray: what it does for its workers, and what watchers are told of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from cluster.supervisor import worker_process
from cluster.supervisor.actors import ActorLocation, Serving
from cluster.supervisor.backend import WorkerDied
from cluster.supervisor.supervisor import Supervisor
from cluster.values.spec import FleetSpec
from tests.unit.cluster.fake_backend import TOKEN, Control, FakeBackend, running, spec, two_decode_workers, until
from twostroke.base.errors import ConfigError, InternalError, InvalidRequest, NotFound, PeerLost
from twostroke.rpc.channel import PeerChannel
from twostroke.rpc.v1 import control_pb2, fleet_pb2, fleet_pb2_grpc

DEAD, STARTING, SERVING = (
    control_pb2.WORKER_STATE_DEAD,
    control_pb2.WORKER_STATE_STARTING,
    control_pb2.WORKER_STATE_SERVING,
)


@asynccontextmanager
async def watching(supervisor: Supervisor, token: str = TOKEN) -> AsyncIterator[AsyncIterator[fleet_pb2.FleetView]]:
    peer = PeerChannel(await supervisor.address(), token)
    call = fleet_pb2_grpc.FleetStub(peer.channel).Watch(
        fleet_pb2.WatchRequest(watcher="test"), metadata=peer.metadata, timeout=10
    )
    try:
        yield aiter(call)
    finally:
        call.cancel()
        await peer.close()


def state_of(view: fleet_pb2.FleetView, worker_id: str = "decode-0") -> tuple[int, str]:
    worker = next(worker for worker in view.workers if worker.worker_id == worker_id)
    return worker.state, worker.epoch


async def test_all_workers_of_the_spec_come_to_serve_with_the_address_they_name() -> None:
    async with running(FakeBackend()) as supervisor:
        for worker_id in ("prefill-0", "decode-0"):
            worker = await until(supervisor, "serving", worker_id)
            assert worker.serving == Serving(f"{worker_id}:1", "1.00", "fingerprint", "metrics:1", worker.config.role)
            assert worker.to_message().node == "node"


async def test_a_watcher_sees_a_death_a_start_and_the_new_epoch_each_by_itself() -> None:
    backend = FakeBackend()
    async with running(backend) as supervisor:
        await until(supervisor, "serving")
        async with watching(supervisor) as views:
            assert state_of(await anext(views)) == (SERVING, "1.00")
            backend.workers["decode-0"].die(WorkerDied("killed"))
            seen = [state_of(await anext(views))]
            while seen[-1][0] != SERVING:
                state = state_of(await anext(views))
                if state != seen[-1]:
                    seen.append(state)
    assert seen == [(DEAD, "1.00"), (STARTING, ""), (SERVING, "2.00")]
    assert backend.workers["decode-0"].recycled == 0


async def test_a_silent_view_is_repeated() -> None:
    async with running(FakeBackend()) as supervisor:
        for worker_id in ("prefill-0", "decode-0"):
            await until(supervisor, "serving", worker_id)
        async with watching(supervisor) as views:
            assert (await anext(views)) == (await anext(views))


async def test_a_watcher_without_the_cluster_token_is_refused() -> None:
    async with running(FakeBackend()) as supervisor, watching(supervisor, "wrong") as views:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await anext(views)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_worker_that_reports_an_error_gets_a_fresh_process() -> None:
    backend = FakeBackend()
    async with running(backend) as supervisor:
        await until(supervisor, "serving")
        backend.workers["decode-0"].die(InternalError("engine thread ended"))
        worker = await until(supervisor, "serving", epoch="2.00")
    assert isinstance(worker.last_error, InternalError)
    assert backend.workers["decode-0"].recycled == 1


async def test_a_worker_is_asked_for_a_sign_of_life_for_its_latest_epoch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each question that a frozen process does not answer ends it, the new one too."""
    monkeypatch.setattr(worker_process, "PING_S", 0.01)
    backend, asked = FakeBackend(), asyncio.Semaphore(0)

    async def place() -> ActorLocation:
        asked.release()
        return await asyncio.get_running_loop().create_future()

    async with running(backend) as supervisor:
        await until(supervisor, "serving")
        backend.workers["decode-0"].die(WorkerDied("killed"))
        await until(supervisor, "serving", epoch="2.00")
        monkeypatch.setattr(backend.workers["decode-0"], "place", place)
        async with asyncio.timeout(60):
            await asked.acquire()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await asked.acquire()


async def test_a_worker_that_cannot_start_as_configured_fails_for_good_with_its_message() -> None:
    backend = FakeBackend()
    backend.dies_of = ConfigError("--kv-cache-memory is larger than the machine", field="kv_cache_memory")
    async with running(backend) as supervisor:
        worker = await until(supervisor, "failed")
        assert str(worker.last_error) == "--kv-cache-memory is larger than the machine"
        assert backend.workers["decode-0"].incarnations == [1]


async def test_a_worker_that_keeps_dying_is_started_again_and_again_with_growing_incarnations() -> None:
    backend = FakeBackend()
    backend.dies_of = WorkerDied("out of memory")
    async with running(backend) as supervisor:
        snapshot = await supervisor.snapshot()
        async with asyncio.timeout(60):
            while min(worker.observed.crashes for worker in snapshot.workers) < 3:
                snapshot = await supervisor.snapshot(snapshot.version)
        assert not any(worker.observed.has_served for worker in snapshot.workers)
    assert backend.workers["decode-0"].incarnations[:3] == [1, 2, 3]


async def test_a_restarted_supervisor_adopts_the_workers_it_finds() -> None:
    backend = FakeBackend()
    first = Supervisor(spec(), backend)
    run_task = asyncio.create_task(first.run())
    await until(first, "serving")
    await until(first, "serving", "prefill-0")
    run_task.cancel()
    assert first._run_task is not None
    first._run_task.cancel()
    await asyncio.gather(run_task, first._run_task, return_exceptions=True)

    async with running(backend) as second:
        await until(second, "serving")
        await until(second, "serving", "prefill-0")
    assert sorted(backend.created) == ["decode-0", "prefill-0"]


async def test_stopping_shuts_every_worker_down_and_removes_it() -> None:
    backend = FakeBackend()
    async with running(backend) as supervisor:
        await until(supervisor, "serving")
        await until(supervisor, "serving", "prefill-0")
    assert all(worker.is_shut_down and worker.is_removed for worker in backend.workers.values())
    assert not any(worker.incarnations[1:] for worker in backend.workers.values())


async def test_a_fleet_port_in_use_ends_the_supervisor_with_a_clear_error() -> None:
    async with running(FakeBackend()) as supervisor:
        port = int((await supervisor.address()).rpartition(":")[2])
        second = Supervisor(FleetSpec(workers=(), port=port), FakeBackend())
        with pytest.raises(ConfigError, match=str(port)):
            await second.run()


# Drains


DRAINING = control_pb2.WORKER_STATE_DRAINING


async def test_a_worker_that_drains_is_seen_to_leave_and_begins_a_new_life_where_it_shall() -> None:
    backend = FakeBackend()
    async with two_decode_workers(backend) as supervisor, watching(supervisor) as views:
        backend.control.may_end.clear()
        drain = asyncio.create_task(supervisor.drain("decode-0", 7.0, True))
        while state_of(view := await anext(views))[0] != DRAINING:
            pass
        assert state_of(view) == (DRAINING, "1.00"), "its open answers are still to be reached"
        assert next(worker for worker in view.workers if worker.worker_id == "decode-0").returns
        backend.control.may_end.set()
        assert await drain == 2
        (asked,) = backend.control.drains
        assert asked.deadline_s == 7.0
        assert [successor.worker_id for successor in asked.successors] == ["decode-1"]
        worker = await until(supervisor, "serving", epoch="2.00")
        assert (worker.observed.crashes, worker.returns) == (0, False)
        assert backend.departures["decode-0"] is None


async def test_a_worker_that_shall_not_come_back_stays_away_over_the_supervisors_lives_until_it_is_asked_back() -> None:
    backend = FakeBackend()
    async with two_decode_workers(backend) as supervisor:
        assert await supervisor.drain("decode-0", 7.0, False) == 2
        assert await supervisor.drain("decode-0", 7.0, False) == 0, "it has left already"
        await until(supervisor, "drained")
        assert backend.workers["decode-0"].is_removed
        async with watching(supervisor) as views:
            assert [worker.worker_id for worker in (await anext(views)).workers] == ["prefill-0", "decode-1"]
        assert supervisor._run_task is not None
        supervisor._run_task.cancel()
        await asyncio.gather(supervisor._run_task, return_exceptions=True)

        second = Supervisor(supervisor._spec, backend)
        run_task = asyncio.create_task(second.run())
        await until(second, "drained")
        assert await second.drain("decode-0", 7.0, True) == 0
        await until(second, "serving", epoch="2.00")
        await second.stop()
        await asyncio.gather(run_task, return_exceptions=True)


async def test_a_supervisor_that_dies_during_a_drain_goes_on_with_it_in_its_next_life() -> None:
    backend = FakeBackend()
    async with two_decode_workers(backend) as supervisor:
        backend.control.may_end.clear()
        drain = asyncio.create_task(supervisor.drain("decode-0", 7.0, False))
        await until(supervisor, "draining")
        assert supervisor._run_task is not None
        supervisor._run_task.cancel()
        await asyncio.gather(supervisor._run_task, drain, return_exceptions=True)
        backend.control.may_end.set()

        second = Supervisor(supervisor._spec, backend)
        run_task = asyncio.create_task(second.run())
        await until(second, "drained")
        assert backend.workers["decode-0"].is_removed
        await second.stop()
        await asyncio.gather(run_task, return_exceptions=True)


async def test_a_worker_that_cannot_be_told_to_drain_is_ended_all_the_same() -> None:
    backend = FakeBackend()
    async with two_decode_workers(backend) as supervisor:
        backend.workers["decode-0"].control = Control()  # nobody answers there
        backend.workers["decode-0"].die(WorkerDied("killed"))
        await until(supervisor, "serving", epoch="2.00")
        drain = asyncio.create_task(supervisor.drain("decode-0", 0.1, True))
        await until(supervisor, "draining")
        while not backend.workers["decode-0"].recycled:
            await asyncio.sleep(0.01)
        backend.workers["decode-0"].die(WorkerDied("recycled"))
        assert await drain == 0
        await until(supervisor, "serving", epoch="3.00")


async def test_what_cannot_be_drained_is_said() -> None:
    async with two_decode_workers(FakeBackend()) as supervisor:
        with pytest.raises(NotFound, match="decode-7"):
            await supervisor.drain("decode-7", 1.0, True)
    with pytest.raises(PeerLost):
        await Supervisor(spec(), FakeBackend()).drain("decode-0", 1.0, True)


@pytest.mark.parametrize("worker_id", ["decode-0", "prefill-0"])
async def test_the_last_worker_of_a_role_leaves_for_good_only_by_force(worker_id: str) -> None:
    backend = FakeBackend()
    async with two_decode_workers(backend) as supervisor:
        await supervisor.drain("decode-1", 1.0, False)
        with pytest.raises(InvalidRequest, match=f"{worker_id} is the last {worker_id[:-2]} worker that serves"):
            await supervisor.drain(worker_id, 1.0, False)
        await supervisor.drain(worker_id, 1.0, True)
        await until(supervisor, "serving", worker_id, epoch="2.00")
        await supervisor.drain(worker_id, 1.0, False, force=True)
        await until(supervisor, "drained", worker_id)
