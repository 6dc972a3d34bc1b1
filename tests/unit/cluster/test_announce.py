"""What people read while something is fetched: bars on a terminal, plain lines anywhere else."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from cluster import announce
from router.addresses import Addresses
from twostroke.config import ClusterConfig
from twostroke.doors_config import DoorsConfig
from twostroke.tls_config import TlsConfig


def fetch_in_two_steps(model: str, dtype: str, on_progress: Callable[[str, float], None]) -> Path:
    for step in ("downloading", "converting"):
        for percent in range(0, 101, 5):
            on_progress(step, percent / 100)
    return Path("/the/model")


@pytest.fixture(autouse=True)
def fetching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(announce, "fetch", fetch_in_two_steps)


def test_without_a_terminal_progress_is_a_few_plain_lines_as_it_is_made(capsys: pytest.CaptureFixture[str]) -> None:
    assert announce.fetch_with_progress("toy", "bfloat16") == Path("/the/model")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fetching toy"
    shares = [f"{percent} %" for percent in (0, 25, 50, 75, 100)]
    assert lines[1:] == [f"{step} {share}" for step in ("downloading", "converting") for share in shares]


def test_on_a_terminal_there_is_a_bar_for_each_step() -> None:
    screen = Console(file=io.StringIO(), force_terminal=True, width=100)
    assert announce.fetch_with_progress("toy", "bfloat16", screen) == Path("/the/model")
    assert isinstance(screen.file, io.StringIO)
    printed = screen.file.getvalue()
    assert "downloading" in printed
    assert "converting" in printed
    assert "100%" in printed


def test_every_router_is_announced_and_the_commands_to_paste_ask_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    routers = (Addresses("h:1", "h:2", "h:5", "h:1"), Addresses("h:3", "h:4", "h:6", "h:3"))
    announce.Announcer().ready(ClusterConfig(routers=2), routers, tmp_path)
    printed = capsys.readouterr().out
    assert "http://h:1/v1  http://h:3/v1\n" in printed
    assert "h:2  h:4\n" in printed
    assert "h:5  h:6\n" in printed
    assert "http://h:1/metrics  http://h:3/metrics\n" in printed
    assert "curl -N http://h:1/v1/chat/completions" in printed
    assert "chat --grpc h:2 " in printed


def test_where_tls_and_keys_are_asked_for_the_commands_to_paste_show_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ClusterConfig(
        tls=TlsConfig(cert="a.pem", key="a.key", ca="clients.pem"), doors=DoorsConfig(api_keys="keys.toml")
    )
    announce.Announcer().ready(config, (Addresses("h:1", "h:2", "h:5", "h:1"),), tmp_path)
    printed = capsys.readouterr().out
    curl = next(line for line in printed.splitlines() if line.startswith("curl "))
    assert "https://h:1/v1/chat/completions" in curl
    chat = next(line for line in printed.splitlines() if " chat " in line)
    assert " --tls --grpc h:2 " in chat
    variables = set(re.findall(r"TWOSTROKE_\w+", printed))
    assert variables == {"TWOSTROKE_TLS_CA", "TWOSTROKE_TLS_CERT", "TWOSTROKE_TLS_KEY", "TWOSTROKE_API_KEY"}
    assert all(f'${variable}"' in curl for variable in variables)
