"""How status, chat and down find a running server."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cluster.clients import state_file
from router.addresses import Addresses
from twostroke.base.errors import ConfigError, NotFound


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


ROUTERS = tuple(
    Addresses(f"127.0.0.1:800{i}", f"127.0.0.1:5005{i + 1}", f"127.0.0.1:5006{i}", f"127.0.0.1:800{i}")
    for i in range(2)
)


def own() -> state_file.ServeState:
    return state_file.own(ROUTERS, "smollm2-135m", "/tmp/ts-x")


def test_a_running_server_is_found_with_or_without_its_pid() -> None:
    state_file.write(own())
    assert state_file.the_one_running() == own()
    assert state_file.the_one_running().routers == ROUTERS
    assert (own().http, own().grpc) == ("127.0.0.1:8000", "127.0.0.1:50051")
    assert state_file.the_one_running(os.getpid()) == own()


def test_its_folder_is_the_users_alone() -> None:
    state_file.write(own())
    assert state_file.folder().stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("made", ["a link", "open to others", "somebody else's"])
def test_nothing_is_written_into_a_folder_that_others_may_have_prepared(
    made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    if made == "a link":
        state_file.folder().symlink_to(theirs)
    else:
        state_file.folder().mkdir()
        state_file.folder().chmod(0o777 if made == "open to others" else 0o700)
    if made == "somebody else's":
        own_id = os.getuid()
        monkeypatch.setattr(os, "getuid", lambda: own_id + 1)
    with pytest.raises(ConfigError, match="only this user can write to"):
        state_file.write(own())
    assert not list(theirs.iterdir())


def test_no_server_is_said_plainly() -> None:
    with pytest.raises(NotFound, match="no twostroke serve is running"):
        state_file.the_one_running()
    state_file.write(own())
    with pytest.raises(NotFound, match="with pid 1 "):
        state_file.the_one_running(1)


def test_a_file_that_a_killed_server_left_is_passed_over_even_if_its_pid_lives_again() -> None:
    state_file.write(dataclasses.replace(own(), started_ticks=own().started_ticks - 1))
    assert state_file.running() == []


def test_a_file_of_a_process_that_is_gone_is_passed_over() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    state_file.write(dataclasses.replace(own(), pid=gone.pid))
    assert state_file.running() == []


def test_a_file_that_makes_no_sense_is_passed_over() -> None:
    state_file.write(own())
    state_file.path_of(1).write_text("{")
    assert state_file.running() == [own()]


def test_of_several_servers_one_has_to_be_named() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        ticks = state_file.started_ticks(other.pid)
        assert ticks is not None
        state_file.write(own())
        state_file.write(dataclasses.replace(own(), pid=other.pid, started_ticks=ticks))
        with pytest.raises(ConfigError, match=str(other.pid)):
            state_file.the_one_running()
        assert state_file.the_one_running(os.getpid()).pid == os.getpid()
        assert other.stdin is not None
        other.stdin.close()


def test_a_file_that_another_user_put_there_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    state_file.write(own())
    other = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: other)
    assert state_file.running() == []
