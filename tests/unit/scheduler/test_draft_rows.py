"""Steps of a draft model: each token at its own position, with the noise that the answer has there."""

from __future__ import annotations

from twostroke.base.ids import PageId
from twostroke.request import SamplingParams
from twostroke.scheduler.constraints.draft_rows import DraftRow, first_batch, next_batch

BLOCK = 4
PARAMS = SamplingParams(seed=3, max_tokens=9)


def row(start: int, tokens: tuple[int, ...], length: int, first_page: int = 0) -> DraftRow:
    pages = -(-(start + len(tokens) + length) // BLOCK)
    return DraftRow(tokens, start, tuple(PageId(first_page + page) for page in range(pages)), PARAMS, length)


def test_a_drafted_token_is_drawn_at_the_position_at_which_the_answer_would_draw_it() -> None:
    rows = [row(5, (1, 2, 3), 3), row(0, (7,), 2), row(2, (9,), 0)]
    first = first_batch(rows, BLOCK)
    assert [(sample.row, sample.position) for sample in first.samples] == [(0, 8), (1, 1)]
    assert first.positions.tolist() == [5, 6, 7, 0, 2]
    following = next_batch(rows[:2], [[4], [5]], BLOCK)
    assert [(sample.row, sample.position) for sample in following.samples] == [(0, 9), (1, 2)]
    assert (following.tokens.tolist(), following.positions.tolist()) == ([4, 5], [8, 1])


def test_answers_longer_than_any_step_lie_in_their_own_pages() -> None:
    long, short = row(2000, tuple(range(100)), 4, first_page=1000), row(3, (1,), 4)
    batch = first_batch([long, short], BLOCK)
    assert batch.block_tables[0, : 2100 // BLOCK].tolist() == list(range(1000, 1525))
    slots = [1000 * BLOCK + position for position in range(2000, 2100)]
    assert batch.write_slots.tolist() == [*slots, 3]
