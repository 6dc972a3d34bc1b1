"""Every setting refuses what lies beyond the bounds that it declares, in one line that names its flag.

Values are made from the declarations, so that a new setting is tried without a case of its own.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator

import pytest

from tools.bench.options import BenchLoad
from tools.bill.options import BillFlags
from twostroke.base.errors import ConfigError
from twostroke.config import ClusterConfig, RouterCommand, Settings, flags
from twostroke.config.leaves import Leaf, leaves_of

KINDS: tuple[type[Settings], ...] = (ClusterConfig, RouterCommand, BillFlags, BenchLoad)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]  # argparse's own ends the process
        raise ConfigError(message)


def refusal(kind: type[Settings], parser: Parser, leaf: Leaf, word: str) -> str:
    """Returns what is said about the value, and nothing where it is taken."""
    required = [f"{other.flag}=x" for other in leaves_of(kind) if other.is_required and other != leaf]
    try:
        flags.read(kind, parser.parse_args([*required, f"{leaf.flag}={word}"]))
    except ConfigError as refused:
        return refused.message
    return ""


def words_beyond(leaf: Leaf) -> Iterator[str]:
    """Yields values on the far side of each bound, as they stand on a command line."""
    setting = leaf.setting
    if setting.choices:
        yield from ("", "other", setting.choices[0].upper(), setting.choices[0][:-1])
    if leaf.kind not in (int, float):
        return
    yield from ("", "x")
    step = 1 if leaf.kind is int else 0.5
    nearest = (
        None if setting.least is None else setting.least - step,
        setting.above,
        None if setting.most is None else setting.most + step,
        setting.below,
    )
    yield from (str(leaf.kind(value)) for value in nearest if value is not None)
    if setting.power_of_two:
        yield "48"
    if leaf.kind is float:
        yield from ("nan", "inf", "1e400")


def values_within(leaf: Leaf) -> Iterator[float]:
    """Yields the values that are bounds themselves and may be taken."""
    for bound in (leaf.setting.least, leaf.setting.most):
        if bound is not None and math.isfinite(bound) and not leaf.setting.power_of_two:
            yield leaf.kind(bound)


@pytest.mark.parametrize("kind", KINDS)
def test_a_value_beyond_a_bound_is_refused_in_one_line_that_names_its_flag(kind: type[Settings]) -> None:
    parser = Parser(allow_abbrev=False)
    flags.add(parser, kind)
    tried = [(leaf, word) for leaf in leaves_of(kind) for word in words_beyond(leaf)]
    assert len(tried) > 70
    for leaf, word in tried:
        said = refusal(kind, parser, leaf, word)
        assert leaf.flag in said, (leaf.flag, word, said)
        assert "\n" not in said


@pytest.mark.parametrize("kind", KINDS)
def test_the_bounds_themselves_are_within(kind: type[Settings]) -> None:
    assert [
        (leaf.flag, value) for leaf in leaves_of(kind) for value in values_within(leaf) if leaf.setting.refuses(value)
    ] == []
