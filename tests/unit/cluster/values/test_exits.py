"""What is said of the processes of a server that was told to stop."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cluster.launch import supervisor_client
from cluster.launch.supervisor_client import SupervisorClient
from cluster.ray import session as ray_session
from cluster.routers import keeper as router_keeper
from cluster.routers.client_ports import ClientPorts
from cluster.routers.keeper import RouterKeeper
from cluster.supervisor import worker_process
from cluster.terminal.announce import Announcer
from cluster.values.exits import ProcessExit, described
from tests.unit.cluster.fake_backend import FakeBackend, FakeWorker, running, until_all_serve
from twostroke.config import ListenConfig, RouterConfig


def test_who_ended_by_itself_and_who_was_killed_after_how_long_is_one_sentence() -> None:
    well, frozen = ProcessExit("router-0", 0.4, is_own=True), ProcessExit("decode-0", 5.04, is_own=False)
    assert described([well], 0.5) == "stopped after 0.5 s: router-0 ended by itself"
    assert described([well, ProcessExit("prefill-0", 1.0, is_own=True), frozen], 6.0) == (
        "stopped after 6.0 s: router-0, prefill-0 ended by themselves; "
        "decode-0 was killed 5.0 s after it was told to end"
    )
    assert described([], 0.0) == "stopped after 0.0 s: nothing was running"


async def test_a_worker_that_does_not_shut_down_is_killed_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_process, "SHUTDOWN_S", 0.05)
    backend = FakeBackend()
    async with running(backend) as fleet:
        await until_all_serve(fleet)

        async def never(worker: FakeWorker) -> None:
            if worker.worker_id == "decode-0":
                await asyncio.Event().wait()
            worker.is_shut_down = True

        monkeypatch.setattr(FakeWorker, "shutdown", never)
        exits = {ending.name: ending for ending in await fleet.stop()}
    assert exits["prefill-0"].is_own
    assert not exits["decode-0"].is_own
    assert exits["decode-0"].seconds >= 0.05
    assert all(worker.is_removed for worker in backend.workers.values())


class SilentSupervisor:
    """Is told to stop and never answers."""

    class stop:  # noqa: N801  # as Ray's actors have methods
        @staticmethod
        async def remote() -> None:
            await asyncio.Event().wait()


async def test_a_supervisor_that_does_not_answer_is_killed_with_its_workers_within_a_bound(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """decode-1 had ended by then."""
    killed: list[Any] = []

    def remove_workers(names: list[str]) -> list[str]:
        found = [name for name in names if name != "decode-1"]
        killed.extend(found)
        return found

    monkeypatch.setattr(supervisor_client, "STOP_S", 0.05)
    monkeypatch.setattr(ray_session, "remove_workers", remove_workers)
    monkeypatch.setattr(ray_session, "remove", killed.append)
    silent = SilentSupervisor()
    launcher = SupervisorClient(silent, Announcer())
    launcher._known = dict.fromkeys(("prefill-0", "decode-0", "decode-1"))  # type: ignore[arg-type]  # names are enough
    exits = await launcher.stop_fleet()
    assert [(ending.name, ending.is_own) for ending in exits] == [
        ("supervisor", False),
        ("prefill-0", False),
        ("decode-0", False),
        ("decode-1", True),
    ]
    assert killed == ["prefill-0", "decode-0", silent]
    said = capsys.readouterr().err
    assert "the supervisor has not answered 0.1 s after it was told to stop its workers" in said.replace("\n", " ")
    assert "TimeoutError" not in said


@pytest.mark.parametrize("is_own", [True, False])
async def test_a_router_that_had_to_be_killed_is_said_to_be(
    is_own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Process:
        async def stop(self, grace_s: float) -> bool:
            del grace_s
            return is_own

    config = RouterConfig(number=1, listen=ListenConfig(http_port=0, grpc_port=0))
    keeper = RouterKeeper(config, ClientPorts(config.listen, 1), tmp_path, Announcer())
    assert await keeper.stop() is None, "it was never started"
    monkeypatch.setattr(router_keeper, "RouterProcess", lambda *_: Process())
    keeper._process = Process()  # type: ignore[assignment]  # as much of one as is needed
    ending = await keeper.stop()
    assert ending is not None
    assert (ending.name, ending.is_own) == ("router-1", is_own)
