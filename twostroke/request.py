"""A request as a decode worker sees it: known token ids in, sampled token ids out. No text here.

The router turns text into tokens and back; it checks what concerns text. `SamplingParams` checks itself.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from twostroke.base.errors import InvalidRequest
from twostroke.base.ids import BlockHash, RequestId
from twostroke.tracing.span import TraceContext

MAX_LOGPROBS = 20
"""Most logprobs beside one token's own, as in OpenAI's API."""
RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 100),
    "logit_bias": (-100, 100),
}
"""Least and greatest value of each parameter, both included. Logits are multiplied with a repetition penalty and
divided by it in float32, where they have to stay finite."""
LONGEST: Mapping[str, int] = {"stop_token_ids": 64, "logit_bias": 300, "logprob_token_ids": 128}
"""Most entries of each list of tokens: the limits of OpenAI's API and vLLM, where they have one."""
LONGEST_HINT_S = 86_400.0
"""Longest time for which a request may ask to keep its blocks: a day."""
MOST_TOKENS = 2**31 - 1
"""Tokens that one answer can have; positions are 32-bit integers."""
SEEDS = 2**64
WORD_BYTES = 4
"""Bytes of one word of a set of tokens: masks of grammars have the same words."""
MAX_GRAMMAR_CHARS = 1 << 20
"""Characters of a grammar's source; the largest schemas of public collections make a tenth of it."""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


def _check(holds: bool, field: str, requirement: str, value: object) -> None:
    if not holds:
        raise InvalidRequest(f"{field} must be {requirement}, got {value}", field=field)


def _check_number(field: str, value: float) -> None:
    """Raises InvalidRequest for a number outside its range. NaN is in no range."""
    least, most = RANGES[field]
    _check(least <= value <= most, field, f"from {least:g} to {most:g}", value)


def check_count(field: str, count: int) -> None:
    """Raises InvalidRequest for a list of tokens that is too long."""
    _check(count <= LONGEST[field], field, f"at most {LONGEST[field]} long", count)


def token_bits(tokens: Iterable[int]) -> bytes:
    """Returns a set of tokens as bits in whole words, the lowest bit of the first byte for token 0."""
    ids = list(tokens)
    bits = bytearray(WORD_BYTES * (max(ids, default=-1) // (8 * WORD_BYTES) + 1))
    for token in ids:
        bits[token >> 3] |= 1 << (token & 7)
    return bytes(bits)


def highest_token(bits: bytes) -> int:
    """Returns the highest token of a set that `token_bits` made; -1 for an empty one, which all vocabularies have."""
    return int.from_bytes(bits, "little").bit_length() - 1


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer must match."""

    source: str
    """llguidance's own form: Lark text that begins with `%llguidance`, or JSON with a list `grammars`."""

    def __post_init__(self) -> None:
        _check(
            0 < len(self.source) <= MAX_GRAMMAR_CHARS, "grammar", f"1 to {MAX_GRAMMAR_CHARS} characters long", "more"
        )

    @property
    def digest(self) -> bytes:
        """Digest of the source, 16 bytes: equal grammars are compiled once."""
        return hashlib.blake2b(self.source.encode(), digest_size=16, person=b"grammar").digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are drawn. A pure function of (logits, seed, choice, position): no generator state anywhere.

    Raises InvalidRequest, naming the field, for values out of range.
    """

    seed: int
    """64 bits; where the client sent none, the router derives one from the stream's name."""
    max_tokens: int
    """Tokens of the answer at most, counted over all attempts."""
    choice: int = 0
    """Index of this answer among the request's n; part of the noise's key."""
    temperature: float = 1.0
    """0 is greedy."""
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None
    """None: no logprobs. k: the chosen token's, and those of the k likeliest tokens."""
    logprob_token_ids: tuple[int, ...] = ()
    """Tokens with wanted logprobs at each position, instead of the likeliest tokens; only with `logprobs`."""
    prompt_logprobs: int | None = None
    """None: none of the prompt. k: those of its tokens after the first, and of the k likeliest at their places."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    allowed_tokens: bytes = b""
    """Tokens that may be drawn, as `token_bits` makes it. Empty: all may."""
    grammar: Grammar | None = None
    """Tokens that it does not permit are not candidates. Its state is a function of the answer's tokens so far."""

    def __post_init__(self) -> None:
        _check(0 <= self.seed < SEEDS, "seed", "a 64-bit number", self.seed)
        _check(0 <= self.choice <= MOST_TOKENS, "choice", f"from 0 to {MOST_TOKENS}", self.choice)
        _check(1 <= self.max_tokens <= MOST_TOKENS, "max_tokens", f"from 1 to {MOST_TOKENS}", self.max_tokens)
        _check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "from 0 to max_tokens", self.min_tokens)
        _check(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _check(self.top_k is None or self.top_k >= 1, "top_k", "at least 1", self.top_k)
        _check_number("temperature", self.temperature)
        _check_number("min_p", self.min_p)
        _check_number("presence_penalty", self.presence_penalty)
        _check_number("frequency_penalty", self.frequency_penalty)
        _check_number("repetition_penalty", self.repetition_penalty)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _check(count is None or 0 <= count <= MAX_LOGPROBS, name, f"from 0 to {MAX_LOGPROBS}", count)
        check_count("stop_token_ids", len(self.stop_token_ids))
        check_count("logit_bias", len(self.logit_bias))
        check_count("logprob_token_ids", len(self.logprob_token_ids))
        _check(
            self.logprobs is not None or not self.logprob_token_ids,
            "logprob_token_ids",
            "together with logprobs",
            "none",
        )
        # Compared as a whole: it is checked for each of many choices.
        has_any = not self.allowed_tokens or self.allowed_tokens != bytes(len(self.allowed_tokens))
        is_whole = len(self.allowed_tokens) % WORD_BYTES == 0
        _check(is_whole and has_any, "allowed_token_ids", "at least one token", "none")
        for _, bias in self.logit_bias:
            _check_number("logit_bias", bias)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def draws_forced(self) -> bool:
        """Whether tokens that a grammar forces are drawn too: for their logprobs, or since they may not be allowed."""
        return self.logprobs is not None or bool(self.allowed_tokens)


@dataclass(frozen=True, slots=True)
class CacheHint:
    """A wish to keep the first blocks of a request for a while; see `twostroke.kv_cache.pins.pin_table`."""

    blocks: int
    """Leading blocks of the prompt."""
    seconds: float
    """How long, from the request's arrival at its worker on."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= LONGEST_HINT_S:
            raise InvalidRequest(
                f"a cache hint lasts more than 0 s and at most {LONGEST_HINT_S:g} s, got {self.seconds:g}",
                field="cache_control.ttl",
            )


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """Weights beside the model's that a request is computed with."""

    digest: bytes
    """Digest of the weights. Weights with equal digests are the same."""
    path: str = ""
    """The folder that they were loaded from; a reader of it checks the digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What a client wants of one prompt. All choices and attempts refer to it, and workers get it as one message."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    """How tokens are drawn; `of_choice` returns the request of another choice."""
    salt: bytes = b""
    """Salt of the blocks after the public ones: only requests with the same salt share them."""
    public_blocks: int = 0
    """How many of the prompt's first blocks have hashes without a salt, so that everybody shares them."""
    weights: WeightsRef | None = None
    """Weights that compute the answer with the model's; None: only the model's."""
    deadline_s: float | None = None
    """Unix seconds (time.time)."""
    speculation: str = ""
    """The field says who may propose tokens of the answer: off, or a drafter; auto or empty: as the worker gets it."""
    hints: tuple[CacheHint, ...] = ()
    hint_tenant: str = ""
    """The hints count for this tenant, empty for those without one, whatever machine they come from."""

    def of_choice(self, choice: int) -> GenerateRequest:
        """Returns what the client wants of another of its n choices: nothing else differs."""
        if choice == self.sampling.choice:
            return self
        return replace(self, sampling=replace(self.sampling, choice=choice))

    @property
    def own_weights(self) -> bytes:
        """Digest of the weights that compute the answer beside the model's; empty where there are none."""
        return b"" if self.weights is None else self.weights.digest

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of the prompt come with the first token."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One attempt at a request's answer: to produce it, or to continue with what earlier attempts have sent of it."""

    request: GenerateRequest
    request_id: RequestId
    number: int
    """A later attempt has a higher number, and tokens of an earlier one are ignored."""
    emitted: tuple[SampledToken, ...] = ()
    """Tokens of earlier attempts, with logprobs if wanted: a router that resumes the stream needs all of them."""
    block_hashes: tuple[BlockHash, ...]
    """Hashes of all full blocks of prompt + emitted. Computed in the dispatcher, and extended at each new attempt."""
    router_id: str
    """The router that gets the answer in its token stream."""
    trace: TraceContext | None = None
    """The span that this is part of. None: it is not traced."""

    @property
    def scores_prompt(self) -> bool:
        """Whether logprobs of the prompt are to be computed: earlier attempts sent none."""
        return self.request.scores_prompt and not self.emitted

    @property
    def known(self) -> list[int]:
        return [*self.request.prompt, *(sampled.token for sampled in self.emitted)]

    @property
    def known_tokens(self) -> int:
        """Tokens of the prompt and of the answer so far."""
        return len(self.request.prompt) + len(self.emitted)

    @property
    def most_new_tokens(self) -> int:
        """Tokens that the answer may still get."""
        return self.request.sampling.max_tokens - len(self.emitted)


class SampledToken(NamedTuple):
    """It is a tuple because one is made for every token."""

    token: int
    logprob: float | None = None
    """Natural log of the token's probability before temperature and truncation, after penalties and bias."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob), likeliest first."""
    is_sound: bool = True
    """False: its logits were not finite numbers, and the token means nothing. Never leaves the worker."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the tokens of a prompt after the first, in columns: T tokens, and the k likeliest at each place.

    They are those of the model: no penalty and no bias applies to a prompt.
    """

    logprobs: array[float]
    """[T] natural log of each token's probability after all tokens before it."""
    ordinals: array[int]
    """[T] 1 for the likeliest token of its place."""
    top_ids: array[int]
    """[T * k] the likeliest tokens of each place, likeliest first."""
    top_logprobs: array[float]
    """[T * k]"""

    @classmethod
    def of(
        cls, logprobs: Iterable[float], ordinals: Iterable[int], top_ids: Iterable[int], top_logprobs: Iterable[float]
    ) -> PromptLogprobs:
        return cls(array("f", logprobs), array("I", ordinals), array("I", top_ids), array("f", top_logprobs))

    @classmethod
    def joined(cls, parts: Iterable[PromptLogprobs]) -> PromptLogprobs:
        whole = cls.of((), (), (), ())
        for part in parts:
            whole.logprobs.extend(part.logprobs)
            whole.ordinals.extend(part.ordinals)
            whole.top_ids.extend(part.top_ids)
            whole.top_logprobs.extend(part.top_logprobs)
        return whole

    def __len__(self) -> int:
        return len(self.logprobs)

    def top(self, place: int) -> list[tuple[int, float]]:
        """Returns the likeliest (token, logprob) at the place of the prompt's token `place` + 1."""
        count = len(self.top_ids) // len(self)
        start, end = place * count, (place + 1) * count
        return list(zip(self.top_ids[start:end], self.top_logprobs[start:end], strict=True))


def equal_tokens(known: Sequence[int], proposed: Sequence[int]) -> int:
    """Returns how many leading tokens of the two are equal."""
    pairs = enumerate(zip(known, proposed, strict=False))
    return next((place for place, (token, other) in pairs if token != other), min(len(known), len(proposed)))


@functools.lru_cache(maxsize=1 << 14)
def plain_token(token: int) -> SampledToken:
    """Returns a token without logprobs. Outputs share frequent ones: each is kept for its whole stream."""
    return SampledToken(token)
