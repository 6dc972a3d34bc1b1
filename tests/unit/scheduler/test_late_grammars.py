"""An answer whose grammar takes long to go on misses steps; others do not, and no token is another one."""

from __future__ import annotations

import random
from collections.abc import Sequence as ListOf

import pytest

from tests.unit.scheduler.bench import Bench, tokens
from tests.unit.scheduler.test_scheduler_grammars import ANSWER_TOKENS, grammatical
from twostroke.grammar.advance import Advance
from twostroke.request import FinishReason
from twostroke.scheduler.sequence import Sequence


class LateAdvancer:
    """Each advance is done when the test says so."""

    def __init__(self) -> None:
        self.held: list[Advance] = []

    def run(self, advances: ListOf[Advance]) -> None:
        self.held += advances

    def do(self, share: float = 1.0, draw: random.Random | None = None) -> None:
        """Does all of them, or a drawn share."""
        for advance in [each for each in self.held if draw is None or draw.random() < share]:
            self.held.remove(advance)
            advance.run()


def test_a_late_answer_misses_steps_and_others_go_on() -> None:
    late = LateAdvancer()
    bench = Bench(readings=late)
    held, other = grammatical(bench, tokens(3)), bench.answer(tokens(5))
    bench.admit()
    bench.step()
    known = len(held.known)
    for _ in range(3):
        assert [sequence for sequence, _, _ in bench.planned()] == [other]
    assert len(held.known) == known
    bench.scheduler.end(other)
    assert bench.scheduler.plan() is None, "nothing can run"
    late.do()
    forced = bench.scheduler.take_late()
    assert [each.sequence for each in forced] == [held] * len(forced)
    assert held.known[known:] == [each.token.token for each in forced]
    assert bench.planned()[0][0] is held


@pytest.mark.parametrize("pages", [64, 24])
@pytest.mark.parametrize("seed", range(10))
def test_late_grammars_change_no_answer(seed: int, pages: int) -> None:
    """Also where there are too few pages: answers are preempted while their grammars go on."""
    prompts = [[1, 2, 3, 5, 2, first] for first in range(3)]
    alone = [_finish(Bench(), [prompt])[0] for prompt in prompts]
    draw, late = random.Random(seed), LateAdvancer()
    bench = Bench(pages, readings=late)
    assert _finish(bench, prompts, late, draw) == alone
    assert bench.is_clean()


def test_an_answer_that_is_ended_meanwhile_is_forgotten() -> None:
    late = LateAdvancer()
    bench = Bench(readings=late)
    held = grammatical(bench, tokens(3))
    bench.admit()
    bench.step()
    bench.scheduler.end(held)
    late.do()
    assert bench.scheduler.take_late() == []
    assert bench.is_clean()


def _finish(
    bench: Bench, prompts: list[list[int]], late: LateAdvancer | None = None, draw: random.Random | None = None
) -> list[tuple[list[int], FinishReason]]:
    """Runs all to their ends, as a work loop does."""
    sequences = [grammatical(bench, prompt) for prompt in prompts]
    finished: dict[Sequence, FinishReason] = {}
    for _ in range(10_000):
        if late is not None and draw is not None:
            late.do(0.3, draw)
        bench.admit()
        emissions = bench.scheduler.take_late()
        step = bench.scheduler.plan()
        if step is not None:
            emissions += bench.scheduler.update(step, bench.runner.run(step))
        bench.pool.check_integrity()
        finished |= {each.sequence: each.finish for each in emissions if each.finish is not None}
        if len(finished) == len(sequences):
            answers = [sequence.known[sequence.prompt_tokens :] for sequence in sequences]
            assert all(len(answer) == ANSWER_TOKENS for answer in answers)
            return [(answer, finished[each]) for answer, each in zip(answers, sequences, strict=True)]
    raise AssertionError("they do not end")
