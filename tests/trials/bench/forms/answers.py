"""Greedy answers over pages of one form: how long they agree, and whether they find what a long text says once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tests.trials.bench.forms.form_model import BLOCK, FormModel, LocalModel, Span
from twostroke.base.errors import ConfigError

ANSWER_TOKENS: Final = 12
"""Tokens of an answer that may hold the value: a value has five digits."""
KEYS: Final = (
    *("Lisbon", "Nairobi", "Oslo", "Lima", "Kyoto", "Dakar", "Vienna", "Quito"),
    *("Hanoi", "Cairo", "Dublin", "Havana", "Athens", "Riga", "Seoul", "Tunis"),
    *("Bogota", "Prague", "Manila", "Zagreb", "Perth", "Boston", "Naples", "Geneva"),
)
"""Names of the facts, each at most once in a text."""


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK)


def continued(model: FormModel, prompts: Sequence[torch.Tensor], tokens: int) -> torch.Tensor:
    """Returns int64 [prompts, tokens]: the greedy continuation of each prompt, all in one batch."""
    spans, first = [], 0
    for prompt in prompts:
        blocks = blocks_of(len(prompt) + tokens)
        spans.append(Span(prompt, 0, torch.arange(first, first + blocks)))
        first += blocks
    return model.greedy(spans, tokens)


def shared_tokens(exact: torch.Tensor, other: torch.Tensor) -> tuple[int, ...]:
    """Returns how many tokens each continuation has before the first one that differs."""
    return tuple((exact == other).long().cumprod(dim=1).sum(dim=1).tolist())


@dataclass(frozen=True, slots=True, eq=False)
class Question:
    tokens: torch.Tensor
    value: str
    """What its answer must hold."""


@dataclass(frozen=True, slots=True, eq=False)
class PlantedText:
    """A long text with facts at several depths, in whole blocks, and a question for each fact, in their order."""

    tokens: torch.Tensor
    questions: tuple[Question, ...]

    @property
    def pool_tokens(self) -> int:
        """Tokens of a pool that holds the text once, and each question and answer after it."""
        return len(self.tokens) + BLOCK * sum(blocks_of(len(q.tokens) + ANSWER_TOKENS) for q in self.questions)


def planted(model: LocalModel, filler: torch.Tensor, facts: int, context: int, seed: int) -> PlantedText:
    """Plant `facts` evenly in so much filler that text, question and answer have at most `context` tokens.

    The filler is repeated where it is shorter. Raises ConfigError where the facts alone are longer.
    """
    draw = random.Random(seed)
    values = {key: f"{draw.randrange(10_000, 100_000)}" for key in draw.sample(KEYS, facts)}
    sentences = [model.encode(f"\n\nThe secret number of {key} is {value}.\n\n") for key, value in values.items()]
    asked = [Question(model.encode(f"\n\nThe secret number of {key} is"), value) for key, value in values.items()]
    longest = max(len(question.tokens) for question in asked)
    total = (context - longest - ANSWER_TOKENS) // BLOCK * BLOCK
    room = total - sum(len(sentence) for sentence in sentences)
    if room < facts:
        raise ConfigError(f"--context {context}: {facts} facts and a question do not fit into it", field="context")
    filler = filler.repeat(-(-room // len(filler)))[:room]
    cuts = [round(room * (number + 0.5) / facts) for number in range(facts)]
    pieces = [filler[: cuts[0]]]
    for sentence, start, end in zip(sentences, cuts, (*cuts[1:], room), strict=True):
        pieces += [sentence, filler[start:end]]
    return PlantedText(torch.cat(pieces), tuple(asked))


def retrieved(model: FormModel, text: PlantedText, local: LocalModel) -> tuple[bool, ...]:
    """Tells for each question whether the greedy answer holds its value. All share the pages of the text."""
    model.store(text.tokens)
    first = len(text.tokens) // BLOCK
    shared, spans = torch.arange(first), []
    for question in text.questions:
        blocks = blocks_of(len(question.tokens) + ANSWER_TOKENS)
        table = torch.cat([shared, torch.arange(first, first + blocks)])
        spans.append(Span(question.tokens, len(text.tokens), table))
        first += blocks
    answers = local.tokenizer.decode_batch(model.greedy(spans, ANSWER_TOKENS).tolist())
    return tuple(question.value in answer for question, answer in zip(text.questions, answers, strict=True))
