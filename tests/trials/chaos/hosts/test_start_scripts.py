"""The start scripts of deploy/ray: what they refuse, what they ask of Ray, and when they give up. Ray is played."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[4] / "deploy" / "ray"
HEAD, WORKER = SCRIPTS / "start-head.sh", SCRIPTS / "start-worker.sh"
FOR_EVER = 'echo "asked: $*"; exec sleep 600'
STARTS = 'echo "asked: $*"; env | grep -E "RAY_|^OUT" | sort; echo "Ray runtime started."; exec sleep 600'
REFUSED = 'echo "Authentication failed"; exit 1'
PATIENCE_S = 60


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, str]:
    """Environment of a node that starts."""
    for name in ("token", "cert", "key", "ca"):
        (tmp_path / name).write_text(name)
    ray = tmp_path / "ray"
    ray.write_text(f"#!/bin/bash\n{STARTS}\n")
    ray.chmod(0o755)
    return {
        "PATH": os.environ["PATH"],
        "RAY": str(ray),
        "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token"),
        "RAY_TLS_SERVER_CERT": str(tmp_path / "cert"),
        "RAY_TLS_SERVER_KEY": str(tmp_path / "key"),
        "RAY_TLS_CA_CERT": str(tmp_path / "ca"),
        "HEAD": "head:6379",
    }


def ended(script: Path, settings: Mapping[str, str]) -> tuple[int, str]:
    done = subprocess.run([script], env=settings, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    return done.returncode, done.stdout + done.stderr


def test_shellcheck_finds_nothing_in_any_script() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    found = sorted(SCRIPTS.parent.rglob("*.sh"))
    assert HEAD in found
    done = subprocess.run([shellcheck, "-x", "-P", SCRIPTS, *found], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"RAY_AUTH_TOKEN_PATH": ""}, "RAY_AUTH_TOKEN_PATH is not set: name the file"),
        ({"RAY_AUTH_TOKEN_PATH": "/nowhere"}, "RAY_AUTH_TOKEN_PATH: there is no file /nowhere"),
        ({"RAY_AUTH_TOKEN_PATH": "/dev/null"}, "RAY_AUTH_TOKEN_PATH: there is no file /dev/null"),
        ({"RAY_TLS_SERVER_KEY": ""}, "TLS needs all of RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY and RAY_TLS_CA_CERT"),
        ({"RAY_TLS_CA_CERT": "/nowhere"}, "RAY_TLS_CA_CERT: there is no file /nowhere"),
        ({"ROLE": "prefil"}, "ROLE is 'prefil': write prefill or decode"),
        ({"HEAD": ""}, "HEAD is not set: write HOST:PORT"),
        ({"HEAD": "head"}, "HEAD is 'head': write HOST:PORT"),
        ({"START_TIMEOUT_S": "1m"}, "START_TIMEOUT_S is '1m': write whole seconds"),
        ({"RAY": "/nowhere/ray"}, "RAY: there is no command /nowhere/ray"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_that_names_it(
    settings: dict[str, str], changed: dict[str, str], told: str
) -> None:
    status, said = ended(WORKER, settings | changed)
    assert status == 2
    assert said.startswith(f"twostroke: {told}")
    assert said.count("\n") == 1


def test_a_head_asks_for_its_storage_and_a_port_that_is_one(settings: dict[str, str]) -> None:
    assert ended(HEAD, settings | {"PORT": "70000"})[1].startswith("twostroke: PORT is '70000'")
    assert "cannot make the folder /proc/x" in ended(HEAD, settings | {"GCS_STORAGE": "/proc/x"})[1]


@pytest.mark.parametrize("script", [HEAD, WORKER])
def test_it_runs_until_it_is_told_to_end_with_ray_asked_for_token_tls_and_fast_notice(
    settings: dict[str, str], script: Path, tmp_path: Path
) -> None:
    own = {"GCS_STORAGE": str(tmp_path / "gcs"), "ROLE": "decode", "NODE_IP": "10.0.0.7", "RAY_AUTH_TOKEN": "in sight"}
    own["RAY_TLS_CA_CERT"] = "ca"  # from where it stands
    with subprocess.Popen([script], env=settings | own, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        while "Ray runtime started." not in lines:
            lines.append(process.stdout.readline().strip())
            assert lines[-1], "it ended"
        asked = lines[0]
        assert "--block" in asked
        assert "--labels role=decode" in asked
        assert "--node-ip-address 10.0.0.7" in asked
        assert ("--head --port 6379" if script is HEAD else "--address head:6379") in asked
        for setting in ("RAY_AUTH_MODE=token", "RAY_USE_TLS=1", "RAY_health_check_failure_threshold=3"):
            assert setting in lines
        assert f"RAY_TLS_CA_CERT={tmp_path / 'ca'}" in lines
        assert not any(line.startswith("RAY_AUTH_TOKEN=") for line in lines), "only the file holds it"
        assert ("RAY_gcs_storage=rocksdb" in lines) == (script is HEAD)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM


def test_what_never_starts_is_given_up_and_what_is_refused_is_told_of(settings: dict[str, str]) -> None:
    ray = Path(settings["RAY"])
    ray.write_text(f"#!/bin/bash\n{FOR_EVER}\n")
    status, said = ended(WORKER, settings | {"START_TIMEOUT_S": "1"})
    assert (status, "Ray has not started within 1 s: does a head answer at head:6379" in said) == (1, True), said
    ray.write_text(f"#!/bin/bash\n{REFUSED}\n")
    status, said = ended(WORKER, settings)
    assert (status, "Authentication failed" in said, "Ray did not start" in said) == (1, True, True), said


def test_systemd_takes_the_units_and_they_start_the_scripts_again(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed: apt-get install systemd")
    for unit in sorted((SCRIPTS / "systemd").glob("*.service")):
        text = unit.read_text()
        assert "Restart=always" in text
        assert "KillMode=control-group" in text
        # The checkout in place of /opt/twostroke: what a unit starts has to be there.
        here = tmp_path / unit.name
        here.write_text(text.replace("/opt/twostroke", str(SCRIPTS.parents[1])))
        done = subprocess.run(["systemd-analyze", "verify", here], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
