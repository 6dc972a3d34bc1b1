"""Drawn tokens become known as far as the drafted ones before them are right, and not one further."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.bench import Bench, tokens
from tests.unit.scheduler.symbolic import EOS, answering
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.request import FinishReason, SampledToken, SamplingParams
from twostroke.scheduler.batch import StepResult
from twostroke.scheduler.emission import Drawn, Emitted, Emitter
from twostroke.scheduler.reading import InlineReadings

PROMPT = [1, 2, 3]
DRAFTS = (1, 3, 1)


def emitted(tokens: tuple[int, ...], drafts: tuple[int, ...] = DRAFTS, **params: int) -> Emitted:
    """Returns what becomes known where the sampler draws these tokens, each behind one more drafted one."""
    sequence = answering(1, PROMPT, SamplingParams(**{"seed": 1, "max_tokens": 20, **params}), 4)
    emitter = Emitter((EOS,), 4096, InlineReadings())
    (made,) = emitter.emit([Drawn(sequence, [SampledToken(token) for token in tokens], drafts)])
    assert sequence.known == [*PROMPT, *(emission.token.token for emission in made.emissions)]
    return made


@pytest.mark.parametrize(
    ("drawn", "kept", "equal"),
    [
        ((1, 3, 1, 5), (1, 3, 1, 5), 3),
        ((1, 3, 2, 5), (1, 3, 2), 2),
        ((1, 4, 1, 5), (1, 4), 1),
        ((2, 3, 1, 5), (2,), 0),
    ],
)
def test_what_was_drawn_behind_a_wrong_draft_is_no_part_of_the_answer(
    drawn: tuple[int, ...], kept: tuple[int, ...], equal: int
) -> None:
    made = emitted(drawn)
    assert tuple(emission.token.token for emission in made.emissions) == kept
    assert made.right == equal


def test_an_answer_that_ends_within_its_drafts_has_nothing_behind_its_end() -> None:
    made = emitted((1, EOS, 1, 5), (1, EOS, 1))
    assert [emission.token.token for emission in made.emissions] == [1, EOS]
    assert made.emissions[-1].finish is FinishReason.STOP
    cut = emitted((1, 3, 1, 5), max_tokens=2)
    assert [emission.token.token for emission in cut.emissions] == [1, 3]
    assert cut.emissions[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize(("is_sound", "cached"), [(True, 2), (False, 0)])
def test_blocks_of_an_answer_without_a_token_to_draw_are_forgotten(is_sound: bool, cached: int) -> None:
    """One of them may be why its numbers are not finite: the next request with that prefix would fail, too."""
    bench = Bench()
    sequence = bench.answer([*tokens(8), 2], SamplingParams(seed=0, max_tokens=1))
    bench.admit()
    step = bench.scheduler.plan()
    assert step is not None
    (emission,) = bench.scheduler.update(step, StepResult((SampledToken(3, is_sound=is_sound),), 0.1))
    assert emission.finish is (FinishReason.LENGTH if is_sound else FinishReason.ERROR)
    assert sequence.ended
    assert bench.pool.count(PageState.CACHED) == cached
    assert bench.is_clean()
