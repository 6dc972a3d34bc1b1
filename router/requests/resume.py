"""Resume tokens. Every message of a stream has one (SSE `id`, gRPC `resume_token`): how much the client has up to it.

Over HTTP, only clients that ask for tokens get them, because stock clients fail at `id:` lines and comments. A token is
`stream:resumptions:weights:choices:mark`.

stream       name of the stream: the client's request id, a random part, and a mark if it belongs to a tenant's key
resumptions  how often the stream was resumed
weights      the weights that computed what was sent; the answer cannot continue with others
choices      tokens sent of each choice, then `e` if its end was sent; `-` for no message, `17x3` for three equal
             choices in a row; `end` in place of all choices if nothing is left to send
mark         a keyed hash of all that is before it, so that a client cannot change the token; empty without a tenant
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import itertools
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import quote, unquote

from router.auth.auth import Mark, unmarked
from router.serving.parent_request import MOST_RESUMPTIONS, AnswerWeights
from twostroke.base.errors import InvalidRequest

RANDOM_BYTES = 8
"""Random bytes of a stream's name. A client that knows the name and the prompt can read the output."""
MOST_CHARS = 16 << 10
"""Most characters of a token. A choice takes about five, and many choices with equal counts take no more."""
MARK_BYTES = 8
MOST_NAME_CHARS = 256 + 1 + 2 * RANDOM_BYTES + 1 + 2 * MARK_BYTES
"""Most characters of a stream's name. A request id may have 256."""
MOST_TOKENS = 1 << 32
BLOCK_CHOICES = 32
"""Choices of a block of a token. If one of them advances, the text of the block is made again and joined with the other
blocks. Both are cheap at about the square root of the most choices."""
PULSE_S = 1.0
"""Seconds without a message after which a client gets a keep-alive message: it might give up during a recovery."""

_END = "end"
_RUN = re.compile(r"(-|\d{1,10})(e?)(?:x(\d{1,6}))?")
_TOKEN_PREFIX = "\n"
"""Prefix of what a token's mark signs. No stream's name begins with it, so the mark of a name is no mark of a token."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What a client has of one choice."""

    tokens: int | None = None
    """Tokens that the client has; None: not even the opening (in a chat, the chunk with the role)."""
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class StreamPoint:
    stream: str
    resumptions: int
    sent: tuple[Sent, ...]
    """What was sent of every choice of every prompt."""
    is_complete: bool = False
    weights: AnswerWeights = field(default_factory=AnswerWeights, compare=False)
    """Weights that compute the answer, once it is known which."""
    mark: Mark = field(default=unmarked, compare=False, repr=False)

    @classmethod
    def begin(cls, request_id: str, choices: int, mark: Mark = unmarked) -> StreamPoint:
        name = f"{request_id}~{secrets.token_hex(RANDOM_BYTES)}"
        return cls(_marked(name, mark), 0, (Sent(),) * choices, mark=mark)

    @classmethod
    def after(cls, token: str, choices: int, field: str, mark: Mark = unmarked) -> StreamPoint:
        """Returns the point after a token. Raises InvalidRequest, naming `field`, for a token of another request or
        tenant, and for one that no router has sent.
        """
        signed, _, token_mark = token[: MOST_CHARS + 1].rpartition(":")
        name, resumed, weights, progress = [*signed.split(":", 3), "", "", ""][:4]
        stream = unquote(name)
        client, _, rest_of_name = stream.rpartition("~")
        drawn = rest_of_name.partition(".")[0]
        is_marked = hmac.compare_digest(stream.encode(), _marked(f"{client}~{drawn}", mark).encode())
        is_short = len(token) <= MOST_CHARS and len(stream) <= MOST_NAME_CHARS
        is_marked &= hmac.compare_digest(token_mark.encode(), mark(_TOKEN_PREFIX + signed).encode())
        is_token = is_short and is_marked and resumed.isdecimal() and len(drawn) == 2 * RANDOM_BYTES
        if not (is_token and client and client.isprintable()) or len(resumed) > 4 or int(resumed) >= MOST_RESUMPTIONS:
            raise _no_token(token, field)
        is_complete = progress == _END
        sent = (Sent(0, is_finished=True),) * choices if is_complete else _parse_runs(progress, choices, token, field)
        return cls(stream, int(resumed) + 1, sent, is_complete, AnswerWeights(weights), mark)

    @property
    def request_id(self) -> str:
        """The id that the client knows."""
        return self.stream.rpartition("~")[0]


class SentProgress:
    """Keeps what has been sent. Each method but `ended` notes a message of a choice; all return the message's token.

    Only one block of choices is written again for a message, however many choices there are.
    """

    def __init__(self, point: StreamPoint) -> None:
        self._begins = f"{quote(point.stream, safe='~')}:{point.resumptions}:"
        self._weights, self._mark = point.weights, point.mark
        self._tokens = [sent.tokens or 0 for sent in point.sent]
        self._sent = [_written(sent) for sent in point.sent]
        self._blocks = [self._block(first) for first in range(0, len(point.sent), BLOCK_CHOICES)]

    def opened(self, choice: int) -> str:
        """Notes the opening of a choice: in a chat, the chunk with the role."""
        return self._token(choice, "0")

    def sent_token(self, choice: int) -> str:
        self._tokens[choice] += 1
        return self._token(choice, str(self._tokens[choice]))

    def finished(self, choice: int) -> str:
        return self._token(choice, f"{self._tokens[choice]}e")

    def ended(self) -> str:
        return self._marked(_END)

    def _token(self, choice: int, sent: str) -> str:
        self._sent[choice] = sent
        index = choice // BLOCK_CHOICES
        self._blocks[index] = self._block(index * BLOCK_CHOICES)
        return self._marked(",".join(self._blocks))

    def _marked(self, progress: str) -> str:
        signed = f"{self._begins}{self._weights.mark}:{progress}"
        return f"{signed}:{self._mark(_TOKEN_PREFIX + signed)}"

    def _block(self, first: int) -> str:
        if len(self._sent) == 1:
            return self._sent[0]
        runs = (
            (sent, len(list(alike))) for sent, alike in itertools.groupby(self._sent[first : first + BLOCK_CHOICES])
        )
        return ",".join(sent if count == 1 else f"{sent}x{count}" for sent, count in runs)


class NoResumeTokens:
    """Takes the place of `SentProgress` for clients that do not ask for tokens: all are empty."""

    def opened(self, choice: int) -> str:
        return ""

    sent_token = finished = opened

    def ended(self) -> str:
        return ""


Progress = SentProgress | NoResumeTokens


class PulsedStream(Protocol):
    """A stream to a client that must not be silent for long."""

    turn: asyncio.Lock
    """Held while a message or a beat is sent."""
    sent_s: float
    """Instant at which the client was last sent anything."""

    async def beat(self) -> None:
        """Sends a keep-alive message. The caller holds `turn`."""


async def with_pulse(work: Awaitable[None], stream: PulsedStream, may_beat: Callable[[], bool]) -> None:
    """Waits for `work`, and sends a keep-alive message after each `PULSE_S` of silence, so that the client stays.

    `may_beat` is false before the stream has begun, and while the router hears no decode worker. Then this router may
    be cut off, and the client is to try another one.
    """
    beating = asyncio.create_task(_keep_beating(stream, may_beat))
    try:
        await work
    except asyncio.CancelledError:
        beating.cancel()
        raise
    finally:
        async with stream.turn:  # not while it is sent: the next message would get into it
            beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)  # the next message raises its error, too


async def _keep_beating(stream: PulsedStream, may_beat: Callable[[], bool]) -> None:
    while True:
        left_s = stream.sent_s + PULSE_S - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)
            continue
        async with stream.turn:
            stream.sent_s = time.monotonic()
            if may_beat():
                await stream.beat()


class Seeds:
    """Seeds for requests without one.

    Every router of a cluster derives the same seed from a stream's name, so that any can compute the same output again.
    If the operator has set a seed, equal request ids have equal seeds.
    """

    def __init__(self, cluster_token: str = "", seed: int | None = None) -> None:
        secret = cluster_token if seed is None else f"seed {seed}"
        self._key = hashlib.blake2b(secret.encode(), person=b"stream seeds").digest()
        self._is_by_request = seed is not None

    def seed_of(self, point: StreamPoint, prompt: int) -> int:
        name = point.request_id if self._is_by_request else point.stream
        drawn = hashlib.blake2b(f"{prompt} {name}".encode(), key=self._key, digest_size=8).digest()
        return int.from_bytes(drawn, "little")


def stream_of(token: str) -> str:
    """Returns the name of a token's stream, which only its client knows. The token is not checked."""
    return unquote(token[:MOST_CHARS].partition(":")[0])


def _marked(name: str, mark: Mark) -> str:
    owner = mark(name)
    return f"{name}.{owner}" if owner else name


def _written(sent: Sent) -> str:
    return "-" if sent.tokens is None else f"{sent.tokens}{'e' if sent.is_finished else ''}"


def _parse_runs(runs: str, choices: int, token: str, field: str) -> tuple[Sent, ...]:
    sent: list[Sent] = []
    for run in runs.split(","):
        matched = _RUN.fullmatch(run)
        if matched is None:
            raise _no_token(token, field)
        tokens, end, count = matched[1], bool(matched[2]), int(matched[3] or 1)
        if (tokens == "-" and end) or (tokens != "-" and int(tokens) >= MOST_TOKENS) or len(sent) + count > choices:
            raise _no_token(token, field)
        sent += [Sent(None if tokens == "-" else int(tokens), end)] * count
    if len(sent) != choices:
        raise _no_token(token, field)
    return tuple(sent)


def _no_token(token: str, field: str) -> InvalidRequest:
    return InvalidRequest(
        f"{field} must be what came with the last message of a stream that answers this request, got {token[:80]!r}",
        field=field,
    )
