"""A `twostroke serve` that a test starts and watches from outside, as a user would."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests import process_table
from tests.cluster import forked
from tools.cli import COMMANDS

PATIENCE_S = 90.0
CHECKOUT = Path(__file__).parents[2]
TWOSTROKE = [sys.executable, "-m", "tools.cli"]
WITHOUT_SERVER = ("serve", "up", "router", "model", "simulate", "bill", "bench")
"""Commands that ask no running server for anything."""
COMMAND_MODULES = tuple(command.module for name, command in COMMANDS.items() if name not in WITHOUT_SERVER)
PACED = "paced:step_ms=1,max_model_len=2048"
SMALL = ["--model", PACED, "--kv-cache-memory", "1M", "--served-model-name", "tiny"]
ANY_PORT = ["--http-port", "0", "--grpc-port", "0"]


@dataclass
class Server:
    """A running `twostroke serve`; everything is read from what it printed."""

    process: subprocess.Popen[bytes]
    out: Path
    temporary: Path
    environment: dict[str, str]

    @property
    def printed(self) -> str:
        return self.out.read_text()

    def until_printed(self, text: str) -> None:
        def is_there() -> bool:
            assert self.process.poll() is None or text in self.printed, self.printed
            return text in self.printed

        wait_until(is_there, lambda: self.printed)

    def address(self, label: str) -> str:
        found = re.search(rf"{label}\s+(?:http://)?(\S+?:\d+)", self.printed)
        assert found is not None, self.printed
        return found[1]

    def command(self, *arguments: str, patience_s: float = PATIENCE_S) -> str:
        """Returns what a command prints, which has to succeed."""
        done = self.run(*arguments, patience_s=patience_s)
        assert done.returncode == 0, done.stderr + self.printed
        return done.stdout

    def run(self, *arguments: str, given: str = "", patience_s: float = PATIENCE_S) -> subprocess.CompletedProcess[str]:
        """Runs a command of the user who has started it, in a process that has loaded its modules before."""
        return forked.run(
            *TWOSTROKE,
            *arguments,
            loads=COMMAND_MODULES,
            environment=self.environment,
            given=given,
            patience_s=patience_s,
        )

    def worker_pid(self, title: str) -> int:
        return int(next(process.pid for process in self.processes() if title in process_table.title_of(process)))

    def processes(self) -> list[psutil.Process]:
        """All that live because of it, itself included."""
        return process_table.with_all_below(self.process.pid)

    def epochs(self) -> dict[str, str]:
        return {
            worker["worker_id"]: worker["epoch"] for worker in json.loads(self.command("status", "--json"))["workers"]
        }

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)


def wait_until(is_so: Callable[[], bool], explain: Callable[[], str] = str) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_s, explain()
        time.sleep(0.05)


@contextmanager
def starting(
    tmp_path: Path, *flags: str, file: str | None = None, by_make: bool = False, **variables: str
) -> Iterator[Server]:
    """`serve` with flags, or `up` with the text of a cluster file: started, not yet ready. Its temporary folder is its
    own, and must be empty soon after it has ended. `by_make`: what is started is `make serve`."""
    temporary = Path("/tmp") / f"t{os.getpid()}-{tmp_path.name[-12:]}"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary), "RAY_ADDRESS": "192.0.2.77:1", **variables}
    environment.pop("XDG_RUNTIME_DIR", None)
    out = tmp_path / "out.txt"
    command = [*TWOSTROKE, "serve", *ANY_PORT, *flags]
    if file is not None:
        (tmp_path / "cluster.yaml").write_text(file)
        command = [*TWOSTROKE, "up", "-f", "cluster.yaml", *flags]
    if by_make:
        command, environment = _make_serve([*ANY_PORT, *flags], environment)
    with out.open("wb") as out_file:
        process = subprocess.Popen(command, env=environment, stdout=out_file, stderr=out_file, cwd=tmp_path)
    try:
        yield Server(process, out, temporary, environment)
    finally:
        if by_make and process.poll() is None:
            for launcher in psutil.Process(process.pid).children():  # which make would leave behind
                launcher.kill()
        process.kill()
        process.wait()
        wait_until(lambda: not list(temporary.iterdir()))
        shutil.rmtree(temporary, ignore_errors=True)


def _make_serve(flags: list[str], environment: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """In the checkout, with what is installed there: nothing is fetched, whatever is newer than that."""
    installed = ["-o", ".venv/.serve"]
    command = ["make", "--no-print-directory", "-C", str(CHECKOUT), *installed, "serve", f"ARGS={shlex.join(flags)}"]
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")
    inherited = {name: value for name, value in environment.items() if name not in outer}
    return command, inherited | {"PYTHONPATH": str(CHECKOUT)}


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def assert_all_ended(processes: list[psutil.Process]) -> None:
    assert len(processes) > 5
    wait_until(lambda: not alive(processes), lambda: str(alive(processes)))
