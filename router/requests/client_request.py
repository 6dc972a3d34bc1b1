"""One request of a client: what its dialect has read of it, and who sends it over which stream."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SkipValidation, ValidationInfo

from router.auth.auth import ANONYMOUS, AuthContext
from router.fleet.named_models import NamedModel
from router.fleet.worker import ServingFacts
from router.json_body import Body, Integer, Number, wrong_kind
from router.requests.params import (
    MAX_ANSWERS,
    AnswerOptions,
    check_request_id,
    check_salt,
    priority_class,
)
from router.requests.resume import StreamPoint
from router.routing.selector import RoutingParams
from router.text.prompts import Prompt, PublicPrefixes, TokenPrompt
from twostroke.base.client_text import shown
from twostroke.base.errors import InvalidRequest
from twostroke.config import DRAFT_MODEL, DRAFTER_NAMES, SPECULATE_AUTO, SPECULATE_OFF
from twostroke.kv_cache.block import exact_salt, owner_salt
from twostroke.request import CacheHint, GenerateRequest, SamplingParams
from twostroke.rpc.channel import call_timeout_s


def check_timeout(timeout_s: float | None, name: str) -> float | None:
    """Returns the timeout, at most a day. Raises InvalidRequest for a negative one."""
    if timeout_s is not None and timeout_s < 0:
        raise InvalidRequest(f"{name} must be a number of seconds, 0 or more, got {timeout_s}", field=name)
    return None if timeout_s is None else call_timeout_s(timeout_s)


def _salt(value: Any, info: ValidationInfo) -> bytes:
    if not isinstance(value, str):
        raise wrong_kind(info.field_name, value, "a string")
    return check_salt(value)


def _takes_converted(value: Any) -> bool:
    """Returns whether a request may be served by pages that were converted from another form."""
    if not isinstance(value, str):
        raise wrong_kind("kv_exactness", value, "a string")
    if value not in ("exact", "any"):
        raise InvalidRequest(f'kv_exactness must be "exact" or "any", got {shown(value)}', field="kv_exactness")
    return value == "any"


def _speculation(value: Any) -> str:
    """Checks the name of a drafter. Only decode workers know whether a draft model is served, and refuse it if not."""
    if not isinstance(value, str):
        raise wrong_kind("speculation", value, "a string")
    if value not in (SPECULATE_AUTO, SPECULATE_OFF, *DRAFTER_NAMES):
        sure = ", ".join([SPECULATE_AUTO, SPECULATE_OFF, *(name for name in DRAFTER_NAMES if name != DRAFT_MODEL)])
        raise InvalidRequest(
            f"speculation must be one of {sure}, or {DRAFT_MODEL} where a draft model is served, got {shown(value)}",
            field="speculation",
        )
    return value


class AnswerRequest(Body):
    """A request as its dialect has read it. The subclasses of dialects add the fields that their replies depend on.

    Clients do not send `prompts` and `options`: the dialect derives them from what they send.
    """

    prompts: Annotated[tuple[Prompt, ...], SkipValidation]
    options: AnswerOptions
    model: str | None = None
    stream: bool = False
    timeout_s: Annotated[Number | None, AfterValidator(lambda seconds: check_timeout(seconds, "timeout"))] = Field(
        default=None, alias="timeout"
    )
    priority: Annotated[Integer, AfterValidator(lambda wanted: priority_class(-wanted))] = 0
    """Class of the request: higher goes first. In a body, lower goes first, as in vLLM's and LiteLLM's servers."""
    user: Annotated[str, AfterValidator(lambda user: check_request_id(user, "user"))] = ""
    cache_salt: Annotated[bytes, BeforeValidator(_salt, json_schema_input_type=str)] = b""
    """The client's own salt: its requests share prefixes only with requests of its tenant that have the same salt."""
    prompt_cache_key: str | None = None
    """The client's hint that requests with the same key have prefixes in common. It may decide between workers that are
    equally good, but never which requests share blocks."""
    takes_converted: Annotated[bool, BeforeValidator(_takes_converted, json_schema_input_type=str)] = Field(
        default=True, alias="kv_exactness"
    )
    """Whether the request may be served by pages that were converted from another form."""
    speculation: Annotated[str, BeforeValidator(_speculation)] = SPECULATE_AUTO
    """The drafter that may propose tokens of the answer: auto, off, or the name of one."""

    @property
    def removed_part(self) -> str:
        """Name in metrics of what the dialect removed from the prompt as different in each request. Empty: none."""
        return ""

    @property
    def named_tenant(self) -> str:
        """The tenant that a gateway names in the request's message. Empty: it names none there."""
        return ""

    @property
    def token_prompts(self) -> tuple[TokenPrompt, ...]:
        """The prompts, once preparation has made tokens of them."""
        return tuple(prompt for prompt in self.prompts if isinstance(prompt, TokenPrompt))

    @property
    def has_parts(self) -> bool:
        """Whether events of its answers have parts: a parser takes their text apart."""
        return any(prompt.parsing is not None for prompt in self.token_prompts)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRequest:
    """A request as its endpoint received it: what is asked, by whom, and what the client has of it already."""

    body: AnswerRequest
    """The prompts are token ids that fit the model."""
    point: StreamPoint
    """The stream of its output, and what the client has of it already."""
    is_resumable: bool = False
    """Whether every message has a token with which the client can resume the stream at another router."""
    is_id_drawn: bool = False
    """Whether the request id is this router's own, which no other client can guess."""
    may_rename: bool = False
    """Whether the request gets another id, instead of being refused, if an open request has the same one: proxies
    repeat ids on retries."""
    clamps_length: bool = False
    """Whether a client that asks for more tokens than fit after its prompt gets as many as fit, instead of an error."""
    deadline_s: float | None = None
    """Seconds since the Unix epoch."""
    tenant: str = ""
    """Tenant that the API key or the gateway names. Other tenants share no prefixes with it."""
    auth: AuthContext = ANONYMOUS
    client: str = ""
    """Address of the client's machine."""
    traceparent: str = ""
    """The client's own span, as the header of that name says it."""
    received_s: float = field(default_factory=time.monotonic)
    """When the request was complete, on the monotonic clock."""

    def __post_init__(self) -> None:
        prompts, n = len(self.body.prompts), self.body.options.n
        if prompts * n > MAX_ANSWERS:
            raise InvalidRequest(
                f"n: {prompts} prompts with {n} choices make {prompts * n} answers; one request may have {MAX_ANSWERS}",
                field="n",
            )

    @property
    def open_choices(self) -> int:
        """Choices of all prompts whose end the client does not have."""
        return sum(not sent.is_finished for sent in self.point.sent)

    @property
    def request_id(self) -> str:
        return self.point.request_id

    @property
    def fair_queue_key(self) -> str:
        """The name under which it takes turns with others: its tenant, or else its client's address."""
        return self.tenant or self.client

    @property
    def routing(self) -> RoutingParams:
        """The parameters for routing. A cache key is hashed with the tenant: equal keys of two tenants differ."""
        cache_key, body = b"", self.body
        if body.prompt_cache_key:
            named = f"{self.tenant}\0{body.prompt_cache_key}".encode()
            cache_key = hashlib.blake2b(named, digest_size=16, person=b"prompt cache key").digest()
        return RoutingParams(
            priority=min(body.priority, self.auth.max_priority),
            tenant=self.fair_queue_key,
            takes_converted=body.takes_converted,
            cache_key=cache_key,
        )

    def generate_request(
        self,
        prompt: TokenPrompt,
        sampling: SamplingParams,
        facts: ServingFacts,
        named: NamedModel | None,
        public: PublicPrefixes,
    ) -> GenerateRequest:
        """Returns the request that workers get for one of its prompts."""
        tokens, block_size = tuple(prompt.ids), facts.block_size
        is_exact = not self.body.takes_converted and facts.kv_form.converted_from is not None
        is_apart = is_exact or named is not None
        salt = owner_salt(self.tenant, self.body.cache_salt)
        if is_exact:
            salt = exact_salt(salt)
        if named is not None:
            salt = named.salted(salt)
        return GenerateRequest(
            prompt=tokens,
            sampling=sampling,
            salt=salt,
            public_blocks=0 if is_apart else public.blocks_of(tokens, block_size),
            weights=None if named is None else named.ref,
            deadline_s=self.deadline_s,
            speculation=self.body.speculation,
            hints=tuple(CacheHint(hint.tokens // block_size, hint.seconds) for hint in prompt.hints),
            hint_tenant=self.tenant,
        )
