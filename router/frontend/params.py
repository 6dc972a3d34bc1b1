"""What a client wants generated and how, whichever protocol it came by; and the checks that need the model's facts."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import PlainValidator

from router.fleet.serving_facts import ServingFacts
from router.frontend.auth.api_keys import MOST_PRIORITY
from router.frontend.auth.auth import ANONYMOUS, AuthContext
from router.frontend.cache_hints import MessageHint, TokenHint
from router.frontend.json_body import Body, Integer, Number, Strings, TokenIds, as_number, wrong_kind
from router.frontend.output.parsing import Parsing
from router.frontend.output.tool_use import ToolUse
from router.frontend.resume import StreamPoint
from router.frontend.structured.output import StructuredOutput
from twostroke.client_text import shown
from twostroke.config import DRAFT_MODEL, DRAFTER_NAMES, SPECULATE_AUTO, SPECULATE_OFF
from twostroke.errors import ContextLengthExceeded, InvalidRequest
from twostroke.request import MAX_LOGIT_BIAS, MAX_STOP_TOKENS, MOST_TOKENS, Grammar, SamplingParams

MAX_CHOICES = 128
"""Choices for one prompt; more is a mistake in the client, or an attack."""
MAX_MESSAGES = 4096
"""Messages of a chat: templates are rendered where all requests wait."""
MAX_PROMPTS = 1024
"""Prompts in one request."""
MAX_ANSWERS = 1024
"""Choices of all prompts of one request together."""
MAX_STOP_STRINGS = 16
"""OpenAI allows 4, and editors send 14."""
MAX_STOP_CHARS = 1024
"""Characters of one stop string: this much text may have to be held back."""
COMPLETION_MAX_TOKENS = 16
"""Length of a completion that names none, as in OpenAI's API; a chat may take what fits."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles that a message of a chat may have. Templates silently drop others, or let them speak as any role."""
MAX_ID_DIGITS = 20
"""Most digits of a token id that comes as text. Python refuses to read numbers of some thousands."""
MAX_SALT_CHARS = 1024
"""Characters of a client's own salt, which is hashed with every block."""
MAX_REQUEST_ID_CHARS = 256
"""Characters of a request's id, and of a tenant's name."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    split_special_tokens: bool = False
    """Special tokens written in `text` are ordinary text, as under this name in transformers."""
    keep_s: float | None = None
    """Keep its blocks that long."""
    suffix: str = ""
    """What follows the answer: the model fills in what is between."""
    is_echoed: bool = False
    """The answer begins with the prompt's text."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    ids: Sequence[int]
    is_chat: bool = False
    """The ids are those of rendered messages."""
    hints: tuple[TokenHint, ...] = ()
    parsing: Parsing | None = None
    """How its answers are taken apart. None: they are text."""
    is_echoed: bool = False
    """The answer begins with the prompt's text."""
    text: str = ""
    """Its text, where it is echoed and has been prepared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    messages: tuple[Mapping[str, Any], ...]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further names for the template, such as enable_thinking."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that the model may know of; templates that take no tools leave them out."""
    tool_use: ToolUse | None = None
    """How they may be called. None: calls in the answer are text."""
    hints: tuple[MessageHint, ...] = ()

    def __post_init__(self) -> None:
        if not 1 <= len(self.messages) <= MAX_MESSAGES:
            problem = f"have at most {MAX_MESSAGES}, got {len(self.messages)}" if self.messages else "not be empty"
            raise InvalidRequest(f"messages must {problem}", field="messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", field="continue_final_message"
            )


def going_on_otherwise(chat: ChatPrompt, messages: int) -> ChatPrompt:
    """Returns a chat that begins with the same messages and differs from `chat` in the next one, or has one more.

    Templates may render a message by what follows it, and some render none alone: what two chats have in common is what
    all have that begin like this.
    """
    begun = chat.messages[:messages]
    if messages < len(chat.messages):
        following = dict(chat.messages[messages])
    else:
        following = {"role": "assistant" if begun[-1]["role"] == "user" else "user", "content": ""}
    following["content"] = "7" if str(following["content"]).startswith("A") else "A"
    return dataclasses.replace(
        chat, messages=(*begun, following), add_generation_prompt=True, continue_final_message=False
    )


Prompt = TextPrompt | TokenPrompt | ChatPrompt


def _logit_bias(entries: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(entries, Mapping):
        raise wrong_kind("logit_bias", entries, "an object")
    if len(entries) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            f"logit_bias must be at most {MAX_LOGIT_BIAS} long, got {len(entries)}", field="logit_bias"
        )
    bias = []
    for key, value in entries.items():
        if not key.isdecimal() or len(key) > MAX_ID_DIGITS:
            raise InvalidRequest(f"logit_bias: {key[:MAX_ID_DIGITS]!r} is not a token id", field="logit_bias")
        bias.append((int(key), as_number(value, "logit_bias")))
    return tuple(bias)


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
    logit_bias: Annotated[tuple[tuple[int, float], ...], PlainValidator(_logit_bias)] = ()
    """Pairs of token id and bias, read from an object whose names are the ids."""
    logprobs: Integer | None = None
    prompt_logprobs: Integer | None = None
    is_prompt_only: bool = False
    """No token of the answer is shown: one is drawn and dropped. Clients do not send it."""
    seed: Integer | None = None
    stop: Strings = ()
    stop_token_ids: TokenIds = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured: Annotated[StructuredOutput | None, PlainValidator(_structured)] = None
    """What the text must match. Clients do not send it: the dialect makes it of what they send."""

    def model_post_init(self, _context: Any) -> None:
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequest(
                f"stop_token_ids must be at most {MAX_STOP_TOKENS} long, got {len(self.stop_token_ids)}",
                field="stop_token_ids",
            )
        if not 1 <= self.n <= MAX_CHOICES:
            raise InvalidRequest(f"n must be from 1 to {MAX_CHOICES}, got {self.n}", field="n")
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequest(
                f"stop must have at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}", field="stop"
            )
        if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in self.stop):
            raise InvalidRequest(f"stop strings must have from 1 to {MAX_STOP_CHARS} characters", field="stop")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """One parsed request of a client. Its prompts are token ids that fit the model."""

    point: StreamPoint
    """The stream of its output, and what the client has of it already."""
    is_resumable: bool = False
    """The client gets with every message what it needs to resume the stream at another router."""
    is_id_drawn: bool = False
    """The request id is this router's own, which no other client can guess."""
    may_rename: bool = False
    """Take another id where an open request has this one, instead of refusing: proxies repeat theirs on retries."""
    prompts: tuple[TokenPrompt, ...]
    options: AnswerOptions = field(default_factory=AnswerOptions)
    clamps_length: bool = False
    """A client that asks for more tokens than fit behind its prompt gets as many as fit, instead of an error."""
    cache_salt: bytes = b""
    """The client's own salt: its requests share prefixes only with those of its tenant that bring the same."""
    model: str = ""
    """The name that the client called: an adapter's, or empty or the model's own."""
    prompt_cache_key: str = ""
    """The client's hint which of its requests have prefixes in common: it may decide between workers that are equally
    good, and never who shares what."""
    needs_exact: bool = False
    """No page of the prompt may have been converted from another number format."""
    speculation: str = SPECULATE_AUTO
    """It says who may propose its tokens: auto, off, or a drafter."""
    deadline_s: float | None = None
    """Seconds since the Unix epoch."""
    priority: int = 0
    """Class of the request: a higher one goes first."""
    tenant: str = ""
    """Named by the API key or the gateway. No other tenant shares its prefixes."""
    auth: AuthContext = ANONYMOUS
    user: str = ""
    """The user that the client names; it takes turns of its own where no tenant is given."""
    traceparent: str = ""
    """The client's own span, as the header of that name says it."""
    received_s: float = field(default_factory=time.monotonic)
    """When the request was complete, on the monotonic clock."""

    def __post_init__(self) -> None:
        answers = len(self.prompts) * self.options.n
        if answers > MAX_ANSWERS:
            raise InvalidRequest(
                f"n: {len(self.prompts)} prompts with {self.options.n} choices make {answers} answers; "
                f"one request may have {MAX_ANSWERS}",
                field="n",
            )

    @property
    def open_choices(self) -> int:
        """Choices of all prompts whose end the client does not have."""
        return sum(not sent.is_finished for sent in self.point.sent)

    @property
    def request_id(self) -> str:
        return self.point.request_id


def priority_class(wanted: int) -> int:
    """Limits the class: clients may send any number (a clock, say), but classes are few."""
    return max(-MOST_PRIORITY, min(MOST_PRIORITY, wanted))


def check_request_id(request_id: str, name: str) -> str:
    """Checks an id that goes into logs and other ids: it must be short and printable."""
    if len(request_id) > MAX_REQUEST_ID_CHARS or not request_id.isprintable():
        raise InvalidRequest(f"{name} must be printable and at most {MAX_REQUEST_ID_CHARS} characters long", field=name)
    return request_id


def check_salt(salt: str) -> bytes:
    if len(salt) > MAX_SALT_CHARS:
        raise InvalidRequest(f"cache_salt must have at most {MAX_SALT_CHARS} characters", field="cache_salt")
    return salt.encode()


def needs_exact(kv_exactness: str) -> bool:
    """Tells whether a request insists on pages that were never converted from another number format."""
    if kv_exactness not in ("exact", "any"):
        raise InvalidRequest(f'kv_exactness must be "exact" or "any", got {shown(kv_exactness)}', field="kv_exactness")
    return kv_exactness == "exact"


def check_speculation(speculation: str) -> str:
    """Checks who may propose tokens. Only decode workers know whether a draft model is served, and refuse it if not."""
    if speculation not in (SPECULATE_AUTO, SPECULATE_OFF, *DRAFTER_NAMES):
        sure = ", ".join([SPECULATE_AUTO, SPECULATE_OFF, *(name for name in DRAFTER_NAMES if name != DRAFT_MODEL)])
        raise InvalidRequest(
            f"speculation must be one of {sure}, or {DRAFT_MODEL} where a draft model is served, "
            f"got {shown(speculation)}",
            field="speculation",
        )
    return speculation


def check_role(role: Any, name: str) -> str:
    if isinstance(role, str) and role in ROLES:
        return role
    text = repr(role[:40]) if isinstance(role, str) else type(role).__name__
    raise InvalidRequest(f"{name} must be one of {', '.join(sorted(ROLES))}, got {text}", field=name)


def check_token_ids(tokens: Sequence[int], name: str, vocab_size: int) -> None:
    if tokens and (min(tokens) < 0 or max(tokens) >= vocab_size):
        worst = next(token for token in tokens if not 0 <= token < vocab_size)
        raise InvalidRequest(
            f"{name}: token id {worst} is out of range; the vocabulary has {vocab_size} tokens", field=name
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
    name = prompt_field(prompt)
    if not prompt.ids:
        raise InvalidRequest(f"{name} must not be empty", field=name)
    if len(prompt.ids) >= facts.context_tokens:
        resulted = f"your {name} resulted in {len(prompt.ids)} tokens, and an answer needs one more"
        raise _too_long(resulted, len(prompt.ids) + 1, facts, name)
    check_token_ids(prompt.ids, name, facts.vocab_size)


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
) -> tuple[SamplingParams, ...]:
    """Returns one per choice. A request without a seed gets `own_seed`, so that any router can continue it.

    `grammar`: that of `options.structured`.
    """
    check_token_ids([token for token, _ in options.logit_bias], "logit_bias", facts.vocab_size)
    check_token_ids(options.stop_token_ids, "stop_token_ids", facts.vocab_size)
    seed = own_seed if options.seed is None else options.seed % (1 << 64)
    # More than all tokens is all tokens; a client's number may be larger than any message can carry.
    top_k = None if options.top_k is None else min(options.top_k, facts.vocab_size)
    return tuple(
        SamplingParams(
            seed=seed,
            max_tokens=max_tokens,
            choice=choice,
            temperature=options.temperature,
            top_k=top_k,
            top_p=options.top_p,
            min_p=options.min_p,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            repetition_penalty=options.repetition_penalty,
            logit_bias=options.logit_bias,
            logprobs=options.logprobs,
            prompt_logprobs=options.prompt_logprobs,
            min_tokens=options.min_tokens,
            ignore_eos=options.ignore_eos,
            stop_token_ids=tuple(options.stop_token_ids),
            grammar=grammar,
        )
        for choice in range(options.n)
    )


def prompt_field(prompt: Prompt) -> str:
    """Returns the name that clients use."""
    is_chat = isinstance(prompt, ChatPrompt) or (isinstance(prompt, TokenPrompt) and prompt.is_chat)
    return "messages" if is_chat else "prompt"


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
