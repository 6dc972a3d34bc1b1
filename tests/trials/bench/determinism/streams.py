"""The same answers computed in several ways by one engine, and how many of them come out the same."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import torch

from twostroke.base.ids import PageId, RequestId, SessionId
from twostroke.engine.backends.cpu.runner import ModelRunner
from twostroke.engine.sampling.sampler import sample
from twostroke.request import SamplingParams
from twostroke.scheduler.batching import BatchBuilder, Chunk
from twostroke.scheduler.sequence import Sequence

LONGEST_PROMPT: Final = 300
CHUNK: Final = 128
"""Prompt tokens of a step at most, as on a CPU worker."""


@dataclass(slots=True)
class Answer:
    tokens: list[int] = field(default_factory=list)
    logits: list[bytes] = field(default_factory=list)
    """A digest for each token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Shares of identical streams, for one way of computing them."""

    way: str
    identical: float
    bit_identical: float


class Streams:
    """Half of them greedy, half drawn; every stream has pages of its own."""

    def __init__(self, runner: ModelRunner, block_size: int, vocab: int, count: int, tokens: int, seed: int) -> None:
        self._runner = runner
        self._block_size = block_size
        self._tokens = tokens
        self._seed = seed
        draw = random.Random(seed)
        self._prompts = [[draw.randrange(vocab) for _ in range(draw.randint(2, LONGEST_PROMPT))] for _ in range(count)]
        self._builder = BatchBuilder(block_size, count * pages_of_stream(block_size, tokens), ())

    def shares(self) -> Iterator[Shares]:
        alone = [self._play([index], [prompt])[index] for index, prompt in enumerate(self._prompts)]
        everybody = list(range(len(self._prompts)))
        yield _compared("in a crowd", alone, self._play(everybody, self._prompts, self._crowd(1)), [0] * len(alone))
        pulled = self._play(everybody, self._prompts, self._crowd(2), prefill=self._crowd(3))
        yield _compared("over a prefill worker's pages", alone, pulled, [0] * len(alone))
        draw = random.Random(self._seed + 4)
        breaks = [draw.randrange(1, self._tokens) for _ in alone]
        known = [prompt + answer.tokens[:at] for prompt, answer, at in zip(self._prompts, alone, breaks, strict=True)]
        yield _compared("moved in the middle", alone, self._play(everybody, known, self._crowd(5)), breaks)

    def _crowd(self, salt: int) -> random.Random:
        return random.Random(self._seed + salt)

    def _play(
        self,
        streams: list[int],
        known: list[list[int]],
        company: random.Random | None = None,
        prefill: random.Random | None = None,
    ) -> dict[int, Answer]:
        """Each stream's answer from its known tokens on: beside the others in random chunks, or each prompt at once."""
        sequences = {stream: self._sequence(stream, tokens) for stream, tokens in zip(streams, known, strict=True)}
        if prefill is not None:
            self._build_pages(list(sequences.values()), prefill)
        answers = {stream: Answer() for stream in streams}
        of = {sequence.request_id: answers[stream] for stream, sequence in sequences.items()}
        goals = {sequence.request_id: len(self._prompts[s]) + self._tokens for s, sequence in sequences.items()}
        while left := [each for each in sequences.values() if len(each.known) < goals[each.request_id]]:
            chunks = list(_step(left, company))
            self._run(chunks, of)
        return answers

    def _sequence(self, stream: int, known: list[int]) -> Sequence:
        share = pages_of_stream(self._block_size, self._tokens)
        return Sequence(
            request_id=RequestId(str(stream)),
            session=SessionId(stream),
            known=known.copy(),
            prompt_tokens=len(self._prompts[stream]),
            block_hashes=[],
            sampling=SamplingParams(seed=stream, max_tokens=self._tokens, temperature=0.8 * (stream % 2)),
            pages=[PageId(stream * share + page) for page in range(share)],
        )

    def _build_pages(self, sequences: list[Sequence], draw: random.Random) -> None:
        """All full blocks, in chunks that end on block borders, a few prompts at a time."""
        size = self._block_size
        while left := [each for each in sequences if each.computed < len(each.known) // size * size]:
            some = draw.sample(left, min(len(left), draw.randint(1, 3)))
            ends = [min(len(each.known) // size, each.computed // size + draw.randint(1, 3)) * size for each in some]
            self._run([Chunk(each, each.computed, end, False) for each, end in zip(some, ends, strict=True)], {})

    def _run(self, chunks: list[Chunk], answers: dict[RequestId, Answer]) -> None:
        batch = self._builder.build(chunks).batch
        with torch.inference_mode():
            logits = self._runner.logits(batch)
        for chunk in chunks:
            chunk.sequence.computed = chunk.end
        if logits is None:
            return
        drawn = sample(logits, batch.samples)
        for row, token, values in zip(batch.samples, drawn, logits, strict=True):
            sequence = chunks[row.row].sequence
            sequence.known.append(token.token)
            answers[sequence.request_id].tokens.append(token.token)
            answers[sequence.request_id].logits.append(_digest(values))


def pages_of_stream(block_size: int, tokens: int) -> int:
    return -(-(LONGEST_PROMPT + tokens) // block_size)


def _step(sequences: list[Sequence], draw: random.Random | None) -> Iterator[Chunk]:
    """A token for each that decodes, and chunks of prompts beside them; whole prompts where nothing is drawn."""
    room = LONGEST_PROMPT * len(sequences) * 2 if draw is None else draw.randint(1, CHUNK)
    for each in sequences:
        start = each.first_query
        pending = len(each.known) - start
        if pending > 1:
            pending = min(pending, room)
            room -= pending
        if pending:
            yield Chunk(each, start, start + pending, start + pending == len(each.known))


def _digest(values: torch.Tensor) -> bytes:
    return hashlib.blake2b(values.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).digest()


def _compared(way: str, alone: list[Answer], others: dict[int, Answer], breaks: list[int]) -> Shares:
    def share(part: Callable[[Answer], list[int] | list[bytes]]) -> float:
        pairs = zip(alone, breaks, strict=True)
        same = [part(each)[at:] == part(others[index]) for index, (each, at) in enumerate(pairs)]
        return sum(same) / len(same)

    return Shares(
        way=way,
        identical=share(lambda answer: answer.tokens),
        bit_identical=share(lambda answer: answer.logits),
    )
