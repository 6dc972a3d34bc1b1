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


class DraftCandidate(NamedTuple):
    """A stream that the draft model may draft for."""

    chance: float
    """Chance of each drafted token that it is right, if those before it are."""
    most: int
    """Most tokens that may be drafted."""
    known_tokens: int
    others: Draft = NOTHING
    """What other drafters propose."""


class Lengths(NamedTuple):
    """Tokens to draft for each stream, and the speed that is expected with them."""

    tokens: tuple[int, ...]
    tokens_per_s: float
    """Tokens that become known per second, those of all streams of the step together."""


def model_lengths(
    candidates: ListOf[DraftCandidate], draft_cost: StepCost, cost: StepCost, step: StepTerms, most: int
) -> Lengths:
    """Returns the lengths with the most tokens per second; a stream with 0 keeps to what others propose.

    The model's step costs `step` without drafts, and runs at most `most` drafted tokens.
    """
    nothing = (0,) * len(candidates)
    if cost.of(step) <= 0 or draft_cost.of_streams(1, 1) <= 0:
        return Lengths(nothing, 0.0)  # the costs are unknown
    by_others = draft_lengths([each.others for each in candidates], cost, step, most)
    expected = [sum(each.others.chances[:length]) for each, length in zip(candidates, by_others, strict=True)]
    tokens, seconds = step.streams + sum(expected), cost.of(step) + sum(by_others) * cost.stream_s
    best = Lengths(nothing, tokens / seconds)
    drafting = [index for index, each in enumerate(candidates) if _most_expected(each) > expected[index]]
    for index in drafting:
        tokens -= expected[index]
        seconds -= by_others[index] * cost.stream_s
        most += by_others[index]
    most -= sum(by_others)
    lengths = [0] * len(candidates)
    longest_s = longest_step_s(len(candidates), cost, step)
    for length in range(1, MOST_DRAFTED + 1):
        row_s = draft_cost.stream_s + cost.stream_s
        drafting = [
            index
            for index in drafting
            if candidates[index].most >= length and candidates[index].chance ** length * seconds > tokens * row_s
        ]
        if not drafting or sum(lengths) + len(drafting) > most:
            break
        chosen = [candidates[index] for index in drafting]
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
    stream: DraftCandidate, lacking: int, answer_tokens: int, draft_cost: StepCost, cost: StepCost, step: StepTerms
) -> bool:
    """Returns whether computing what the draft model lacks of a stream saves more time than it takes.

    It lacks the KV of `lacking` tokens. The answer is expected to have `answer_tokens` more.
    """
    drafted = model_lengths([stream], draft_cost, cost, step, MOST_DRAFTED)
    if not any(drafted.tokens):
        return False
    saved_s = answer_tokens * (cost.of(step) - step.streams / drafted.tokens_per_s)
    return saved_s > draft_cost.of_prompt(lacking, stream.known_tokens - lacking, lacking)


def _most_expected(stream: DraftCandidate) -> float:
    """Returns how many drafted tokens would be right on average if as many as allowed were drafted."""
    return sum(stream.chance**length for length in range(1, min(stream.most, MOST_DRAFTED) + 1))
