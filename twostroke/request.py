"""A request as a decode worker sees it: known token ids in, sampled token ids out. No text here.

The router turns text into tokens and back; it checks what concerns text. `SamplingParams` checks itself.
"""

from __future__ import annotations

import enum
import functools
import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from twostroke.errors import InvalidRequest
from twostroke.ids import BlockHash, RequestId
from twostroke.tracing.context import TraceContext

MAX_LOGPROBS = 20
"""The limit of OpenAI's API."""
MAX_STOP_TOKENS = 64
"""Stop token ids per request; more is a mistake in the client."""
MAX_LOGIT_BIAS = 300
"""The limit of OpenAI's API."""
LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY = 0.01, 100.0
"""Logits are multiplied with it and divided by it in float32, where they have to stay finite."""
MOST_TEMPERATURE = 100.0
LONGEST_HINT_S = 86_400.0
"""Longest time for which a request may ask to keep its blocks: a day."""
MOST_TOKENS = 2**31 - 1
"""Tokens that one answer can have; positions are 32-bit integers."""
SEEDS = 2**64
MAX_GRAMMAR_CHARS = 1 << 20
"""Characters of a grammar's source; the largest schemas of public collections make a tenth of it."""


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ERROR = "error"


def _check(holds: bool, field: str, requirement: str, value: object) -> None:
    if not holds:
        raise InvalidRequest(f"{field} must be {requirement}, got {value}", field=field)


def _check_number(field: str, value: float, least: float, most: float) -> None:
    """NaN is in no range."""
    _check(least <= value <= most, field, f"from {least:g} to {most:g}", value)


def _check_count(field: str, count: int, most: int) -> None:
    _check(count <= most, field, f"at most {most} long", count)


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the text of an answer must match."""

    source: str
    """llguidance's own form: Lark text that begins with `%llguidance`, or JSON with a list `grammars`."""
    compile_s: float = field(default=0.0, compare=False)
    """Seconds that a router took to compile it. Only the router uses it."""
    mask_s: float = field(default=0.0, compare=False)
    """Seconds that one mask took there, on average. Only the router uses it."""

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
    prompt_logprobs: int | None = None
    """None: none of the prompt. k: those of its tokens after the first, and of the k likeliest at their places."""
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    """Tokens that it does not permit are no candidates. Its state is a function of the answer's tokens so far."""

    def __post_init__(self) -> None:
        _check(0 <= self.seed < SEEDS, "seed", "a 64-bit number", self.seed)
        _check(0 <= self.choice <= MOST_TOKENS, "choice", f"from 0 to {MOST_TOKENS}", self.choice)
        _check(1 <= self.max_tokens <= MOST_TOKENS, "max_tokens", f"from 1 to {MOST_TOKENS}", self.max_tokens)
        _check(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "from 0 to max_tokens", self.min_tokens)
        _check_number("temperature", self.temperature, 0, MOST_TEMPERATURE)
        _check(0 < self.top_p <= 1, "top_p", "in (0, 1]", self.top_p)
        _check(self.top_k is None or self.top_k >= 1, "top_k", "at least 1", self.top_k)
        _check_number("min_p", self.min_p, 0, 1)
        _check_number("presence_penalty", self.presence_penalty, -2, 2)
        _check_number("frequency_penalty", self.frequency_penalty, -2, 2)
        _check_number("repetition_penalty", self.repetition_penalty, LEAST_REPETITION_PENALTY, MOST_REPETITION_PENALTY)
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            _check(count is None or 0 <= count <= MAX_LOGPROBS, name, f"from 0 to {MAX_LOGPROBS}", count)
        _check_count("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKENS)
        _check_count("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS)
        for _, bias in self.logit_bias:
            _check_number("logit_bias", bias, -100, 100)

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True)
class Siblings:
    """Answers that a client wants with the same request: choices of each of its prompts."""

    before: int = 0
    """Answers of the request that come before this one."""
    count: int = 1
    """All answers of the request, this one included."""


@dataclass(frozen=True, slots=True)
class CacheHint:
    """A wish to keep the first blocks of a request for a while; see `twostroke.kv_cache.pins`."""

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
class AdapterRef:
    """An adapter that a request is computed with."""

    digest: bytes
    """Digest of its weights and scale: two with the same digest are the same adapter."""
    path: str = ""
    """The folder that it was loaded from; whoever reads it there checks the digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer to produce, or to go on with: `emitted` holds what earlier attempts have already sent."""

    request_id: RequestId
    attempt: int
    """Number of the attempt: a later one has a higher number, and tokens of an earlier one are ignored."""
    prompt: tuple[int, ...]
    emitted: tuple[SampledToken, ...] = ()
    """Tokens of earlier attempts, with logprobs if wanted: a router that resumes the stream needs all of them."""
    block_hashes: tuple[BlockHash, ...]
    """Hashes of all full blocks of prompt + emitted. Computed in the dispatcher, and extended at each new attempt."""
    salt: bytes = b""
    """Salt of the blocks after the public ones: only requests with the same salt share them."""
    public_blocks: int = 0
    """How many of the prompt's first blocks have hashes without a salt, so that everybody shares them."""
    adapter: AdapterRef | None = None
    sampling: SamplingParams
    deadline_s: float | None = None
    """Unix seconds (time.time)."""
    speculation: str = ""
    """It says who may propose its tokens: off, or a drafter; auto or empty: as the worker is told."""
    router_id: str
    """The router whose token stream carries the answer."""
    priority: int = 0
    """Class of the request: a higher one goes first where requests wait. Only the router uses it."""
    takes_converted: bool = True
    """It may be served by pages that were converted from another form. Only the router uses it."""
    cache_key: bytes = b""
    """Digest of the client's hint which requests have prefixes in common. Only the router uses it."""
    tenant: str = ""
    """Tenants take turns where requests wait. Only the router uses it."""
    siblings: Siblings = Siblings()  # frozen
    """The request's other choices, which only the router knows."""
    hint_tenant: str = ""
    """The hints count for this tenant."""
    hints: tuple[CacheHint, ...] = ()
    trace: TraceContext | None = None
    """The span that this attempt is part of. None: nobody follows it."""

    @property
    def scores_prompt(self) -> bool:
        """Logprobs of the prompt are to be computed: they go with the first token, and earlier attempts sent none."""
        return self.sampling.prompt_logprobs is not None and len(self.prompt) > 1 and not self.emitted

    @property
    def known(self) -> list[int]:
        return [*self.prompt, *(sampled.token for sampled in self.emitted)]


class SampledToken(NamedTuple):
    """It is a tuple because one is made for every token."""

    token: int
    logprob: float | None = None
    """Natural log of the token's probability before temperature and truncation, after penalties and bias."""
    top: tuple[tuple[int, float], ...] = ()
    """(token, logprob), likeliest first."""
    is_sound: bool = True
    """False: its logits were no finite numbers, and the token means nothing. Never leaves the worker."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Logprobs of the tokens of a prompt after the first, in columns: T tokens, and the k likeliest at each place.

    They are those of the model: no penalty and no bias applies to a prompt.
    """

    logprobs: array[float]
    """[T] natural log of each token's probability behind all tokens before it."""
    ranks: array[int]
    """[T] 1 for the likeliest token of its place."""
    top_ids: array[int]
    """[T * k] the likeliest tokens of each place, likeliest first."""
    top_logprobs: array[float]
    """[T * k]"""

    @classmethod
    def of(
        cls, logprobs: Iterable[float], ranks: Iterable[int], top_ids: Iterable[int], top_logprobs: Iterable[float]
    ) -> PromptLogprobs:
        return cls(array("f", logprobs), array("I", ranks), array("I", top_ids), array("f", top_logprobs))

    @classmethod
    def joined(cls, parts: Iterable[PromptLogprobs]) -> PromptLogprobs:
        whole = cls.of((), (), (), ())
        for part in parts:
            whole.logprobs.extend(part.logprobs)
            whole.ranks.extend(part.ranks)
            whole.top_ids.extend(part.top_ids)
            whole.top_logprobs.extend(part.top_logprobs)
        return whole

    def __len__(self) -> int:
        return len(self.logprobs)

    def top(self, place: int) -> list[tuple[int, float]]:
        """Return the likeliest (token, logprob) at the place of the prompt's token `place` + 1."""
        count = len(self.top_ids) // len(self)
        start, end = place * count, (place + 1) * count
        return list(zip(self.top_ids[start:end], self.top_logprobs[start:end], strict=True))


@functools.lru_cache(maxsize=1 << 14)
def plain_token(token: int) -> SampledToken:
    """Return a token without logprobs. All outputs share those that are frequent: each is kept for its whole stream."""
    return SampledToken(token)
