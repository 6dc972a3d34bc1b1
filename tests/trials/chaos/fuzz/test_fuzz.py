"""The corpus, and a moment of chance, at every parser and port. `make fuzz` goes on for as long as it is told."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.trials.chaos.fuzz.engine import play
from tests.trials.chaos.fuzz.parsers import PARSERS
from tests.trials.chaos.fuzz.servers import SERVERS
from tests.trials.chaos.fuzz.target import Target, Try

MOMENT_S = 0.05


@pytest.mark.parametrize("target", PARSERS, ids=lambda target: target.name)
def test_nothing_that_anybody_sends_breaks_a_parser(target: Target) -> None:
    assert play(target, MOMENT_S, seed=5) >= len(target.corpus)


def test_nothing_that_anybody_sends_breaks_a_server(tmp_path: Path) -> None:
    """In a process of its own: gRPC's leftovers are not those of other tests."""
    names = [target.name for target in SERVERS]
    command = [
        sys.executable,
        "-m",
        "tests.trials.chaos.fuzz.engine",
        *names,
        "--for",
        "0.1",
        "--by-chance",
        "--finds",
        tmp_path,
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert len(ended.stdout.splitlines()) == len(names)


def test_a_door_that_breaks_is_noticed_and_the_input_is_kept(tmp_path: Path) -> None:
    @contextlib.contextmanager
    def weak() -> Iterator[Try]:
        yield lambda data: int.from_bytes(data, "big") // (data[0] - 0x55) if data else None

    def mutate(data: bytes, draw: random.Random) -> bytes:
        return draw.randbytes(1) + data[1:]

    with pytest.raises(ZeroDivisionError) as noticed:
        play(Target("weak", [b"\0"], mutate, weak), 60.0, seed=1, finds=tmp_path)
    assert "input b'U'" in noticed.value.__notes__[0]
    (kept,) = (tmp_path / "weak").iterdir()
    assert kept.read_bytes() == b"\x55"
