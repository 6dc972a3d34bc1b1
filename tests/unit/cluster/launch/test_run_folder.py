"""What a launcher leaves behind: nothing, also when it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster import parent_death_guard
from cluster.clients import state_file
from cluster.launch.run_folder import RunFolder
from router.addresses import Addresses

PATIENCE_S = 30.0


@pytest.fixture(autouse=True)
def runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def wait_until(is_so: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def is_running(pid: int) -> bool:
    return state_file.started_ticks(pid) is not None


def test_at_the_end_folder_state_file_and_processes_of_the_folder_are_gone() -> None:
    with RunFolder() as folder:
        state_file.write(state_file.own((Addresses("h:1", "g:1", "a:1", "m:1"),), "m", str(folder.path)))
        own_file = (folder.log_dir / "driver.log").open("w")
        with (folder.log_dir / "worker.err").open("w") as log:
            ours = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], stderr=log)
        with (folder.log_dir / "worker.err").open() as log:
            theirs = subprocess.Popen(["sleep", "600"], stdin=log)
    own_file.close()
    try:
        assert ours.wait(PATIENCE_S) == -signal.SIGKILL
        assert theirs.poll() is None
        assert not folder.path.exists()
        assert not state_file.folder().exists()
    finally:
        theirs.kill()
        theirs.wait()


def test_a_state_folder_that_others_use_stays() -> None:
    with RunFolder() as folder:
        state_file.write(state_file.own((Addresses("h:1", "g:1", "a:1", "m:1"),), "m", str(folder.path)))
        state_file.path_of(1).write_text("{}")
    assert [path.name for path in state_file.folder().iterdir()] == ["1.json"]


def test_a_killed_launcher_leaves_no_folder() -> None:
    script = (
        "import sys, time\nfrom cluster.launch.run_folder import RunFolder\n"
        "print(RunFolder().path, flush=True)\ntime.sleep(600)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    folder = Path(launcher.stdout.readline().strip())
    assert folder.is_dir()
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    wait_until(lambda: not folder.exists())


def test_sockets_fit_below_the_folder_even_where_temporary_paths_are_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with RunFolder() as folder:
        assert len(str(folder.path)) < 40


def test_a_bound_process_dies_with_the_process_it_is_bound_to() -> None:
    parent_script = (
        "import os, subprocess, sys, time\n"
        f"guard = {parent_death_guard.__file__!r}\n"
        "command = [sys.executable, '-I', '-S', guard, str(os.getpid()), '/bin/sleep', '600']\n"
        "print(subprocess.Popen(command).pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", parent_script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    wait_until(lambda: os.readlink(f"/proc/{child_pid}/exe").endswith("sleep"))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not is_running(child_pid))


def test_a_process_bound_to_a_parent_that_is_gone_does_not_start() -> None:
    command = [sys.executable, "-I", "-S", parent_death_guard.__file__, "1", "/bin/echo", "started"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "started" not in done.stdout
