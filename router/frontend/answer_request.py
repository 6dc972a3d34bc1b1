"""A body that asks for an answer, whatever its dialect: the fields that the router itself acts on."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SkipValidation, ValidationInfo

from router.frontend.json_body import Body, Integer, Number, wrong_kind
from router.frontend.params import (
    AnswerOptions,
    Prompt,
    TokenPrompt,
    check_request_id,
    check_salt,
    check_speculation,
    needs_exact,
    priority_class,
)
from twostroke.config import SPECULATE_AUTO
from twostroke.errors import InvalidRequest
from twostroke.rpc.channel import call_timeout_s


def check_timeout(timeout_s: float | None, name: str) -> float | None:
    """Returns at most a day; more means a day, too."""
    if timeout_s is not None and timeout_s < 0:
        raise InvalidRequest(f"{name} must be a number of seconds, 0 or more, got {timeout_s}", field=name)
    return None if timeout_s is None else call_timeout_s(timeout_s)


def _salt(value: Any, info: ValidationInfo) -> bytes:
    if not isinstance(value, str):
        raise wrong_kind(info.field_name, value, "a string")
    return check_salt(value)


def _needs_exact(value: Any) -> bool:
    if not isinstance(value, str):
        raise wrong_kind("kv_exactness", value, "a string")
    return needs_exact(value)


def _speculation(value: Any) -> str:
    if not isinstance(value, str):
        raise wrong_kind("speculation", value, "a string")
    return check_speculation(value)


class AnswerRequest(Body):
    """One parsed body. A dialect adds the fields that its replies depend on.

    Clients do not send `prompts` and `options`: the dialect makes them of what they send.
    """

    prompts: Annotated[tuple[Prompt, ...], SkipValidation]
    options: AnswerOptions
    model: str | None = None
    stream: bool = False
    timeout_s: Annotated[Number | None, AfterValidator(lambda seconds: check_timeout(seconds, "timeout"))] = Field(
        default=None, alias="timeout"
    )
    priority: Annotated[Integer, AfterValidator(lambda wanted: priority_class(-wanted))] = 0
    """Class of the request. In a body lower goes first, as in vLLM's and LiteLLM's servers; here, higher does."""
    user: Annotated[str, AfterValidator(lambda user: check_request_id(user, "user"))] = ""
    cache_salt: Annotated[bytes, BeforeValidator(_salt)] = b""
    prompt_cache_key: str | None = None
    needs_exact: Annotated[bool, BeforeValidator(_needs_exact)] = Field(default=False, alias="kv_exactness")
    speculation: Annotated[str, BeforeValidator(_speculation)] = SPECULATE_AUTO

    @property
    def removed_part(self) -> str:
        """What the dialect has taken out of the prompt because it changes with each request, as metrics name it."""
        return ""

    @property
    def has_parts(self) -> bool:
        """Events of its answers have parts: a parser takes their text apart."""
        return any(isinstance(prompt, TokenPrompt) and prompt.parsing is not None for prompt in self.prompts)
