"""`twostroke serve --address`: on somebody else's Ray cluster, which must not suffer from it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.cluster.served import PATIENCE_S, SMALL, TWOSTROKE, starting, wait_until

RAY_TOKEN = "5" * 64
OUR_ACTORS = "decode-0,prefill-0,supervisor"


@dataclass
class Owner:
    """Of a Ray cluster whose only node is labelled for decode."""

    process: subprocess.Popen[str]
    address: str
    environment: dict[str, str]

    def actors(self) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": RAY_TOKEN}
    script = Path(__file__).with_name("ray_owner.py")
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        address = ""
        while ":" not in address or " " in address:
            address = process.stdout.readline().strip()
            assert process.poll() is None
        yield Owner(process, address, {"RAY_AUTH_TOKEN": RAY_TOKEN})
        assert process.stdin is not None
        process.stdin.close()
        process.wait(PATIENCE_S)


def test_it_serves_on_the_joined_cluster_and_takes_only_its_own_actors_away(owner: Owner, tmp_path: Path) -> None:
    with starting(tmp_path, *SMALL, "--address", owner.address, **owner.environment) as server:
        server.until_printed("Ctrl-C ends it")
        assert owner.actors() == OUR_ACTORS
        assert server.command("chat", "Hello?", "--max-tokens", "3").strip()
        # The nodes' own address, not the loopback, on a cluster that may have other nodes.
        host = owner.address.rpartition(":")[0]
        assert f"prefill-0 serves at {host}:" in server.printed
        assert server.end(signal.SIGINT) == 0
    assert owner.actors() == ""
    assert owner.process.poll() is None


def test_what_a_killed_launcher_left_is_refused_by_the_next_and_taken_down_by_name(
    owner: Owner, tmp_path: Path
) -> None:
    join = [*SMALL, "--prefill", "0", "--address", owner.address]
    with starting(tmp_path, *join, **owner.environment) as server:
        server.until_printed("Ctrl-C ends it")
        router = psutil.Process(server.worker_pid("-m router"))
        server.end(signal.SIGKILL)
        wait_until(lambda: not router.is_running())
    assert owner.actors() == "decode-0,supervisor"

    with starting(tmp_path, *join, **owner.environment) as server:
        assert server.process.wait(PATIENCE_S) == 2
        assert "already has a twostroke fleet; end it with: twostroke down --address" in server.printed

    down = [*TWOSTROKE, "down", "--address", owner.address]
    done = subprocess.run(down, env=os.environ | owner.environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert owner.actors() == ""


def test_a_fleet_taken_down_by_somebody_else_ends_its_launcher_in_one_line(owner: Owner, tmp_path: Path) -> None:
    join = [*SMALL, "--prefill", "0", "--address", owner.address]
    with starting(tmp_path, *join, **owner.environment) as server:
        server.until_printed("Ctrl-C ends it")
        server.command("down", "--address", owner.address)
        assert server.process.wait(PATIENCE_S) == 2
        assert "Traceback" not in server.printed
        assert "died" not in server.printed
        last = server.printed.rstrip().splitlines()[-1]
    assert last == "twostroke: the fleet was taken down by somebody else"
    assert owner.actors() == ""


def test_without_the_clusters_token_it_is_refused_in_one_line(owner: Owner, tmp_path: Path) -> None:
    wrong = {"RAY_AUTH_TOKEN": "6" * 64}
    with starting(tmp_path, *SMALL, "--address", owner.address, **wrong) as server:
        assert server.process.wait(PATIENCE_S) == 2
        last = server.printed.rstrip().splitlines()[-1]
    assert last.startswith(f"twostroke: cannot join the Ray cluster at {owner.address}")
