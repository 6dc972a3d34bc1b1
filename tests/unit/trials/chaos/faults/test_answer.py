from __future__ import annotations

import pytest

from tests.trials.chaos.faults.answer import Piece, Silence, Transcript, difference, longest_wait_s
from tests.trials.chaos.faults.zombies import met


def answer(*pieces: Piece) -> Transcript:
    transcript = Transcript("asked", began_s=100.0)
    for at, piece in enumerate(pieces):
        transcript.take(piece, 101.0 + at)
    return transcript


WHOLE = (
    Piece(text="a", tokens=(1,), logprobs=(-0.5,)),
    Piece(text="b", tokens=(2,), logprobs=(-0.25,)),
    Piece(text="c", tokens=(3,), logprobs=(-0.125,), finish="length"),
    Piece(usage=(7, 3)),
)


def test_the_same_answer_in_other_messages_is_the_same() -> None:
    together = Piece(text="bc", tokens=(2, 3), logprobs=(-0.25, -0.125), finish="length")
    assert difference(answer(*WHOLE), answer(WHOLE[0], together, WHOLE[3])) is None
    rounded = Piece(text="a", tokens=(1,), logprobs=(-0.500001,))
    assert difference(answer(*WHOLE), answer(rounded, *WHOLE[1:])) is None


@pytest.mark.parametrize(
    ("pieces", "what"),
    [
        ((WHOLE[0], WHOLE[2], WHOLE[3]), "tokens"),  # a gap
        ((WHOLE[0], WHOLE[1], WHOLE[1], *WHOLE[2:]), "tokens"),  # a duplicate
        ((*WHOLE[:2], Piece(text="d", tokens=(3,), logprobs=(-0.125,), finish="length"), WHOLE[3]), "text"),
        ((*WHOLE[:2], Piece(text="c", tokens=(3,), logprobs=(-0.1,), finish="length"), WHOLE[3]), "logprobs"),
        ((*WHOLE[:2], Piece(text="c", tokens=(3,), logprobs=(-0.125,), finish="stop"), WHOLE[3]), "ends"),
        ((*WHOLE[:3], Piece(usage=(7, 4))), "usage"),
        ((*WHOLE[:3], Piece(index=1, text="c", tokens=(3,)), WHOLE[3]), "choices"),
        ((*WHOLE[:3], Piece(text="d", tokens=(4,)), WHOLE[3]), "goes on after its end"),
        (WHOLE[:3], "usage"),
        ((), "choices"),
    ],
)
def test_any_difference_is_named(pieces: tuple[Piece, ...], what: str) -> None:
    wrong = difference(answer(*WHOLE), answer(*pieces))
    assert wrong is not None
    assert what in wrong


def test_of_a_client_that_has_left_what_it_got_has_to_be_right() -> None:
    left = answer(*WHOLE[:2])
    left.has_left = True
    assert difference(answer(*WHOLE), left) is None
    left.choices[0].tokens[1] = 9
    assert difference(answer(*WHOLE), left) is not None


def test_a_wait_is_the_longest_silence_from_the_fault_on() -> None:
    transcript = Transcript("asked", began_s=0.0)
    for at in (1.0, 9.0, 12.0, 12.5):  # the longest silence began before the fault
        transcript.take(Piece(tokens=(1,)), at)
    assert longest_wait_s(transcript, 8.0) == 3.0
    assert longest_wait_s(transcript, 20.0) is None


def test_the_patience_of_a_client_with_a_frozen_router_is_not_counted() -> None:
    transcript = Transcript("asked", began_s=0.0, silences=[Silence(5.0, "router-1")])
    for at in (1.0, 5.5, 6.0):
        transcript.take(Piece(tokens=(1,)), at)
    assert longest_wait_s(transcript, 2.0) == 3.5
    assert longest_wait_s(transcript, 2.0, free="router-1") == 0.5
    assert longest_wait_s(transcript, 2.0, free="router-2") == 3.5


@pytest.mark.parametrize(
    ("arrivals", "count"),
    [
        ((1.0, 4.1, 6.0, 7.0, 13.5), 1),  # it waited, went on, and still did when it was back at 12
        ((1.0, 2.1, 2.6, 3.0, 13.5), 0),  # it was elsewhere
        ((1.0, 12.5, 13.5), 0),  # nobody went on before
        ((1.0, 4.1, 11.0), 0),  # it had ended
    ],
)
def test_a_zombie_meets_streams_that_it_had_and_that_others_go_on_with(arrivals: tuple[float, ...], count: int) -> None:
    transcript = Transcript("long-0", began_s=0.5)
    for at in arrivals:
        transcript.take(Piece(tokens=(1,)), at)
    assert met([transcript], fault_s=2.0, back_s=12.0) == count
