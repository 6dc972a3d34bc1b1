"""What steps do for each stream on average: what a worker reports of tokens that it drafts."""

from __future__ import annotations

import pytest

from tests.unit.scheduler.symbolic import answering
from twostroke.request import SampledToken, SamplingParams
from twostroke.scheduler.batch import Batch
from twostroke.scheduler.batching import Chunk, Step
from twostroke.scheduler.cost import StreamStep
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import Emission
from twostroke.worker.steps.work_loop import MEMORY, MOST_TOKENS, StreamSteps

NO_BATCH: Batch = None  # type: ignore[assignment]  # nobody reads it here
PROMPT = [1, 2, 3, 4]


def stream() -> Sequence:
    return answering(1, PROMPT, SamplingParams(seed=1, max_tokens=100), 4)


def observe(steps: StreamSteps, *of_streams: tuple[int, int], also: Chunk | None = None) -> None:
    """A step that drafts so many tokens of each stream, and makes so many known."""
    chunks, emissions = [] if also is None else [also], list[Emission]()
    for drafted, known in of_streams:
        sequence = stream()
        chunks.append(Chunk(sequence, len(PROMPT), len(PROMPT) + 1, True, (0,) * drafted))
        emissions += [Emission(sequence, SampledToken(0), None)] * known
    if also is not None:
        emissions.append(Emission(also.sequence, SampledToken(0), None))
    steps.observe(Step(tuple(chunks), NO_BATCH), emissions)


def test_a_worker_that_has_run_nothing_makes_one_token_of_each_stream_known() -> None:
    assert StreamSteps().each == StreamStep(1.0, 1.0, 0.0)


def test_rows_and_tokens_are_means_over_streams_and_steps() -> None:
    steps = StreamSteps()
    for _ in range(50):
        observe(steps, (4, 3), (0, 1))
        observe(steps, (2, 1))
    assert steps.each.rows == pytest.approx(1 + 6 / 3, rel=0.01)
    assert steps.each.tokens == pytest.approx(5 / 3, rel=0.01)


def test_the_end_of_a_prompt_is_no_step_of_a_stream() -> None:
    steps = StreamSteps()
    prompt = Chunk(stream(), 0, len(PROMPT), True)
    for _ in range(10):
        observe(steps, (3, 4), also=prompt)
        observe(steps, also=prompt)
    assert steps.each == StreamStep(pytest.approx(4.0), pytest.approx(4.0))


def test_what_steps_did_long_ago_counts_no_more() -> None:
    steps = StreamSteps()
    for drafted in (7, 0):
        for _ in range(int(6 * MEMORY)):
            observe(steps, (drafted, drafted + 1))
        assert steps.each.rows == pytest.approx(drafted + 1, rel=0.03)


def test_a_draft_model_delays_steps_only_where_streams_wait_for_it() -> None:
    steps = StreamSteps()
    steps.worked_between(5.0)
    for _ in range(20):
        observe(steps, (1, 1), (1, 1))
        steps.worked_between(0.01)
    assert steps.each.before_s == pytest.approx(0.01, rel=0.06)
    idle = StreamSteps()
    idle.worked_between(5.0)
    observe(idle, (1, 1))
    assert idle.each.before_s == 0.0


def test_an_answer_whose_grammar_forces_thousands_of_tokens_counts_as_one_with_all_drafts_kept() -> None:
    steps, drafted = StreamSteps(), StreamSteps()
    observe(steps, (0, 8000), (0, 1))
    observe(drafted, (0, MOST_TOKENS), (0, 1))
    assert steps.each == drafted.each
