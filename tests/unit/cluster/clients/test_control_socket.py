"""Orders to a running launcher, over its socket."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import pytest

from cluster.clients import control_socket
from cluster.commands.changing import restart
from twostroke.base.errors import InvalidRequest, NotFound, PeerLost


async def test_what_comes_of_an_order_goes_back_as_a_result_or_as_the_error_that_it_was(tmp_path: Path) -> None:
    async def add(a: int, b: int) -> int:
        return a + b

    async def fail() -> None:
        raise NotFound("there is no worker 'decode-7'")

    async with control_socket.serving_socket(tmp_path, {"add": add, "fail": fail}):
        assert await asyncio.to_thread(control_socket.send, tmp_path, "add", a=1, b=2) == 3
        with pytest.raises(NotFound, match="decode-7"):
            await asyncio.to_thread(control_socket.send, tmp_path, "fail")
        with pytest.raises(InvalidRequest, match="steal"):
            await asyncio.to_thread(control_socket.send, tmp_path, "steal")
    with pytest.raises(PeerLost):
        control_socket.send(tmp_path, "add", a=1, b=2)


async def test_a_rolling_restart_passes_over_a_worker_that_retires_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def processes() -> dict[str, list[str]]:
        return {"workers": ["decode-0", "decode-1"], "routers": []}

    async def drain(worker_id: str, deadline_s: float, restart: bool, force: bool) -> int:
        if worker_id == "decode-0":
            raise NotFound("there is no worker 'decode-0'")
        return 0

    async def restart_supervisor() -> None:
        pass

    monkeypatch.setattr(restart, "folder", lambda args: tmp_path)
    monkeypatch.setattr("cluster.clients.supervisor_access.folder", lambda args: tmp_path)
    parser = argparse.ArgumentParser()
    restart.add_arguments(parser)
    known = {"processes": processes, "drain": drain, "restart_supervisor": restart_supervisor}
    async with control_socket.serving_socket(tmp_path, known):
        assert await asyncio.to_thread(restart.run, parser.parse_args(["--all"])) == 0
        with pytest.raises(NotFound, match="decode-0"):
            await asyncio.to_thread(restart.run, parser.parse_args(["decode-0"]))
    assert capsys.readouterr().out.splitlines() == [
        "decode-0 has retired meanwhile",
        "decode-1 serves again",
        "supervisor serves again",
    ]


async def test_an_order_goes_on_when_whoever_gave_it_goes_away(tmp_path: Path) -> None:
    may_end, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await may_end.wait()
        ended.set()

    async with control_socket.serving_socket(tmp_path, {"work": work}):
        _, writer = await asyncio.open_unix_connection(tmp_path / control_socket.SOCKET)
        writer.write(b'{"command": "work"}\n')
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        may_end.set()
        async with asyncio.timeout(60):
            await ended.wait()
