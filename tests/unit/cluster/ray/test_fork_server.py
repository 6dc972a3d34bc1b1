"""A raylet's request becomes a process forked from the one that has imported what workers need."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.ray import fork_server, forked_worker, forking
from cluster.ray.forking import FIRST_JOB, ForkServer

PATIENCE_S = 60.0
WORKER = """
import json, os, sys
told = {"argv": sys.argv[1:], "pid": os.getpid(), "group": os.getpgid(0), "parent": os.getppid(), "name": __name__,
        "said": os.environ.get("SAID"), "has_module": "cluster.ray.placement" in sys.modules}
print(json.dumps(told))
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ForkServer]:
    monkeypatch.setattr(forking, "MODULES", ("cluster.ray.placement",))
    made = ForkServer(tmp_path, tmp_path / "fork-server.log", is_paced=True)
    yield made
    made.kill()


def ask(path: Path, folder: Path, *, job: str = FIRST_JOB) -> dict[str, object]:
    """Do what a raylet does, and return what the worker told."""
    script = folder / fork_server.SCRIPT
    script.write_text(WORKER)
    command = [sys.executable, "setup_worker.py", str(script), "--node-id=1", "--language=PYTHON"]
    if job != FIRST_JOB:
        command = [sys.executable, str(script), "--node-id=1"]
    out = folder / "out.txt"
    with out.open("wb") as out_file:
        subprocess.run(
            [sys.executable, "-I", "-S", forked_worker.__file__, str(path), *command],
            stdout=out_file,
            env={**os.environ, "RAY_JOB_ID": job, "SAID": "by the raylet"},
            check=True,
            timeout=PATIENCE_S,
        )
    until_s = time.monotonic() + PATIENCE_S
    while not out.read_text().endswith("\n") and time.monotonic() < until_s:
        time.sleep(0.01)
    told: dict[str, object] = json.loads(out.read_text())
    return told


def test_a_forked_worker_has_the_modules_and_what_the_raylet_gave_it(server: ForkServer, tmp_path: Path) -> None:
    told = ask(server.path, tmp_path)
    assert told["has_module"]
    assert told["name"] == "__main__"
    assert told["said"] == "by the raylet"
    assert told["argv"] == ["--node-id=1"], "the arguments of the script that sets up environments are not the worker's"
    assert told["group"] == told["pid"], "a raylet ends the whole process group of a worker that has ended"
    assert ask(server.path, tmp_path)["parent"] == told["parent"], "one server forks them all"


def test_a_worker_of_another_job_is_not_forked(server: ForkServer, tmp_path: Path) -> None:
    told = ask(server.path, tmp_path, job="02000000")
    assert not told["has_module"]
    assert told["said"] == "by the raylet"


def test_a_worker_starts_by_itself_where_no_fork_server_answers(tmp_path: Path) -> None:
    told = ask(tmp_path / "nowhere.sock", tmp_path, job="02000000")
    assert not told["has_module"]
    assert told["argv"] == ["--node-id=1"]
