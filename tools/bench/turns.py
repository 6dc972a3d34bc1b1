"""The order of measurements, where several candidates take turns under several loads. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

LoadT = TypeVar("LoadT")
ContestantT = TypeVar("ContestantT")


def in_turns(
    rounds: int, loads: Sequence[LoadT], contestants: Sequence[ContestantT]
) -> Iterator[tuple[int, int, LoadT, ContestantT]]:
    """(round, number of round and load, load, contestant). The order of the contestants turns with every round and
    every load, so that slow drift cancels."""
    for number in range(rounds * len(loads)):
        round_number, which = divmod(number, len(loads))
        order = contestants if (round_number + which) % 2 == 0 else tuple(reversed(contestants))
        for contestant in order:
            yield round_number, number, loads[which], contestant
