"""The events of a request's output, token by token, and the sinks that take them to the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from router.text.output.parts import Part
from twostroke.request import FinishReason, PromptLogprobs, SampledToken


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class TextEvent(NamedTuple):
    """One token of one choice with the text it adds, or the end of that choice with the text held back until then.

    It is a tuple because one is made for every token.
    """

    choice: int
    """Counted over all prompts: prompt i of n choices each has choices i*n to i*n + n - 1."""
    text: str
    prompt_tokens: int = 0
    """Tokens of this choice's prompt."""
    choice_tokens: int = 0
    """Tokens of this choice so far, this one included."""
    token: SampledToken | None = None
    finish: FinishReason | None = None
    usage: Usage | None = None
    """Usage of the whole request, in its very last event."""
    is_sent: bool = False
    """Whether the client has it (but for the usage): the stream is resumed."""
    parts: tuple[Part, ...] | None = None
    """What a parser made of the text so far, without what earlier events have. None: the request has no parser, and
    all is text."""
    stop_string: str | None = None
    """The client's stop string that has ended the choice, in its last event."""
    cached_tokens: int = 0
    """Tokens of this choice's prompt whose KV was reused, as far as is known."""
    prompt_logprobs: PromptLogprobs | None = None
    """Logprobs of the prompt, in the first event of a choice, where they are wanted."""


class EventCollector(Protocol):
    def add(self, event: TextEvent) -> None: ...


Collector = TypeVar("Collector", bound=EventCollector)


class WholeOutput(Generic[Collector]):
    """A sink that keeps every event in a reply, which is made when all have come."""

    is_ready = True

    def __init__(self, reply: Collector) -> None:
        self.reply = reply
        self.put = reply.add

    def flush(self) -> None: ...

    async def drain(self) -> None: ...


class Sink(Protocol):
    """Takes the events of one output to its client."""

    @property
    def is_ready(self) -> bool:
        """Whether all events so far were sent, and the next ones can be sent at once, by `flush`."""

    def put(self, event: TextEvent) -> None: ...

    def flush(self) -> None:
        """Sends all events that were put, in one write."""

    async def drain(self) -> None:
        """Returns once all events were sent, however slowly the client reads."""
