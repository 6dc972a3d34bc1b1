"""Generated requests: seeded, and shaped as they claim."""

from __future__ import annotations

from itertools import pairwise
from statistics import mean

import pytest

from tools.simulate.traces.oracle import full_blocks, oracle_rate
from tools.simulate.traces.workloads import WORKLOADS, generated
from twostroke.base.errors import ConfigError

ENDLESS = 10**9


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_seed_is_a_workload(name: str) -> None:
    assert generated(name, 200, 3.0, seed=5) == generated(name, 200, 3.0, seed=5)
    assert generated(name, 200, 3.0, seed=5) != generated(name, 200, 3.0, seed=6)


@pytest.mark.parametrize("name", WORKLOADS)
def test_rows_come_in_order_at_the_rate_and_name_every_started_block(name: str) -> None:
    trace = generated(name, 3000, 4.0, seed=1)
    assert len(trace.rows) == 3000
    assert all(a.timestamp_s <= b.timestamp_s for a, b in pairwise(trace.rows))
    span_s = trace.rows[-1].timestamp_s - trace.rows[0].timestamp_s
    assert 3000 / span_s == pytest.approx(4.0, rel=0.15)
    assert all(len(row.blocks) == -(-row.input_tokens // trace.block_tokens) for row in trace.rows)
    assert all(len(set(row.blocks)) == len(row.blocks) for row in trace.rows)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_block_has_one_place_and_one_past(name: str) -> None:
    """Equal numbers are equal tokens: the blocks before them are equal too."""
    trace = generated(name, 1000, 4.0, seed=2)
    parents: dict[int, int | None] = {}
    for row in trace.rows:
        blocks = full_blocks(row, trace.block_tokens)
        for block, parent in zip(blocks, (None, *blocks), strict=False):
            assert parents.setdefault(block, parent) == parent


def test_conversations_are_as_long_and_as_repetitive_as_recorded_ones() -> None:
    trace = generated("conversation", 6000, 3.4, seed=1)
    lengths = sorted(row.input_tokens for row in trace.rows)
    assert mean(lengths) == pytest.approx(12_000, rel=0.1)
    assert lengths[len(lengths) // 2] == pytest.approx(6_900, rel=0.15)
    assert lengths[len(lengths) * 99 // 100] == pytest.approx(85_000, rel=0.2)
    assert mean(row.output_tokens for row in trace.rows) == pytest.approx(343, rel=0.1)
    assert oracle_rate(trace, ENDLESS) == pytest.approx(0.37, abs=0.04)
    assert len({row.blocks[0] for row in trace.rows if row.input_tokens >= trace.block_tokens}) == 1


def test_prefix_groups_share_their_prefix_and_nothing_else() -> None:
    trace = generated("prefix-groups", 1500, 10.0, seed=1)
    assert {(row.input_tokens, row.output_tokens) for row in trace.rows} == {(7200, 1000)}
    prefix_blocks = 6000 // trace.block_tokens
    assert len({row.blocks[:prefix_blocks] for row in trace.rows}) == 150
    behind = [block for row in trace.rows for block in row.blocks[prefix_blocks:]]
    assert len(set(behind)) == len(behind)


def test_a_workload_nobody_knows_is_refused_with_those_that_are() -> None:
    with pytest.raises(ConfigError, match=r"conversation, prefix-groups, code-agent; got 'chat'"):
        generated("chat", 10, 1.0, seed=0)
    with pytest.raises(ConfigError, match="--rate must be positive"):
        generated("conversation", 10, 0.0, seed=0)
    with pytest.raises(ConfigError, match="--limit must be 1 or more"):
        generated("conversation", 0, 1.0, seed=0)
