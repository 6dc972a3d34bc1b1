"""What people read while something is fetched: bars on a terminal, plain lines anywhere else."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from cluster import fetching
from cluster.terminal import activity, announce
from cluster.terminal.activity import Activity
from router.addresses import Addresses
from twostroke.config import CertificatesConfig, ClusterConfig, EndpointsConfig

SHOW_CURSOR = "\x1b[?25h"


def fetch_in_two_steps(model: str, dtype: str, on_progress: Callable[[str, float], None]) -> Path:
    for step in ("downloading", "converting"):
        for percent in range(0, 101, 5):
            on_progress(step, percent / 100)
    return Path("/the/model")


@pytest.fixture(autouse=True)
def two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "fetch", fetch_in_two_steps)


def test_without_a_terminal_progress_is_a_few_plain_lines_as_it_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetching.fetch_with_progress("toy", "bfloat16") == Path("/the/model")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fetching toy"
    shares = [f"{percent} %" for percent in (0, 25, 50, 75, 100)]
    assert lines[1:] == [f"{step} {share}" for step in ("downloading", "converting") for share in shares]


def test_on_a_terminal_there_is_a_bar_for_each_step() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    assert fetching.fetch_with_progress("toy", "bfloat16", screen) == Path("/the/model")
    assert isinstance(screen.file, io.StringIO)
    printed = screen.file.getvalue()
    assert "downloading" in printed
    assert "converting" in printed
    assert "100%" in printed


def test_ports_of_clients_are_announced_once_and_those_of_operators_for_every_router(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    routers = (Addresses("h:1", "h:2", "h:5", "h:7"), Addresses("h:1", "h:2", "h:6", "h:8"))
    announce.Announcer().ready(ClusterConfig(routers=2), routers, tmp_path, "/the/model")
    printed = capsys.readouterr().out
    assert "  OpenAI HTTP   http://h:1/v1\n" in printed
    assert "  gRPC          h:2\n" in printed
    assert "h:5  h:6\n" in printed
    assert "http://h:7/metrics  http://h:8/metrics\n" in printed
    assert "curl -N http://h:1/v1/chat/completions" in printed
    assert "chat --grpc h:2 " in printed
    assert "  tokenizer     /the/model\n" in printed


def test_where_tls_and_keys_are_asked_for_the_commands_to_paste_show_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ClusterConfig(
        certificates=CertificatesConfig(tls_cert="a.pem", tls_key="a.key", tls_client_ca="clients.pem"),
        endpoints=EndpointsConfig(api_keys="keys.toml"),
    )
    announce.Announcer().ready(config, (Addresses("h:1", "h:2", "h:5", "h:1"),), tmp_path, "")

    printed = capsys.readouterr().out
    assert "tokenizer" not in printed
    curl = next(line for line in printed.splitlines() if line.startswith("curl "))
    assert "https://h:1/v1/chat/completions" in curl
    chat = next(line for line in printed.splitlines() if " chat " in line)
    assert " --tls --grpc h:2 " in chat
    variables = set(re.findall(r"TWOSTROKE_\w+", printed))
    assert variables == {"TWOSTROKE_TLS_CA", "TWOSTROKE_TLS_CERT", "TWOSTROKE_TLS_KEY", "TWOSTROKE_API_KEY"}
    assert all(f'${variable}"' in curl for variable in variables)


@pytest.mark.parametrize("is_installed", [True, False])
def test_the_command_to_paste_works_from_any_folder(
    is_installed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However it was started itself, and without an activated environment."""
    python, script = tmp_path / "bin" / "python", tmp_path / "bin" / "twostroke"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "argv", ["cluster/cli.py"])
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.chdir(python.parent)
    if is_installed:
        script.touch()
        assert announce.program() == [str(script)]
        return
    done = subprocess.run(
        [*announce.program(), "--version"],
        check=True,
        cwd="/",
        env={"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith("twostroke "), done.stderr


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_without_a_terminal_it_is_told_what_goes_on_when_that_changes_and_now_and_then() -> None:
    clock, out = Clock(), io.StringIO()
    announcer = announce.Announcer(Console(file=out, soft_wrap=True), clock)
    announcer.begin("starting workers")
    waits = [Activity("prefill-0", "waiting for a process", 0.0)]
    loads = [Activity(name, "loading the model", 2.0) for name in ("prefill-0", "decode-0")]
    for now_s, activities in ((0, waits), (1, waits), (2, loads), (14, loads), (18, loads), (20, loads)):
        clock.now_s = now_s
        announcer.detail(activities)
    announcer.end()
    announcer.detail(waits)
    assert out.getvalue().splitlines() == [
        "[  0.0 s] starting workers",
        "[  0.0 s] starting workers: prefill-0 waiting for a process, 0 s",
        "[  2.0 s] starting workers: prefill-0, decode-0 loading the model, 0 s",
        "[ 18.0 s] starting workers: prefill-0, decode-0 loading the model, 16 s",
    ]


def test_on_a_terminal_one_line_moves_and_what_is_said_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, out = Clock(), io.StringIO()
    monkeypatch.setattr(activity, "_is_in_foreground", lambda: True)
    announcer = announce.Announcer(Console(file=out, force_terminal=True, width=100, highlight=False), clock)
    announcer.begin("starting workers")
    announcer.detail([Activity("prefill-0", "loading the model", 0.0)])
    clock.now_s = 12.0
    announcer.say("decode-0 serves")
    announcer.end()
    printed = out.getvalue()
    assert "starting workers: prefill-0 loading the model, 12 s" in printed
    assert "[ 12.0 s] decode-0 serves" in printed
    assert printed.index(SHOW_CURSOR) > printed.index("12 s")


def test_many_workers_that_do_the_same_are_told_in_one_line() -> None:
    loading = [Activity(f"decode-{number}", "loading the model", float(number)) for number in range(9)]
    assert activity.described([*loading, Activity("prefill-0", "waiting for a process", 3.0)], 10.0) == (
        "decode-0, decode-1, decode-2, decode-3 and 5 more loading the model, 10 s; "
        "prefill-0 waiting for a process, 7 s"
    )
