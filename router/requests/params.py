"""Sampling and stopping as clients ask for them, in any protocol, and the checks that need the model's facts."""

from __future__ import annotations

import dataclasses
import math
from array import array
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field, PlainValidator

from router.auth.api_keys import MOST_PRIORITY
from router.fleet.worker import ServingFacts
from router.json_body import Body, Integer, Number, Strings, TokenIds, as_number, is_token_list, wrong_kind
from router.text.prompts import TokenPrompt, prompt_field
from router.text.structured.output import StructuredOutput
from twostroke.base.client_text import shown
from twostroke.base.errors import ContextLengthExceeded, InvalidRequest, NotFound
from twostroke.request import (
    MOST_TOKENS,
    Grammar,
    SamplingParams,
    check_count,
    highest_token,
    token_bits,
)

MAX_CHOICES = 128
"""Most choices for one prompt; more is a mistake in the client, or an attack."""
MAX_PROMPTS = 1024
"""Most prompts in one request."""
MAX_ANSWERS = 1024
"""Most choices of all prompts of one request together."""
MAX_STOP_STRINGS = 16
"""Most stop strings of a request. OpenAI allows 4, and editors send 14."""
MAX_STOP_CHARS = 1024
"""Most characters of one stop string: this much text may have to be held back."""
COMPLETION_MAX_TOKENS = 16
"""Length of a completion that names none, as in OpenAI's API; a chat may take what fits."""
MOST_TOKEN_ID = (1 << 22) - 1
"""Greatest token id that any vocabulary is thought to have: a set of tokens takes a bit for each id below it."""
LEAST_SEED, MOST_SEED = -(2**63), 2**63 - 1
"""Seeds that OpenAI's API and vLLM take. A larger seed would be cut to 64 bits, and two seeds would give one answer."""
MAX_ID_DIGITS = 20
"""Most digits of a token id that comes as text. Python refuses to read numbers of some thousands of digits."""
MAX_SALT_CHARS = 1024
"""Most characters of a client's own salt, which is hashed with every block."""
MAX_REQUEST_ID_CHARS = 256
"""Most characters of a request's id, and of a tenant's name."""


def _logit_bias(entries: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(entries, Mapping):
        raise wrong_kind("logit_bias", entries, "an object")
    check_count("logit_bias", len(entries))
    bias = []
    for key, value in entries.items():
        if not key.isdecimal() or len(key) > MAX_ID_DIGITS:
            raise InvalidRequest(f"logit_bias: {key[:MAX_ID_DIGITS]!r} is not a token id", field="logit_bias")
        bias.append((int(key), as_number(value, "logit_bias")))
    return tuple(bias)


def _allowed_tokens(value: Any) -> bytes:
    if not is_token_list(value):
        raise wrong_kind("allowed_token_ids", value, "a list of token ids")
    if not value:
        raise InvalidRequest("allowed_token_ids must not be empty: no token could be drawn", field="allowed_token_ids")
    if not 0 <= min(value) <= max(value) <= MOST_TOKEN_ID:
        wrong = min(value) if min(value) < 0 else max(value)
        raise InvalidRequest(f"allowed_token_ids: token id {wrong} is out of range", field="allowed_token_ids")
    return token_bits(value)


def _structured(value: Any) -> StructuredOutput:
    if not isinstance(value, StructuredOutput):
        raise InvalidRequest("structured is not a field of requests: use structured_outputs", field="structured")
    return value


class AnswerOptions(Body):
    """Sampling and stopping as the client wrote them; None stands for "not given"."""

    n: Integer = 1
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    """OpenAI's newer name of `max_tokens`, which wins."""
    min_tokens: Integer = 0
    temperature: Number = 1.0
    top_k: Integer | None = None
    top_p: Number = 1.0
    min_p: Number = 0.0
    presence_penalty: Number = 0.0
    frequency_penalty: Number = 0.0
    repetition_penalty: Number = 1.0
    logit_bias: Annotated[
        tuple[tuple[int, float], ...], PlainValidator(_logit_bias, json_schema_input_type=dict[str, float])
    ] = ()
    """Pairs of token id and bias, read from an object whose names are the ids."""
    allowed_tokens: Annotated[bytes, PlainValidator(_allowed_tokens, json_schema_input_type=list[int])] = Field(
        default=b"", alias="allowed_token_ids"
    )
    """Tokens that may be drawn, as `token_bits` makes it of a list of their ids. Empty: all may."""
    logprobs: Integer | None = None
    logprob_token_ids: TokenIds = ()
    """Tokens whose logprobs are wanted instead of those of the likeliest."""
    prompt_logprobs: Integer | None = None
    is_prompt_only: bool = False
    """Whether no token of the answer is shown: one is drawn and dropped. Clients do not send it."""
    seed: Integer | None = None
    stop: Strings = ()
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured: Annotated[StructuredOutput | None, PlainValidator(_structured)] = None
    """What the text must match. Clients do not send it: the dialect makes it of what they send."""

    @property
    def shown_logprobs(self) -> int:
        """Returns the most logprobs that stand beside one token's own."""
        return len(self.logprob_token_ids) or self.logprobs or 0

    def model_post_init(self, _context: Any) -> None:
        check_count("stop_token_ids", len(self.stop_token_ids))
        check_count("logprob_token_ids", len(self.logprob_token_ids))
        if self.seed is not None:
            check_seed(self.seed)
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequest("logprob_token_ids needs logprobs", field="logprob_token_ids")
        if not 1 <= self.n <= MAX_CHOICES:
            raise InvalidRequest(f"n must be from 1 to {MAX_CHOICES}, got {self.n}", field="n")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", field="stop"
            )
        if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in self.stop):
            raise InvalidRequest(f"stop strings must have from 1 to {MAX_STOP_CHARS} characters", field="stop")


_UNCHANGED_OPTIONS = (
    AnswerOptions.model_fields.keys() & {each.name for each in dataclasses.fields(SamplingParams)}
) - {
    "seed",
    "max_tokens",
    "top_k",
    "logprob_token_ids",
    "stop_token_ids",
}
"""Options that are copied into `SamplingParams` unchanged."""


def priority_class(wanted: int) -> int:
    """Limits the class: clients may send any number (a clock, say), but classes are few."""
    return max(-MOST_PRIORITY, min(MOST_PRIORITY, wanted))


def check_request_id(request_id: str, name: str) -> str:
    """Checks an id that goes into logs and other ids: it must be short and printable."""
    if len(request_id) > MAX_REQUEST_ID_CHARS or not request_id.isprintable():
        raise InvalidRequest(f"{name} must be printable and at most {MAX_REQUEST_ID_CHARS} characters long", field=name)
    return request_id


def check_seed(seed: int) -> None:
    """Raises InvalidRequest with the names by which clients of vLLM know a number that is too small or too large."""
    if not LEAST_SEED <= seed <= MOST_SEED:
        kind = "greater_than_equal" if seed < LEAST_SEED else "less_than_equal"
        raise InvalidRequest(f"seed must be from {LEAST_SEED} to {MOST_SEED}, got {seed} ({kind})", field="seed")


def check_salt(salt: str) -> bytes:
    """Returns the salt. Raises InvalidRequest for an empty one, which would share prefixes with everybody."""
    if not salt:
        raise InvalidRequest("cache_salt must not be empty: leave it out, or send a secret", field="cache_salt")
    if len(salt) > MAX_SALT_CHARS:
        raise InvalidRequest(f"cache_salt must have at most {MAX_SALT_CHARS} characters", field="cache_salt")
    return salt.encode()


def check_model(model: str | None, served: str, others: Collection[str] = ()) -> None:
    """Raises NotFound for a name under which nothing is served. Such a request never falls back to the served model."""
    if model and model != served and model not in others:
        raise NotFound(f"the model {shown(model)} does not exist; this server serves {served!r}", field="model")


def check_token_ids(tokens: Sequence[int], name: str, vocab_size: int) -> None:
    least = 0 if isinstance(tokens, array) else min(tokens, default=0)  # arrays hold unsigned token ids
    if tokens and (least < 0 or max(tokens) >= vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise InvalidRequest(
            f"{name}: token id {wrong} is out of range; the vocabulary has {vocab_size} tokens", field=name
        )


def check_length(tokens: int, name: str, facts: ServingFacts) -> None:
    """Raises ContextLengthExceeded for more tokens than the model ever takes."""
    if tokens > facts.max_model_len:
        raise _too_long(f"{name} has {tokens} tokens", tokens, facts, name, limit=facts.max_model_len)


def check_text_length(text: str, name: str, longest_token_chars: int, most_tokens: int, facts: ServingFacts) -> None:
    """Raises ContextLengthExceeded for a text that is too long even if it is made of the longest tokens only.

    Counting its tokens costs more than refusing it.
    """
    if len(text) > most_tokens * longest_token_chars:
        least_tokens = math.ceil(len(text) / longest_token_chars)
        what = f"{name} has {len(text)} characters, which is always more"
        raise _too_long(what, least_tokens, facts, name, limit=most_tokens)


def check_prompt(prompt: TokenPrompt, facts: ServingFacts) -> None:
    """Raises InvalidRequest for a prompt that no worker could ever take."""
    check_prompt_length(prompt, facts)
    check_token_ids(prompt.ids, prompt_field(prompt), facts.vocab_size)


def check_prompt_length(prompt: TokenPrompt, facts: ServingFacts) -> None:
    """Raises InvalidRequest for a prompt that is empty or too long. It costs the same for every length."""
    name = prompt_field(prompt)
    if not prompt.ids:
        raise InvalidRequest(f"{name} must not be empty", field=name)
    if len(prompt.ids) >= facts.context_tokens:
        resulted = f"your {name} resulted in {len(prompt.ids)} tokens, and an answer needs one more"
        raise _too_long(resulted, len(prompt.ids) + 1, facts, name)


def answer_length(prompt: TokenPrompt, options: AnswerOptions, facts: ServingFacts, *, clamps: bool = False) -> int:
    """Returns the tokens that the output may have. Raises ContextLengthExceeded for more than can ever fit.

    `clamps`: more than fit means as many as fit.
    """
    prompt_tokens, wanted, field = len(prompt.ids), options.max_tokens, "max_tokens"
    if options.max_completion_tokens is not None:
        wanted, field = options.max_completion_tokens, "max_completion_tokens"
    room = facts.context_tokens - prompt_tokens
    if wanted is None:
        return room if prompt.is_chat else min(max(COMPLETION_MAX_TOKENS, options.min_tokens), room)
    if wanted < 1:
        raise InvalidRequest(f"{field} must be from 1 to {MOST_TOKENS}, got {wanted}", field=field)
    if wanted > room and clamps:
        return room
    if wanted > room:
        parts = f"{prompt_tokens} in the {prompt_field(prompt)}, {wanted} in the completion"
        tokens = prompt_tokens + wanted
        raise _too_long(f"you requested {tokens} tokens ({parts})", tokens, facts, field)
    return wanted


def sampling_params(
    options: AnswerOptions, max_tokens: int, facts: ServingFacts, own_seed: int, grammar: Grammar | None = None
) -> SamplingParams:
    """Returns the sampling parameters of the first choice. `grammar` is made of `options.structured`.

    A request without a seed gets `own_seed`, so that any router can continue it.
    """
    check_token_ids([token for token, _ in options.logit_bias], "logit_bias", facts.vocab_size)
    check_token_ids(options.stop_token_ids, "stop_token_ids", facts.vocab_size)
    check_token_ids(options.logprob_token_ids, "logprob_token_ids", facts.vocab_size)
    check_token_ids([max(0, highest_token(options.allowed_tokens))], "allowed_token_ids", facts.vocab_size)
    seed = own_seed if options.seed is None else options.seed % (1 << 64)
    # More than all tokens is all tokens; a client's number may be larger than any message can carry.
    top_k = None if options.top_k is None else min(options.top_k, facts.vocab_size)
    return SamplingParams(
        **{name: getattr(options, name) for name in _UNCHANGED_OPTIONS},
        seed=seed,
        max_tokens=max_tokens,
        top_k=top_k,
        logprob_token_ids=tuple(dict.fromkeys(options.logprob_token_ids)),
        stop_token_ids=tuple(options.stop_token_ids),
        grammar=grammar,
    )


def _too_long(
    what: str, tokens: int, facts: ServingFacts, name: str, limit: int | None = None
) -> ContextLengthExceeded:
    """Makes the error with OpenAI's and vLLM's sentences, which clients search for."""
    limit = limit or facts.context_tokens
    pool = f" A worker's page pool fits {limit}, the model takes {facts.max_model_len}."
    return ContextLengthExceeded(
        f"This model's maximum context length is {limit} tokens. However, {what}. Please reduce the length of {name}."
        f"{pool if limit < facts.max_model_len else ''} (context_length_exceeded)",
        field=name,
        tokens=tokens,
        most_tokens=limit,
    )
