"""Steps with drafted tokens: each draw is the one that the answer would have if those before it were known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit.grammar.grammars import byte_compiler, regex
from tests.unit.scheduler.features import match
from tests.unit.scheduler.symbolic import EOS, VOCABULARY, SymbolicMemory, answering
from twostroke.base.ids import PageId
from twostroke.kv_cache.pool import BlockPool
from twostroke.request import SamplingParams
from twostroke.scheduler.batching import BatchBuilder, Chunk
from twostroke.scheduler.constraints.drafting import most_drafted
from twostroke.scheduler.constraints.exact_blocks import ExactBlocks
from twostroke.scheduler.cost import StepTerms
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import SchedulerLimits

BLOCK = 4
PROMPT = [1, 2, 3, 4, 5]
ANSWER = [2]
DRAFTS = (1, 3, 1)
PENALISED = SamplingParams(seed=1, max_tokens=20, frequency_penalty=0.5, min_tokens=3, stop_token_ids=(6,))
ANSWERS = regex(r"\x02\x01[\x01-\x03]\x01[\x01\x02]*")
"""It permits the drafts, and other tokens behind each of them."""


def stream(known: list[int], params: SamplingParams, *, has_grammar: bool) -> Sequence:
    """A stream that has this known, all of it computed but the last token."""
    sequence = answering(1, PROMPT, params, BLOCK)
    sequence.known[:] = known
    sequence.computed = len(known) - 1
    sequence.pages = [PageId(page) for page in range(8)]
    if has_grammar:
        match(sequence, byte_compiler(VOCABULARY, (EOS,)).state(ANSWERS, known[len(PROMPT) :]), BLOCK)
    return sequence


def comparable(mask: np.ndarray | None) -> list[int] | None:
    return None if mask is None else mask.tolist()


@pytest.mark.parametrize("has_grammar", [False, True])
def test_each_draw_is_as_if_the_drafted_tokens_before_it_were_known(has_grammar: bool) -> None:
    builder = BatchBuilder(BLOCK, scratch_page=8, eos_token_ids=(EOS,))
    known = PROMPT + ANSWER
    drafted = stream(known, PENALISED, has_grammar=has_grammar)
    batch = builder.build([Chunk(drafted, len(known) - 1, len(known), True, DRAFTS)]).batch
    assert batch.tokens.tolist() == [known[-1], *DRAFTS]
    assert batch.positions.tolist() == list(range(len(known) - 1, len(known) + len(DRAFTS)))
    assert batch.logit_rows == [0, 1, 2, 3]
    assert batch.proposed_tokens == len(DRAFTS)
    assert not batch.has_prompts
    for rank, draw in enumerate(batch.samples):
        alone = [*known, *DRAFTS[:rank]]
        chunk = Chunk(stream(alone, PENALISED, has_grammar=has_grammar), len(alone) - 1, len(alone), True)
        (expected,) = builder.build([chunk]).batch.samples
        assert draw._replace(behind=0, mask=None) == expected._replace(mask=None)
        assert comparable(draw.mask) == comparable(expected.mask)
        assert draw.behind == len(DRAFTS) - rank
    assert drafted.known == known
    masks = [comparable(draw.mask) for draw in batch.samples]
    assert len({str(mask) for mask in masks}) == (3 if has_grammar else 1), "the grammar goes on along the drafts"
    assert [bool(draw.banned) for draw in batch.samples] == [True, True, False, False]


def test_a_stream_attends_to_its_tokens_once_however_many_of_its_rows_are_drafted() -> None:
    known = PROMPT + ANSWER
    params = replace(PENALISED, min_tokens=0)
    chunk = Chunk(stream(known, params, has_grammar=False), len(known) - 1, len(known), True, DRAFTS)
    batch = BatchBuilder(BLOCK, scratch_page=8, eos_token_ids=(EOS,)).build([chunk]).batch
    assert StepTerms.of(batch) == StepTerms(streams=1 + len(DRAFTS), context_tokens=len(known))


@pytest.mark.parametrize(("max_tokens", "max_model_len"), [(3, 100), (100, len(PROMPT) + 3)])
def test_drafts_leave_the_last_token_of_an_answer_and_of_the_context_to_a_draw(
    max_tokens: int, max_model_len: int
) -> None:
    limits = SchedulerLimits(BLOCK, max_model_len, (EOS,), align_chunks=False)
    params = replace(PENALISED, max_tokens=max_tokens)
    answers = [[2] * length for length in (1, 2)]
    drafted = [most_drafted(stream(PROMPT + answer, params, has_grammar=False), limits) for answer in answers]
    assert drafted == [1, 0]


def test_no_drafted_token_is_the_last_one_of_a_block_whose_scales_span_it() -> None:
    """The last token of a block stores the block for good, so it has to be known."""
    limits = SchedulerLimits(BLOCK, 1000, (EOS,), align_chunks=False)
    exact = ExactBlocks(BlockPool(8, SymbolicMemory(8, BLOCK)), BLOCK)
    for length in range(1, 3 * BLOCK):
        answering_now = stream(PROMPT + [2] * length, replace(PENALISED, max_tokens=1000), has_grammar=False)
        answering_now.constraints = (exact,)
        behind = len(answering_now.known) + most_drafted(answering_now, limits)
        assert behind % BLOCK == BLOCK - 1
