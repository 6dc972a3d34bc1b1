"""A part of a product of parameters in the gate, and the whole of it in `make slow`.

Mistakes in code with several parameters nearly always show with two of them, whatever the others are. So the gate has a
covering array: combinations among which every two values of two parameters meet. They are a third to a tenth of the
product. The choice depends on nothing but the number of values, and is the same in every process of pytest.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence

import pytest
from _pytest.mark import ParameterSet


def pairwise(later: Collection[object] = (), **parameters: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrizes a test with the product of all; what the covering array leaves out is marked slow.

    later: values that only the slow suite has, of any parameter.
    """
    columns = [list(values) for values in parameters.values()]
    in_gate = [[value for value in values if value not in later] for values in columns]
    chosen = [
        [values[at] for values, at in zip(in_gate, places, strict=True)] for places in covering([*map(len, in_gate)])
    ]
    cases = [
        pytest.param(*values, marks=() if list(values) in chosen else pytest.mark.slow)
        for values in itertools.product(*columns)
    ]
    return pytest.mark.parametrize(tuple(parameters), cases)


def later(values: Iterable[object], *in_gate: object) -> list[ParameterSet]:
    """Returns the values of one parameter; those that are not among `in_gate` are marked slow.

    Raises ValueError where `in_gate` names what is no value: the gate would silently run less.
    """
    listed = list(values)
    if unknown := [value for value in in_gate if value not in listed]:
        raise ValueError(f"no values of the parameter: {unknown}")
    return [pytest.param(value, marks=() if value in in_gate else pytest.mark.slow) for value in listed]


def covering(sizes: Sequence[int]) -> set[tuple[int, ...]]:
    """Returns places of values among which every two values of two parameters meet.

    Each time it takes the combination with the most pairs that none before it has, the first one of equals.
    """
    rows = {places: frozenset(_pairs(places)) for places in itertools.product(*map(range, sizes))}
    missing = set().union(*rows.values())
    chosen = set()
    while missing:
        best = max(rows, key=lambda places: len(rows[places] & missing))
        chosen.add(best)
        missing -= rows.pop(best)
    return chosen


def _pairs(places: tuple[int, ...]) -> itertools.combinations[tuple[tuple[int, int], tuple[int, int]]]:
    return itertools.combinations(enumerate(places), 2)
