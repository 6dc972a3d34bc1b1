"""Random histories of a scheduler: whatever arrives, fails or goes away, every answer is what it would be alone."""

from __future__ import annotations

import random
from collections import Counter

from hypothesis import settings

from tests.unit.scheduler.history import SchedulerHistory
from tests.unit.scheduler.symbolic import GRAMMARS

TestSchedulerHistory = SchedulerHistory.TestCase
TestSchedulerHistory.settings = settings(max_examples=60, stateful_step_count=70, deadline=None)


def busy_history(seed: int, events: int) -> Counter[str]:
    """One long life of a scheduler under load, most of it work and some of it mishap."""
    draw = random.Random(seed)
    history = SchedulerHistory()
    beside = draw.choice([None, 1, 2, 5])
    history.begin(
        draw.choice([1, 2, 4]),
        draw.randint(8, 14),
        draw.randint(2, 16),
        beside,
        5,
        2,
        draw.random() < 0.5,
        seed % 2 == 0,
        None if seed % 3 else draw.randint(1, 12),
        draw.randint(0, 8),
    )

    def tokens() -> list[int]:
        return draw.choices([0, 1], k=draw.randint(0, 9))

    def pick() -> int:
        return draw.randrange(10**6)

    def ask() -> None:
        if history.scheduler.waiting < 6:
            history.ask(
                pick(),
                draw.randint(0, 16),
                tokens(),
                draw.randint(1, 9),
                0,
                0,
                draw.random() < 0.8,
                (),
                8,
                draw.random() < 0.3,
                draw.randint(1, 6),
                draw.choice([None, *GRAMMARS]),
                draw.choice([None, None, 0]),
            )

    def ask_for_pages() -> None:
        if history.scheduler.waiting < 6:
            history.ask_for_pages(pick(), draw.randint(0, 16), tokens())

    happenings = {
        ask: 6,
        ask_for_pages: 1,
        history.hand_over_pages: 3,
        lambda: history.admit(draw.choices([True, False], k=3)): 6,
        lambda: history.flight or history.begin_step(draw.random() < 0.5): 20,
        lambda: history.flight and history.end_step(): 20,
        lambda: history.flight and draw.random() < 0.3 and history.lose_step(0): 1,
        lambda: history.live and draw.random() < 0.5 and history.resume_elsewhere(pick()): 1,
        lambda: history.live and history.abort(pick(), draw.randint(0, 2)): 2,
        lambda: history.live and history.switch_speculation(pick(), draw.randint(0, 6)): 6,
        lambda: history.pulls and history.page_arrives(pick()): 8,
        lambda: history.pulls and history.pull_fails(pick()): 1,
        lambda: history.live and history.pull_again(pick(), draw.randint(1, 6)): 1,
        lambda: history.pin(pick()): 1,
        lambda: history.pins and history.unpin(pick()): 3,
    }
    for happening in draw.choices(list(happenings), list(happenings.values()), k=events):
        happening()
        history.pages_hold_what_their_names_say()
        history.nobody_is_forgotten()
    history.teardown()
    return history.seen


def test_long_busy_histories_see_every_mishap_and_no_wrong_answer() -> None:
    seen: Counter[str] = Counter()
    for seed in range(6):
        seen += busy_history(seed, 3000)
    assert min(seen.values()) >= 4, seen
    assert len(seen) == 17, seen


def test_a_scored_prompt_ends_where_its_share_of_a_step_is_smaller_than_a_block() -> None:
    history = SchedulerHistory()
    history.begin(4, 4, 4, None, 1, 0, True, False, None, 0)
    history.ask(0, 0, [0, 0, 0], 1, 0, 0, False, (), scored=True)
    history.teardown()
    assert history.seen["prompt scored"] == 1
