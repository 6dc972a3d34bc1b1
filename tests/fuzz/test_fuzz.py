"""The corpus, and a moment of chance, at every door. `make fuzz` goes on for as long as it is told."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.engine import play
from tests.fuzz.target import Target, Try
from tests.fuzz.targets import TARGETS

MOMENT_S = 0.2


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_nothing_that_anybody_sends_breaks(target: Target) -> None:
    assert play(target, MOMENT_S, seed=5) >= len(target.corpus)


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
