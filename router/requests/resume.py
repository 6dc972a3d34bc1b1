"""Resume tokens: up to where a client has a stream, sent with every message (SSE `id`, gRPC `resume_token`).

Over HTTP only clients that ask for it get them: stock clients stumble over `id:` lines and comments. A token is
`stream:resumptions:weights:choices:mark`. The stream's name is the client's request id, a random part, and a mark where
it belongs to a tenant's key. `weights` tells which weights have computed what was sent: others cannot continue with it.
Each choice is the number of tokens sent, with an `e` where its end was sent, too. `-` stands for a choice without any
message, and `17x3` for three equal ones in a row. `end` instead of the choices says that there is nothing left to send.
The mark is of all before it, so that no client can say anything else than it was told.
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
"""Random bytes of a stream's name: a client that knows it, and the prompt, may read the output."""
MOST_CHARS = 16 << 10
"""Characters of a token. A thousand choices that advance together take few; in disorder, five each."""
MARK_BYTES = 8
MOST_NAME_CHARS = 256 + 1 + 2 * RANDOM_BYTES + 1 + 2 * MARK_BYTES
"""Characters of a stream's name; a request id may have 256."""
MOST_TOKENS = 1 << 32
BLOCK_CHOICES = 32
"""Choices whose part of a token is written anew when one of them advances: about the root of the largest number."""
PULSE_S = 1.0
"""Longest silence towards a client whose stream recovers: without a sign it would leave."""

_END = "end"
_RUN = re.compile(r"(-|\d{1,10})(e?)(?:x(\d{1,6}))?")
_TOKEN = "\n"
"""Begins what a token's mark is made of. No name of a stream begins with it, so that no name's mark is a token's."""


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
        mark, and for one that was not sent as it is."""
        signed, _, token_mark = token[: MOST_CHARS + 1].rpartition(":")
        name, resumed, weights, progress = [*signed.split(":", 3), "", "", ""][:4]
        stream = unquote(name)
        client, _, rest_of_name = stream.rpartition("~")
        drawn = rest_of_name.partition(".")[0]
        is_marked = hmac.compare_digest(stream.encode(), _marked(f"{client}~{drawn}", mark).encode())
        is_short = len(token) <= MOST_CHARS and len(stream) <= MOST_NAME_CHARS
        is_marked &= hmac.compare_digest(token_mark.encode(), mark(_TOKEN + signed).encode())
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
    """Keeps what has been sent. A message costs the writing of one block of choices, however many there are."""

    def __init__(self, point: StreamPoint) -> None:
        self._begins = f"{quote(point.stream, safe='~')}:{point.resumptions}:"
        self._weights, self._mark = point.weights, point.mark
        self._tokens = [sent.tokens or 0 for sent in point.sent]
        self._sent = [_one(sent) for sent in point.sent]
        self._blocks = [self._block(first) for first in range(0, len(point.sent), BLOCK_CHOICES)]

    def opened(self, choice: int) -> str:
        """Returns the token of the choice's opening, as the others do of their messages."""
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
        return f"{signed}:{self._mark(_TOKEN + signed)}"

    def _block(self, first: int) -> str:
        if len(self._sent) == 1:
            return self._sent[0]
        runs = (
            (sent, len(list(alike))) for sent, alike in itertools.groupby(self._sent[first : first + BLOCK_CHOICES])
        )
        return ",".join(sent if count == 1 else f"{sent}x{count}" for sent, count in runs)


class Untold:
    """Stands for the progress where the client has not asked for tokens: all are empty."""

    def opened(self, choice: int) -> str:
        return ""

    sent_token = finished = opened

    def ended(self) -> str:
        return ""


Progress = SentProgress | Untold


class PulsedStream(Protocol):
    """A stream to a client that must not be silent for long."""

    turn: asyncio.Lock
    """Held while a message or a beat is sent."""
    sent_s: float
    """Instant at which the client was last sent anything."""

    async def beat(self) -> None:
        """Sends a sign of life. The caller has the turn."""


async def with_pulse(work: Awaitable[None], stream: PulsedStream, may_beat: Callable[[], bool]) -> None:
    """Waits for `work`, and beats where it sends nothing for `PULSE_S`, so that the client does not leave.

    `may_beat` is false where nothing has begun, and where the router hears no worker: it may be the one that is cut
    off, and another router may serve.
    """
    beating = asyncio.create_task(_keep_beating(stream, may_beat))
    try:
        await work
    except asyncio.CancelledError:
        beating.cancel()
        raise
    finally:
        async with stream.turn:  # never in the middle of a beat: what is sent next would run into it
            beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)  # what it met, the next message meets too


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
    """Seeds for requests that bring none.

    Every router of a cluster derives the same seed from a stream's name, so that any can compute the same output again.
    With a seed of the operator's, equal request ids have equal seeds.
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
    """Returns the name of the stream, which only its client knows. It returns anything for what is not a token."""
    return unquote(token[:MOST_CHARS].partition(":")[0])


def _marked(name: str, mark: Mark) -> str:
    owner = mark(name)
    return f"{name}.{owner}" if owner else name


def _one(sent: Sent) -> str:
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
