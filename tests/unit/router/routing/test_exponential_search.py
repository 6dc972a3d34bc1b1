"""Exponential search against a scan, and how seldom it looks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.routing.prefix_index import Mask, exponential_search


def looked_up(masks: list[Mask]) -> tuple[dict[int, int], int]:
    """Bit number -> depth, and how often it looked."""
    looks = 0

    def holders(position: int) -> Mask:
        nonlocal looks
        looks += 1
        return masks[position]

    depths: dict[int, int] = {}
    for depth, lost in exponential_search(holders, len(masks)):
        assert lost
        for number in range(lost.bit_length()):
            if lost >> number & 1:
                assert number not in depths, "nobody drops out twice"
                depths[number] = depth
    return depths, looks


def first_missing(masks: list[Mask], number: int) -> int:
    return next((place for place, mask in enumerate(masks) if not mask >> number & 1), len(masks))


@given(st.lists(st.integers(0, 90), max_size=12), st.integers(0, 90))
def test_holders_of_prefixes_are_found_exactly(depths: list[int], length: int) -> None:
    masks = [sum(1 << number for number, depth in enumerate(depths) if place < depth) for place in range(length)]
    found, _ = looked_up(masks)
    assert found == {number: min(depth, length) for number, depth in enumerate(depths) if min(depth, length)}


@given(st.lists(st.integers(0, 15), max_size=70))
def test_a_hole_is_found_or_jumped_over_and_never_answered_too_early(masks: list[Mask]) -> None:
    found, _ = looked_up(masks)
    for number in range(4):
        scanned = first_missing(masks, number)
        if number in found:
            assert found[number] >= scanned
            assert found[number] == len(masks) or not masks[found[number]] >> number & 1
        else:
            assert scanned == 0


def test_a_long_prompt_takes_few_looks() -> None:
    masks = [0b111 if place < 100 else 0b011 if place < 700 else 0 for place in range(750)]
    found, looks = looked_up(masks)
    assert found == {0: 700, 1: 700, 2: 100}
    assert looks < 40
