"""How many tokens a draft model shall draw for each stream, before it draws any: as many as raise tokens per second.

A drafted token costs the draft model's step and one more row of the model's. The draft model's steps are shared by all
streams that still draft, so their number is chosen for all of them together.
"""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from typing import NamedTuple

from twostroke.scheduler.constraints.drafting import draft_lengths, longest_step_s
from twostroke.scheduler.cost import StepCost, StepTerms
from twostroke.speculation.draft import NOTHING, Draft
from twostroke.speculation.speculation import MOST_DRAFTED


class Asking(NamedTuple):
    """A stream that the draft model may draft for."""

    chance: float
    """Chance of each drafted token that it is right, if those before it are."""
    most: int
    """Tokens that may be drafted."""
    known_tokens: int
    others: Draft = NOTHING
    """What other drafters propose."""


class Lengths(NamedTuple):
    """Tokens to draft for each stream, and what is expected of it."""

    tokens: tuple[int, ...]
    tokens_per_s: float
    """Tokens that become known per second, those of all streams of the step together."""


def model_lengths(asking: ListOf[Asking], draft_cost: StepCost, cost: StepCost, step: StepTerms, most: int) -> Lengths:
    """Returns the lengths with the most tokens per second; a stream with 0 keeps to what others propose.

    The model's step costs `step` without drafts, and runs at most `most` drafted tokens.
    """
    nothing = (0,) * len(asking)
    if cost.of(step) <= 0 or draft_cost.of_streams(1, 1) <= 0:
        return Lengths(nothing, 0.0)  # nothing is known of costs
    by_others = draft_lengths([each.others for each in asking], cost, step, most)
    expected = [sum(each.others.chances[:length]) for each, length in zip(asking, by_others, strict=True)]
    tokens, seconds = step.streams + sum(expected), cost.of(step) + sum(by_others) * cost.stream_s
    best = Lengths(nothing, tokens / seconds)
    drafting = [index for index, each in enumerate(asking) if _most_expected(each) > expected[index]]
    for index in drafting:
        tokens -= expected[index]
        seconds -= by_others[index] * cost.stream_s
        most += by_others[index]
    most -= sum(by_others)
    lengths = [0] * len(asking)
    longest_s = longest_step_s(len(asking), cost, step)
    for length in range(1, MOST_DRAFTED + 1):
        row_s = draft_cost.stream_s + cost.stream_s
        drafting = [
            index
            for index in drafting
            if asking[index].most >= length and asking[index].chance ** length * seconds > tokens * row_s
        ]
        if not drafting or sum(lengths) + len(drafting) > most:
            break
        chosen = [asking[index] for index in drafting]
        seconds += len(chosen) * cost.stream_s + draft_cost.of_streams(
            len(chosen), sum(each.known_tokens for each in chosen)
        )
        if seconds > longest_s:
            break
        tokens += sum(each.chance**length for each in chosen)
        for index in drafting:
            lengths[index] = length
        if tokens / seconds > best.tokens_per_s:
            best = Lengths(tuple(lengths), tokens / seconds)
    return best


def pays_catching_up(
    stream: Asking, lacking: int, answer_tokens: int, draft_cost: StepCost, cost: StepCost, step: StepTerms
) -> bool:
    """Tells whether computing what the draft model lacks of a stream saves more time than it takes.

    It lacks `lacking` tokens, and `answer_tokens` are expected to come yet.
    """
    drafted = model_lengths([stream], draft_cost, cost, step, MOST_DRAFTED)
    if not any(drafted.tokens):
        return False
    saved_s = answer_tokens * (cost.of(step) - step.streams / drafted.tokens_per_s)
    return saved_s > draft_cost.of_prompt(lacking, stream.known_tokens - lacking, lacking)


def _most_expected(stream: Asking) -> float:
    """Returns how many tokens would be right, on average, of as many as may be drafted."""
    return sum(stream.chance**length for length in range(1, min(stream.most, MOST_DRAFTED) + 1))
