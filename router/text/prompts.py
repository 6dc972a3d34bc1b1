"""What an answer continues: a text, token ids or the messages of a chat, as a client gives them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.text.cache_hints import MessageHint, TokenHint
from router.text.output.framing import ToolUse
from router.text.output.parsing import Parsing
from twostroke.base.errors import InvalidRequest

MAX_MESSAGES = 4096
"""Most messages of a chat: all requests wait while a template is rendered."""
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
"""Roles that a message of a chat may have. Templates silently drop others, or let them speak as any role."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    split_special_tokens: bool = False
    """Whether special tokens written in `text` are ordinary text, as under this name in transformers."""
    keep_s: float | None = None
    """Seconds to keep its blocks in the cache. None: as usual."""
    add_special_tokens: bool = True
    """Whether the tokens begin with those that the tokenizer puts before a text, such as a begin-of-sequence token."""
    suffix: str = ""
    """What follows the answer: the model fills in what is between."""
    is_echoed: bool = False
    """Whether the answer begins with the prompt's text."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    ids: Sequence[int]
    is_chat: bool = False
    """Whether the ids are those of rendered messages."""
    hints: tuple[TokenHint, ...] = ()
    parsing: Parsing | None = None
    """How its answers are parsed into reasoning, calls and text. None: they are text."""
    is_echoed: bool = False
    """Whether the answer begins with the prompt's text."""
    text: str = ""
    """The prompt's text, where it is echoed and has been prepared."""


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
    """How the tools may be called. None: calls in the answer are text."""
    hints: tuple[MessageHint, ...] = ()
    template: str = ""
    """Name of the chat template. Empty: the one for tools where there are some, or the default."""

    def __post_init__(self) -> None:
        if not 1 <= len(self.messages) <= MAX_MESSAGES:
            problem = f"have at most {MAX_MESSAGES}, got {len(self.messages)}" if self.messages else "not be empty"
            raise InvalidRequest(f"messages must {problem}", field="messages")
        if self.continue_final_message and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other", field="continue_final_message"
            )


def diverging_chat(chat: ChatPrompt, messages: int) -> ChatPrompt:
    """Returns a chat that begins with the same messages and differs from `chat` in the next one, or has one more.

    A template may render a message differently by the message after it. Some templates render no single message. So the
    tokens that two such chats share are the tokens that all chats share which begin with these messages.
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


def check_role(role: Any, name: str) -> str:
    if isinstance(role, str) and role in ROLES:
        return role
    text = repr(role[:40]) if isinstance(role, str) else type(role).__name__
    raise InvalidRequest(f"{name} must be one of {', '.join(sorted(ROLES))}, got {text}", field=name)


def prompt_field(prompt: Prompt) -> str:
    """Returns the field of a body in which clients send such a prompt."""
    is_chat = isinstance(prompt, ChatPrompt) or (isinstance(prompt, TokenPrompt) and prompt.is_chat)
    return "messages" if is_chat else "prompt"


class PublicPrefixes:
    """The public prefixes. Blocks of a prompt that lie within its common beginning with one of them are public, too."""

    def __init__(self, prefixes: Iterable[Sequence[int]] = ()) -> None:
        self._prefixes = tuple(tuple(prefix) for prefix in prefixes)

    def blocks_of(self, prompt: Sequence[int], block_size: int) -> int:
        return max((common_length(prompt, prefix) for prefix in self._prefixes), default=0) // block_size


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Counts the tokens that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, yours) in pairs if mine != yours), min(len(one), len(other)))
