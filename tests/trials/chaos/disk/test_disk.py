"""The harness on a small scale: damage is done, found, and changes no answer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.trials.chaos.disk import damage
from tests.trials.chaos.disk.faults import FAULTS
from tests.trials.chaos.disk.options import MODEL
from tests.trials.chaos.disk.session import run_faults
from twostroke.kv_cache.tiers.record import HEADER_BYTES, record_bytes

PAGE_BYTES = 5000


def test_every_border_of_every_record_is_a_length_to_cut_at() -> None:
    size = record_bytes(PAGE_BYTES)
    lengths = set(damage.borders(3, PAGE_BYTES))
    assert {0, size, 2 * size} <= lengths
    assert {size + HEADER_BYTES - 1, size + HEADER_BYTES, 2 * size + HEADER_BYTES + PAGE_BYTES} <= lengths
    assert all(0 <= length < 3 * size for length in lengths)


def test_one_bit_of_every_record_is_flipped(tmp_path: Path) -> None:
    size, path = record_bytes(PAGE_BYTES), tmp_path / "00000001.pages"
    path.write_bytes(bytes(7 * size))
    assert damage.flip_in_every_record(path, PAGE_BYTES, random.Random(1)) == {"header": 3, "page": 2, "padding": 2}
    flipped = [begin // size for begin, byte in enumerate(path.read_bytes()) if byte]
    assert flipped == list(range(7))


@pytest.mark.slow
async def test_bits_that_flip_on_disk_change_no_answer() -> None:
    (outcome,) = await run_faults([each for each in FAULTS if each.name == "flipped bits"], MODEL, "float32")
    assert outcome.is_good, outcome
    assert outcome.seen.identical == outcome.seen.streams > 0
