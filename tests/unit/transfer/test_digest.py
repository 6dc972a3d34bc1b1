"""The digest of a page sees every byte of it, whatever the page is made of and however long it is."""

from __future__ import annotations

import numpy as np
import pytest

from twostroke.transfer.base import digest

STEPS = [1 << power for power in range(8, 22)]
"""Sizes at which anything that reads a page in parts may stop: 256 bytes to 2 MiB."""


@pytest.mark.parametrize("size", [1, 5000, *(step + 3 for step in STEPS)])
def test_a_changed_byte_changes_the_digest_wherever_it_lies(size: int) -> None:
    page = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    before = digest(page)
    places = {0, size // 2, size - 1, *(at for step in STEPS for at in (step - 1, step, step + 1) if at < size)}
    for place in places:
        page[place] ^= 1
        assert digest(page) != before, f"byte {place} of {size}"
        page[place] ^= 1
    assert digest(page) == digest(page.tobytes()) == digest(memoryview(page)) == before
