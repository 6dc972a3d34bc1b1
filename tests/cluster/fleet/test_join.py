"""`twostroke serve --address`: on somebody else's Ray cluster, which must not suffer from it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests import process_table
from tests.cluster.processes import Client
from tests.cluster.served import CHECKOUT, PACED, PATIENCE_S, SMALL, TWOSTROKE, Server, starting, wait_until
from tests.unit.worker.rig import prompt_of

RAY_TOKEN = "5" * 64
OUR_ACTORS = "decode-0,prefill-0,supervisor"


@dataclass
class Owner:
    """The owner of a Ray cluster whose only node is labelled for prefill."""

    process: subprocess.Popen[str]
    address: str
    environment: dict[str, str]

    def ask(self, line: str = "actors") -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def kill(self, title: str) -> None:
        for process in process_table.below(self.process.pid):
            if title in process_table.title_of(process):
                process.kill()
                return
        raise AssertionError(f"no process {title}")


def asked(owner: Owner, *command: str) -> subprocess.CompletedProcess[str]:
    line = [*TWOSTROKE, *command, "--address", owner.address]
    return subprocess.run(line, env=os.environ | owner.environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def owner() -> Iterator[Owner]:
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": RAY_TOKEN}
    script = Path(__file__).parents[1] / "ray_owner.py"
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


CACHE = "cache: {kv_cache_memory: 1M}"


def example() -> str:
    """deploy/examples/hosts.yaml, smaller."""
    text = (CHECKOUT / "deploy/examples/hosts.yaml").read_text()
    smaller = {
        "model: smollm2-135m": f"model: {PACED}\n  served_model_name: tiny",
        "count: 1\n  threads": "count: 0\n  threads",
        "count: 2": "count: 1",
        "prefer_labels: {role: decode}": 'labels: {role: "in(prefill, decode)"}',
        "50050": "0",
        "8000": "0",
        "50051": "0",
    }
    for usual, here in smaller.items():
        assert usual in text
        text = text.replace(usual, here)
    return f"{text}{CACHE}\n"


def test_what_a_killed_launcher_left_is_taken_over_with_its_file_and_with_nothing_else(
    owner: Owner, tmp_path: Path
) -> None:
    at = ["--address", owner.address]
    hosts = example()  # hosts.yaml
    with starting(tmp_path, *at, file=hosts, **owner.environment) as server:
        server.until_printed("Ctrl-C ends it")
        assert owner.ask() == "decode-0,supervisor"
        # The nodes' own address, not the loopback, on a cluster that may have other nodes.
        assert f"decode-0 serves at {owner.address.rpartition(':')[0]}:" in server.printed
        epochs = server.epochs()
        router = psutil.Process(server.worker_pid("-m router"))
        server.end(signal.SIGKILL)
        wait_until(lambda: not router.is_running())
    assert owner.ask() == "decode-0,supervisor"
    owner.kill("ray::SupervisorActor")
    wait_until(
        lambda: asked(owner, "scale", "--decode", "1").returncode == 0
    )  # its next life begins without a launcher

    with starting(tmp_path, *at, file=hosts.replace(CACHE, CACHE.replace("1M", "2M")), **owner.environment) as server:
        assert server.process.wait(PATIENCE_S) == 2
        assert "was started with another configuration; end it first" in server.printed.splitlines()[-1]

    with starting(tmp_path, *at, "--keep", file=hosts, **owner.environment) as server:
        server.until_printed("Ctrl-C ends it")
        assert server.epochs() == epochs
        assert server.command("chat", "Hello again?", "--max-tokens", "3").strip()
        assert server.end(signal.SIGTERM) == 0
    assert owner.ask() == "decode-0,supervisor"

    down = asked(owner, "down")
    assert down.returncode == 0, down.stderr
    assert owner.ask() == ""


@pytest.mark.slow
def test_without_the_clusters_token_it_is_refused_in_one_line(owner: Owner, tmp_path: Path) -> None:
    wrong = {"RAY_AUTH_TOKEN": "6" * 64}
    with starting(tmp_path, *SMALL, "--address", owner.address, **wrong) as server:
        assert server.process.wait(PATIENCE_S) == 2
        last = server.printed.rstrip().splitlines()[-1]
    assert last.startswith(f"twostroke: cannot join the Ray cluster at {owner.address}")


@pytest.mark.slow
def test_it_serves_on_the_joined_cluster_and_takes_only_its_own_actors_away(owner: Owner, tmp_path: Path) -> None:
    with starting(tmp_path, *SMALL, "--address", owner.address, **owner.environment) as server:
        server.until_printed("Ctrl-C ends it")
        assert owner.ask() == OUR_ACTORS
        assert server.command("chat", "Hello?", "--max-tokens", "3").strip()
        # The nodes' own address, not the loopback, on a cluster that may have other nodes.
        host = owner.address.rpartition(":")[0]
        assert f"decode-0 serves at {host}:" in server.printed
        at = ["--address", owner.address]
        (other := tmp_path / "another fleet").mkdir()
        with starting(other, *SMALL, *at, **owner.environment) as second:
            assert second.process.wait(PATIENCE_S) == 2
            assert "already has a twostroke fleet; end it with: twostroke down --address" in second.printed
        assert "prefill-0 has left" in server.command("drain", "prefill-0", "--force", *at)
        assert owner.ask() == "decode-0,supervisor"
        assert "prefill-0 serves again" in server.command("restart", "prefill-0", *at)
        assert owner.ask() == OUR_ACTORS
        server.command("down", *at)
        assert server.process.wait(PATIENCE_S) == 2
        assert "Traceback" not in server.printed
        assert "died" not in server.printed
        last = server.printed.rstrip().splitlines()[-1]
    assert last == "twostroke: the fleet was taken down by somebody else"
    assert owner.ask() == ""
    assert owner.process.poll() is None


@pytest.mark.slow
async def test_workers_of_a_node_that_shall_be_left_go_on_elsewhere_one_after_the_other_and_no_answer_changes(
    owner: Owner, tmp_path: Path
) -> None:
    head, node = owner.ask("nodes"), await asyncio.to_thread(owner.ask, "node decode")
    flags = [*SMALL, "--model", "paced:step_ms=5,max_model_len=2048", "--decode", "2", "--address", owner.address]
    with starting(tmp_path, *flags, **owner.environment) as server:
        await asyncio.to_thread(server.until_printed, "Ctrl-C ends it")
        assert owner.ask("places") == f"decode-0@{node},decode-1@{node},prefill-0@{head},supervisor@{head}"
        client = Client(server.address("gRPC"))
        is_over = asyncio.Event()

        async def use(prompt: tuple[int, ...]) -> None:
            """One answer after the other, all alike, so that some are under way at any time."""
            first = await client.tokens(prompt, max_tokens=150, temperature=0, ignore_eos=True)
            while not is_over.is_set():
                assert await client.tokens(prompt, max_tokens=150, temperature=0, ignore_eos=True) == first

        async with asyncio.TaskGroup() as load:
            for seed in range(4):
                load.create_task(use(prompt_of(200 + 7 * seed, seed=seed)))
            leave = ("drain", "--node", node, "--deadline", "600", "--address", owner.address)
            said = await asyncio.to_thread(server.command, *leave)
            assert "workers that left it: decode-0, decode-1" in said
            await asyncio.to_thread(wait_until, lambda: moves(server) == 4, lambda: server.printed)
            is_over.set()
        await client.close()
        assert owner.ask("places") == f"decode-0@{head},decode-1@{head},prefill-0@{head},supervisor@{head}"
        wait_until(lambda: owner.ask("nodes") == head)  # an empty node that shall be left ends by itself
        told = re.findall(r"decode-(\d) (drains|serves)", server.printed)[2:]
        assert told == [("0", "drains"), ("0", "serves"), ("1", "drains"), ("1", "serves")]
        assert "died" not in server.printed
        assert await asyncio.to_thread(server.end, signal.SIGINT) == 0
    assert owner.ask() == "", "only its own actors are gone"
    assert owner.process.poll() is None


def moves(server: Server) -> int:
    """Beginnings and ends."""
    return len(re.findall(r"decode-\d (drains|serves)", server.printed)) - 2
