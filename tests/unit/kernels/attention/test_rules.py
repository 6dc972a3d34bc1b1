"""Windows, soft caps and scales of layers: each build of the native kernel, and torch, against the oracle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
import torch

from tests.covering import pairwise
from tests.unit.kernels.cpu.test_attention import TOLERANCE, Case, check_against_reference, in_pieces, row_of
from tests.unit.kernels.variants import LATER, VARIANTS, EachVariant
from twostroke.kernels import reference
from twostroke.kernels.attention.interface import AttentionBackend, RaggedBatch
from twostroke.kernels.attention.rules import AttentionRule, rules_of
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.team import Team
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.torch_attention.aligned import AlignedAttention
from twostroke.kernels.torch_attention.gathered import TorchAttention

PLAIN = AttentionRule(scale=0.1)
RULES = {
    "a window of one token": AttentionRule(scale=0.1, window=1),
    "a window in a page": AttentionRule(scale=0.1, window=13),
    "a window of pages": AttentionRule(scale=0.2, window=100),
    "a window of splits": AttentionRule(scale=0.1, window=513),
    "a cap": AttentionRule(scale=0.3, softcap=2.0),
    "a cap and a window": AttentionRule(scale=0.3, softcap=5.0, window=300),
}
"""Contexts are summed up in splits of 256 tokens, and a task of two threads takes some of them."""
SPANS = [(0, 150), (900, 1), (31, 20), (700, 70), (1100, 9)]


def case_of(dtype: torch.dtype, block: int = 16) -> Case:
    shape = {"kv_heads": 2, "groups": 3, "head_dim": 40, "block": block, "dtype": dtype, "spans": SPANS, "seed": 5}
    return Case(shape)


@pytest.fixture(scope="module")
def teams(built_kernels: Mapping[str, Kernels]) -> Iterator[Mapping[str, Team]]:
    """Teams of two threads, one per variant."""
    teams = EachVariant(lambda name: Team(built_kernels[name], (0, 1)))
    yield teams
    for team in teams.made.values():
        team.close()


def attended(
    case: Case, backend: AttentionBackend, batch: RaggedBatch, q: torch.Tensor, sinks: torch.Tensor | None = None
) -> torch.Tensor:
    return backend.begin(batch).attend(1, q, sinks).view(len(q), case.heads, case.dim)


@pairwise(later=LATER, dtype=list(TOLERANCE), variant=VARIANTS, rule=RULES)
def test_the_native_kernel_obeys_the_layer_s_rule_and_a_row_is_the_same_bits_alone(
    built_kernels: Mapping[str, Kernels], teams: Mapping[str, Team], variant: str, rule: str, dtype: torch.dtype
) -> None:
    case, rules, team = case_of(dtype), (PLAIN, RULES[rule]), teams[variant]
    q = case.qkv()[0].contiguous()
    expected = reference.paged_attention(q, PagePool.plain(case.pool), 1, case.batch, rules)
    pool = PagePool.plain(in_pieces(case.pool))
    backend = NativeAttention(pool, case.heads, rules, built_kernels[variant], team)
    together = attended(case, backend, case.batch, q)
    torch.testing.assert_close(together, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    with team.step():
        assert torch.equal(attended(case, backend, case.batch, q), together)
        for sequence, row in enumerate((77, 150, 160, 190, 249)):
            alone = attended(case, backend, row_of(case.batch, sequence, row), q[row : row + 1])
            assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("backend", [TorchAttention, AlignedAttention])
def test_torch_obeys_the_layer_s_rule(backend: type[TorchAttention] | type[AlignedAttention], rule: str) -> None:
    case, rules = case_of(torch.float32), (PLAIN, RULES[rule])
    q, pool = case.qkv()[0].contiguous(), PagePool.plain(case.pool)
    expected = reference.paged_attention(q, pool, 1, case.batch, rules)
    actual = attended(case, backend(pool, case.heads, rules), case.batch, q)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


SINKS = torch.tensor([0.5, -3.0, 2.0, 60.0, -60.0, 0.0])
"""One of each head: some below all scores, and one above them."""


@pairwise(
    later=LATER, dtype=list(TOLERANCE), variant=VARIANTS, rule=["a window of splits", "a cap", "a window in a page"]
)
def test_a_sink_takes_its_part_of_each_softmax_however_the_context_is_cut(
    built_kernels: Mapping[str, Kernels], teams: Mapping[str, Team], variant: str, rule: str, dtype: torch.dtype
) -> None:
    case, rules, team = case_of(dtype), (PLAIN, RULES[rule]), teams[variant]
    q = case.qkv()[0].contiguous()
    expected = reference.paged_attention(q, PagePool.plain(case.pool), 1, case.batch, rules, SINKS)
    backend = NativeAttention(PagePool.plain(in_pieces(case.pool)), case.heads, rules, built_kernels[variant], team)
    together = attended(case, backend, case.batch, q, SINKS)
    torch.testing.assert_close(together, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert together[:, 3].abs().max() < 1e-6 * together[:, 2].abs().max(), "a sink above all scores leaves nothing"
    with team.step():
        assert torch.equal(attended(case, backend, case.batch, q, SINKS), together)
        for sequence, row in enumerate((77, 150, 160, 190, 249)):
            alone = attended(case, backend, row_of(case.batch, sequence, row), q[row : row + 1], SINKS)
            assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("backend", [TorchAttention, AlignedAttention])
def test_torch_gives_sinks_their_part_too(backend: type[TorchAttention] | type[AlignedAttention]) -> None:
    case, rules = case_of(torch.float32), (PLAIN, RULES["a window of pages"])
    q, pool = case.qkv()[0].contiguous(), PagePool.plain(case.pool)
    expected = reference.paged_attention(q, pool, 1, case.batch, rules, SINKS)
    actual = attended(case, backend(pool, case.heads, rules), case.batch, q, SINKS)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(actual, reference.paged_attention(q, pool, 1, case.batch, rules))


def test_pages_of_plain_rows_obey_the_rule_too(kernels: Kernels) -> None:
    case, rules = case_of(torch.bfloat16, block=4), (PLAIN, RULES["a cap and a window"])
    q, pool = case.qkv()[0].contiguous(), PagePool.plain(case.pool)
    expected = reference.paged_attention(q, pool, 1, case.batch, rules)
    actual = attended(case, NativeAttention(pool, case.heads, rules, kernels), case.batch, q)
    torch.testing.assert_close(actual, expected, rtol=3e-2, atol=3e-2)


def test_a_window_as_long_as_the_context_hides_nothing(kernels: Kernels) -> None:
    case = case_of(torch.bfloat16)
    pool = in_pieces(case.pool)
    wide = (AttentionRule(scale=case.scale, window=2000),) * 2
    check_against_reference(case, NativeAttention(PagePool.plain(pool), case.heads, wide, kernels), pool)


def test_one_number_is_a_scale_for_all_layers() -> None:
    assert rules_of(0.1, 2) == (PLAIN, PLAIN)
    assert rules_of((PLAIN, RULES["a cap"]), 2) == (PLAIN, RULES["a cap"])


def test_the_first_visible_token_is_the_window_s_first() -> None:
    """transformers shows key k to query q where k > q - window."""
    rule = AttentionRule(scale=1.0, window=4)
    assert [rule.first_visible(position) for position in (0, 3, 4, 9)] == [0, 0, 1, 6]
    assert PLAIN.first_visible(9) == 0
