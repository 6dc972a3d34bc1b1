"""The covering array of the gate has every two values of two parameters, and the slow suite has the rest."""

from __future__ import annotations

import itertools
from math import prod

import pytest

from tests.covering import covering, later, pairwise

SIZES = [(3, 2), (2, 2, 2), (4, 6, 3, 2), (5, 5, 3, 1), (3, 4, 2, 2, 2)]


@pytest.mark.parametrize("sizes", SIZES)
def test_every_two_values_meet(sizes: tuple[int, ...]) -> None:
    chosen = covering(sizes)
    for one, other in itertools.combinations(range(len(sizes)), 2):
        met = {(places[one], places[other]) for places in chosen}
        assert met == set(itertools.product(range(sizes[one]), range(sizes[other])))


@pytest.mark.parametrize("sizes", [sizes for sizes in SIZES if len(sizes) > 2])
def test_fewer_are_chosen_than_there_are(sizes: tuple[int, ...]) -> None:
    largest, second, *_ = sorted(sizes, reverse=True)
    assert largest * second <= len(covering(sizes)) <= 2 * largest * second
    assert len(covering(sizes)) < prod(sizes)


def test_the_gate_and_the_slow_suite_have_the_whole_product_between_them() -> None:
    mark = pairwise(form=["a", "b"], heads=[1, 2], window=[False, True])
    names, cases = mark.args
    assert names == ("form", "heads", "window")
    assert [case.values for case in cases] == list(itertools.product(["a", "b"], [1, 2], [False, True]))
    in_gate = [case.values for case in cases if not case.marks]
    assert in_gate == [("a", 1, False), ("a", 2, True), ("b", 1, True), ("b", 2, False)]
    assert all(case.marks == (pytest.mark.slow,) for case in cases if case.values not in in_gate)


def test_values_for_later_are_left_to_the_slow_suite_and_the_others_still_meet() -> None:
    cases = pairwise(later=["c"], form=["a", "b", "c"], heads=[1, 2], window=[False, True]).args[1]
    assert len(cases) == 12
    in_gate = [case.values for case in cases if not case.marks]
    assert in_gate == [("a", 1, False), ("a", 2, True), ("b", 1, True), ("b", 2, False)]


def test_of_one_parameter_the_gate_has_the_values_that_are_named_and_no_others() -> None:
    cases = later(["a", "b", "c"], "c", "a")
    assert [case.values for case in cases] == [("a",), ("b",), ("c",)]
    assert [case.values for case in cases if not case.marks] == [("a",), ("c",)]
    with pytest.raises(ValueError, match="no values of the parameter: \\['d'\\]"):
        later(["a", "b", "c"], "a", "d")
