"""What clients ask while the cluster is broken: one of every kind of stream. Pure."""

from __future__ import annotations

import enum
import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

MODEL_SEED = 20_26
"""Seed of requests that sample: it is given, so that their answers are what they were."""
STOP_LETTERS = 3
"""Letters of a stop string: more than one token of a paced model, whose text is bytes."""


GRAMMAR = r"\{\"steps\": \[([a-z]{3,9}, )+end\]\}"
"""Regular expression with forced tokens before and after a list that goes on as long as there are tokens."""
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "properties": {"words": {"type": "array", "items": {"type": "string", "maxLength": 9}}},
            "required": ["words"],
            "additionalProperties": False,
        },
    },
}
"""A tool whose arguments go on as long as there are tokens."""


class Endpoint(enum.StrEnum):
    HTTP = "http"
    GRPC = "grpc"


class Conduct(enum.StrEnum):
    """What a client does during its answer."""

    STAYS = "stays"
    """The client stays until its answer has ended, at whichever router."""
    MOVES = "moves"
    """To the other router in the middle of its answer, though nothing is wrong."""
    LEAVES = "leaves"
    """In the middle of its answer, for good."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request, and how its client behaves."""

    name: str
    endpoint: Endpoint
    prompt: str
    max_tokens: int
    n: int = 1
    temperature: float = 0.0
    seed: int = MODEL_SEED
    penalties: bool = False
    logprobs: bool = False
    is_scored: bool = False
    """Logprobs of the prompt are wanted, too. Over HTTP the prompt is echoed with them."""
    stop: tuple[str, ...] = ()
    is_chat: bool = False
    """Its prompt is a message of a user."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of its body, over HTTP."""
    deadline_s: float | None = None
    """The server is told of it; long enough to be kept."""
    conduct: Conduct = Conduct.STAYS
    stops_early: bool = False
    """Its stop string is to be taken from the middle of its answer."""

    @property
    def has_grammar(self) -> bool:
        """Its answer has to match a grammar."""
        return not self.fields.keys().isdisjoint(("structured_outputs", "tools"))

    def stopping_within(self, text: str) -> Ask:
        """With the middle of `text`, its answer so far, as stop string."""
        middle = len(text) // 2
        return replace(self, stop=(text[middle : middle + STOP_LETTERS],))

    def staying(self) -> Ask:
        """The same request of a client that stays to its end."""
        return replace(self, conduct=Conduct.STAYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much is asked."""

    tokens: int
    """Tokens of most answers."""
    prompt_letters: int
    """Letters of most prompts."""
    long_tokens: int
    """Tokens of answers that last longer than any fault."""
    seed: int = 0

    def with_seed(self, seed: int) -> Load:
        return replace(self, seed=seed)


def asks(seed: int, *, tokens: int, prompt_letters: int) -> list[Ask]:
    """Answers of about `tokens` tokens. Some share a prefix of half a prompt; the others share nothing."""
    random_ = random.Random(seed)
    half = prompt_letters // 2
    common = _words(random_, half)

    def prompt(*, shares: bool = False) -> str:
        return common + _words(random_, half) if shares else _words(random_, prompt_letters)

    return [
        Ask(name="greedy", endpoint=Endpoint.GRPC, prompt=prompt(shares=True), max_tokens=tokens),
        Ask(name="sampled", endpoint=Endpoint.HTTP, prompt=prompt(shares=True), max_tokens=tokens, temperature=0.8),
        Ask(name="choices", endpoint=Endpoint.GRPC, prompt=prompt(), max_tokens=tokens // 2, n=2, temperature=1.0),
        Ask(name="stop", endpoint=Endpoint.HTTP, prompt=prompt(), max_tokens=tokens, stops_early=True),
        Ask(name="penalties", endpoint=Endpoint.GRPC, prompt=prompt(shares=True), max_tokens=tokens, penalties=True),
        Ask(name="logprobs", endpoint=Endpoint.HTTP, prompt=prompt(), max_tokens=tokens, logprobs=True),
        Ask(name="scored", endpoint=Endpoint.GRPC, prompt=prompt(), max_tokens=tokens, logprobs=True, is_scored=True),
        Ask(
            name="echo",
            endpoint=Endpoint.HTTP,
            prompt=prompt(shares=True),
            max_tokens=tokens,
            temperature=0.8,
            logprobs=True,
            is_scored=True,
        ),
        Ask(
            name="grammar",
            endpoint=Endpoint.HTTP,
            prompt=prompt(shares=True),
            max_tokens=tokens,
            temperature=0.8,
            fields={"structured_outputs": {"regex": GRAMMAR}},
        ),
        Ask(
            name="tools",
            endpoint=Endpoint.HTTP,
            prompt=prompt(),
            max_tokens=tokens,
            temperature=0.8,
            logprobs=True,
            is_chat=True,
            fields={"tools": [TOOL], "tool_choice": "required"},
        ),
        Ask(name="deadline", endpoint=Endpoint.GRPC, prompt=prompt(), max_tokens=tokens, deadline_s=60.0),
        Ask(name="moves", endpoint=Endpoint.GRPC, prompt=prompt(), max_tokens=tokens, conduct=Conduct.MOVES),
        Ask(name="leaves", endpoint=Endpoint.HTTP, prompt=prompt(), max_tokens=tokens, conduct=Conduct.LEAVES),
    ]


def crowd(seed: int, count: int, *, tokens: int) -> list[Ask]:
    """Short prompts with long answers: more than a small pool holds when they end."""
    random_ = random.Random(f"crowd {seed}")
    return [
        Ask(name=f"crowd-{index}", endpoint=Endpoint.GRPC, prompt=_words(random_, 40), max_tokens=tokens)
        for index in range(count)
    ]


def flood(seed: int, count: int, *, prompt_letters: int) -> list[Ask]:
    """Long prompts that share nothing, with short answers: more than the pools of all prefill workers hold."""
    random_ = random.Random(f"flood {seed}")
    return [
        Ask(name=f"flood-{at}", endpoint=Endpoint.GRPC, prompt=_words(random_, prompt_letters * 3 // 2), max_tokens=4)
        for at in range(count)
    ]


def long_ones(seed: int, count: int, *, tokens: int) -> list[Ask]:
    """Short prompts with answers that last longer than any fault; whoever has seen enough leaves."""
    random_ = random.Random(f"long {seed}")
    endpoints = itertools.cycle(Endpoint)
    return [
        Ask(name=f"long-{at}", endpoint=next(endpoints), prompt=_words(random_, 40), max_tokens=tokens)
        for at in range(count)
    ]


def family(seed: int, count: int, *, tokens: int, prompt_letters: int) -> list[Ask]:
    """Prompts with the same beginning, most of what they have, and enough of their own to be worth a prefill worker:
    whoever is asked lacks what another worker holds."""
    random_ = random.Random(f"family {seed}")
    common, own_letters = _words(random_, prompt_letters * 3 // 4), prompt_letters * 5 // 16
    return [
        Ask(
            name=f"family-{at}", endpoint=Endpoint.GRPC, prompt=common + _words(random_, own_letters), max_tokens=tokens
        )
        for at in range(count)
    ]


def _words(random_: random.Random, letters: int) -> str:
    words: list[str] = []
    while sum(map(len, words)) + len(words) < letters:
        words.append("".join(random_.choices("abcdefghijklmnopqrstuvwxyz", k=random_.randint(2, 8))))
    return " ".join(words)[:letters]
