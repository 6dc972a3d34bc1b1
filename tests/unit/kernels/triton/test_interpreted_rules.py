"""Windows, soft caps, ropes and sinks of layers in the interpreter: each kernel against the oracle in torch."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from tests.unit.kernels.page_forms.test_page_forms import LAYER, Prompts
from tests.unit.kernels.triton.test_interpreted import SMALL_DECODE, SMALL_PREFILL, TOLERANCE, Case, case_of
from twostroke.kernels import reference
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.attention.rules import AttentionRule, rules_of
from twostroke.kernels.attention.spans import Spans, TokenSlots
from twostroke.kernels.page_forms.exact_pages import ExactPages
from twostroke.kernels.page_forms.nibble_attention import NibbleAttention
from twostroke.kernels.page_forms.nibble_pool import NibblePool
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.triton.attention import TritonAttention, distinct_layers
from twostroke.kernels.triton.decode import DecodeTuning, plan_decode
from twostroke.kernels.triton.page_forms.nibble_attention import TritonNibbleAttention
from twostroke.page_forms.int4 import BLOCK
from twostroke.page_forms.page_form import PageShape

PLAIN = AttentionRule(scale=0.1)
RULES = {
    "a window of one token": AttentionRule(scale=0.1, window=1),
    "a window in a page": AttentionRule(scale=0.1, window=13),
    "a window of tiles": AttentionRule(scale=0.2, window=70),
    "a window beyond all contexts": AttentionRule(scale=0.1, window=999),
    "a cap": AttentionRule(scale=0.3, softcap=2.0),
    "a cap and a window": AttentionRule(scale=0.3, softcap=5.0, window=33),
}
IN_GATE = {("a window in a page", True), ("a window beyond all contexts", False), ("a cap and a window", True)}
"""Rules, and whether there are sinks: between them they have every part of the kernels."""
EACH_RULE = [
    pytest.param(rule, sinks, marks=() if (rule, sinks) in IN_GATE else pytest.mark.slow)
    for rule, sinks in itertools.product(RULES, (False, True))
]
SPANS = ((110, 1), (20, 5), (40, 36))
"""One row, a short span, and one that is prefill. A test asserts that."""
SINKS = torch.tensor([0.5, -3.0, 60.0, -60.0])
"""One of each head: some below all scores, and one above them."""


def without_hidden_pages(case: Case, rule: AttentionRule, layer: int) -> torch.Tensor:
    """Returns the pool; what no row sees is NaN, as in pages that the window has left."""
    pool, block = case.pool.clone(), case.pool.shape[4]
    for row, context in enumerate(case.contexts):
        new = case.starts[row + 1] - case.starts[row]
        hidden = case.tables[row, : rule.first_visible(context - new) // block].long()
        pool[hidden, layer] = float("nan")
    return pool


def backend_over(
    case: Case, pool: torch.Tensor, rules: tuple[AttentionRule, ...], multiprocessors: int
) -> TritonAttention:
    backend = TritonAttention(PagePool.plain(pool), case.heads, rules, decode=SMALL_DECODE, prefill=SMALL_PREFILL)
    backend.multiprocessors = multiprocessors
    return backend


@pytest.mark.parametrize(("rule", "has_sinks"), EACH_RULE)
def test_every_kernel_obeys_the_layer_s_rule_and_reads_no_page_that_it_hides(rule: str, has_sinks: bool) -> None:
    """Contexts are split among programs where there are no sinks; recorded steps have both together."""
    case, rules, sinks = case_of(*SPANS), (PLAIN, RULES[rule]), SINKS if has_sinks else None
    q, k, v = case.qkv()
    right, actual_pool = (PagePool.plain(without_hidden_pages(case, rules[1], 1)) for _ in range(2))
    rotated = reference.rotate_and_store(q, k, v, right, 1, case.placement)
    expected = reference.paged_attention(rotated, right, 1, case.batch, rules, sinks)
    backend = backend_over(case, actual_pool.numbers, rules, 1 if has_sinks else 4)
    assert [new > backend.short_rows for _, new in SPANS] == [False, False, True], "each kind of span has its kernel"
    step = backend.begin(case.batch)
    actual = step.attend(1, step.store(1, q, k, v), sinks).view_as(expected)
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)
    if has_sinks:
        assert actual[:, 2].abs().max() < 1e-6 * actual[:, 3].abs().max(), "a sink above all scores leaves nothing"


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_layers_of_one_step_have_rules_of_their_own_in_short_dtypes_too(dtype: torch.dtype) -> None:
    case, rules = case_of((70, 1), (0, 36), dtype=dtype), (RULES["a cap and a window"], PLAIN)
    q = case.qkv()[0].contiguous()
    case.pool = case.pool.nan_to_num()
    step = backend_over(case, case.pool, rules, 4).begin(case.batch)
    for layer in (0, 1):
        expected = reference.paged_attention(q, PagePool.plain(case.pool), layer, case.batch, rules, SINKS)
        actual = step.attend(layer, q, SINKS).view_as(expected)
        torch.testing.assert_close(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_a_layer_s_rope_rotates_its_queries_and_keys() -> None:
    case, rules = case_of((0, 20), (33, 1)), (AttentionRule(scale=0.1, rope=1), PLAIN)
    angles = case.positions[:, None].float() * torch.linspace(0.7, 0.001, 2 * case.dim // 2)
    placement = TokenSlots(case.slots, angles.cos(), angles.sin())
    batch = replace(case.batch, cosines=placement.cosines, sines=placement.sines)
    q, k, v = case.qkv()
    right = PagePool.plain(case.pool.clone())
    step = backend_over(case, case.pool, rules, 1).begin(batch)
    rotated = []
    for layer, rule in enumerate(rules):
        expected = reference.rotate_and_store(q, k, v, right, layer, placement, rule.rope)
        rotated.append(step.store(layer, q, k, v))
        torch.testing.assert_close(rotated[-1], expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(case.pool, right.numbers, rtol=2e-5, atol=2e-5, equal_nan=True)
    assert not torch.allclose(*rotated)


def test_one_plan_serves_whatever_lengths_the_device_tensors_hold_in_a_layer_with_a_window() -> None:
    """What replaying a captured step does; the last span pads the batch, and a sink leaves its zeros alone."""
    rules = (PLAIN, RULES["a cap and a window"])
    fields, tables = torch.zeros(3, 4, dtype=torch.int32), torch.zeros(3, 12, dtype=torch.int32)
    fields[2] = torch.tensor([2, 2, 1, 0])
    room = torch.zeros(64, *case_of((60, 1)).pool.shape[1:])
    backend = TritonAttention(PagePool.plain(room), 4, rules, decode=SMALL_DECODE)
    backend.multiprocessors = 4
    nowhere = TokenSlots(torch.zeros(3, dtype=torch.int64), torch.zeros(3, 32), torch.zeros(3, 32))
    step = backend.begin_decode(Spans(fields, tables, 1, 192), nowhere)
    for spans in ([(60, 1), (3, 1)], [(0, 1), (170, 1)], [(32, 1), (33, 1)]):
        case = case_of(*spans)
        case.pool = case.pool.nan_to_num()
        room[: len(case.pool)] = case.pool
        fields[:2] = torch.tensor([(row, row, 1, context) for row, context in enumerate(case.contexts)])
        tables[:2, : case.tables.shape[1]] = case.tables
        q = case.normal(3, case.heads, case.dim)
        for layer in (0, 1):
            expected = reference.paged_attention(q[:2], PagePool.plain(case.pool), layer, case.batch, rules, SINKS)
            actual = step.attend(layer, q, SINKS)
            torch.testing.assert_close(actual[:2], expected.flatten(1), rtol=2e-5, atol=2e-5)
            assert not actual[2].any()


def test_a_window_is_split_among_no_more_programs_than_it_is_worth() -> None:
    case = case_of((140, 1))
    spans = Spans(torch.zeros(1, 4, dtype=torch.int32), case.tables, 1, 1 << 20)
    pool, tuning = PagePool.plain(case.pool), DecodeTuning(keys=32, warps=4, stages=2, least_share=32)
    assert plan_decode(spans, pool, 4, 100, tuning).splits == 128
    assert plan_decode(spans, pool, 4, 100, tuning, AttentionRule(scale=1.0, window=64)).splits == 4


def test_kernels_are_made_once_for_layers_that_differ_in_their_scale_alone() -> None:
    rules = (PLAIN, replace(PLAIN, scale=0.2), replace(PLAIN, window=4), replace(PLAIN, rope=1), PLAIN)
    assert distinct_layers(rules) == [0, 2, 3]


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=() if rule == "a cap and a window" else pytest.mark.slow) for rule in RULES]
)
def test_rows_over_4_bit_pages_obey_the_rule_and_read_no_block_that_it_hides(rule: str) -> None:
    prompts = Prompts(PageShape(2, 2, BLOCK, 64), 4, (72, 24), torch.float32, 3)
    rules = rules_of((PLAIN, RULES[rule]), 2)
    right = NibblePool.over(prompts.data("int4"), prompts.shape, prompts.dtype)
    theirs = NibbleAttention(right, prompts.heads, rules)
    pages = len(prompts.lengths) * prompts.blocks
    exact = ExactPages.fixed(pages, pages, prompts.shape, prompts.dtype, torch.device("cpu"))
    exact.pool.numbers.fill_(float("nan"))
    ours = NibblePool.over(prompts.data("int4", 0xFF), prompts.shape, prompts.dtype, exact)
    backend = TritonNibbleAttention(ours, prompts.heads, rules, tuning=SMALL_DECODE)
    backend.multiprocessors = 4
    for chunks in ([(0, 0, 54), (1, 0, 23)], [(0, 54, 56), (1, 23, 24)], [(0, 56, 72)]):
        batch = prompts.batch(chunks)
        hide(ours, batch, rules[LAYER])
        parts = [[x[start:end] for x in prompts.rows(sequence)] for sequence, start, end in chunks]
        q, k, v = (torch.cat(each).contiguous() for each in zip(*parts, strict=True))
        step, expected = (
            backend.begin(replace(batch, exact_slots=ours.exact.begin(batch))),
            theirs.begin(replace(batch, exact_slots=right.exact.begin(batch))),
        )
        actual = step.attend(LAYER, step.store(LAYER, q, k, v), SINKS)
        wanted = expected.attend(LAYER, expected.store(LAYER, q, k, v), SINKS)
        torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-4)


def hide(pool: NibblePool, batch: RaggedBatch, rule: AttentionRule) -> None:
    """Scales of blocks that no row of the step sees become NaN."""
    for sequence, context in enumerate(batch.context_lens):
        rows = batch.query_starts[sequence + 1] - batch.query_starts[sequence]
        hidden = batch.block_tables[sequence, : rule.first_visible(context - rows) // BLOCK].long()
        pool.heads[hidden, LAYER] = 0xFF
