"""The tokens of one attempt. A link feeds them, and the owner of the request reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, Protocol

from twostroke.base.errors import PeerLost, ServeError
from twostroke.base.ids import Epoch, RequestId, WorkerId
from twostroke.request import FinishReason, PromptLogprobs, SampledToken, plain_token
from twostroke.rpc.convert import error_from_message, prompt_logprobs_from_message, token_from_message
from twostroke.rpc.v1 import worker_pb2


class StreamLink(Protocol):
    """The connection that feeds a stream."""

    worker_id: WorkerId
    epoch: Epoch
    lost: PeerLost | None
    is_over: bool

    @property
    def fingerprint(self) -> str: ...

    def forget(self, stream: TokenStream) -> None: ...

    async def close(self, stream: TokenStream) -> bool: ...


class TokenDelta(NamedTuple):
    """New tokens of one choice, and its end if it has ended. A tuple is fast to make: each token needs one."""

    position: int
    """Position of the first token in the choice's output."""
    tokens: tuple[SampledToken, ...]
    finish: FinishReason | None = None
    cached_tokens: int = 0
    """Prompt tokens whose KV was found cached."""
    lifetime: Mapping[str, float] = MappingProxyType({})
    """Instants that the worker has marked."""
    prompt_logprobs: PromptLogprobs | None = None
    """Logprobs of the prompt, with the first token, if the client wants them."""
    proposals: Mapping[str, tuple[int, int]] = MappingProxyType({})
    """Drafted and accepted tokens of the whole attempt by drafter, with its end."""
    is_recovered: bool = False
    """Whether the tokens are of an attempt of another router, from which the client has resumed its stream."""


class TokenStream:
    """The tokens of one attempt, in order, without gaps and duplicates."""

    def __init__(self, link: StreamLink, request_id: RequestId, attempt: int, next_position: int) -> None:
        self.link = link
        self.request_id = request_id
        self.attempt = attempt
        self.next_position = next_position
        """Position of the first token that has not arrived."""
        self.number = 0
        """The number that the worker has given the stream on the present connection; 0: none."""
        self.is_complete = False
        """Whether the worker has ended the attempt, so that it needs no Close."""
        self._deltas: list[TokenDelta] = []
        """Deltas that arrived before `read`."""
        self._take: Callable[[TokenDelta], None] = self._deltas.append
        """Called with each delta that arrives."""
        self._finish: FinishReason | None = None
        self._error: Exception | None = None
        self._ended = asyncio.Event()

    def feed(self, entry: worker_pb2.TokenEntry) -> bool:
        """Takes an entry. Returns False, and takes nothing, if tokens before it are missing."""
        if self.is_complete or self._error is not None:
            return True
        if entry.finish_reason == FinishReason.ERROR:
            self.end(error_from_message(entry.error))
            return True
        if entry.position > self.next_position:
            return False
        fresh = entry.tokens[self.next_position - entry.position :]
        finish = FinishReason(entry.finish_reason) if entry.finish_reason else None
        if not fresh and finish is None:
            return True
        tokens = tuple(map(token_from_message, fresh))
        scores = None
        if self.next_position == 0 and entry.HasField("prompt_logprobs"):
            scores = prompt_logprobs_from_message(entry.prompt_logprobs)
        lifetime = dict(entry.lifetime)
        counted = () if finish is None else entry.drafts.items()
        proposals = {drafter: (counts.drafted, counts.kept) for drafter, counts in counted}
        delta = TokenDelta(self.next_position, tokens, finish, entry.cached_tokens, lifetime, scores, proposals)
        self.next_position += len(tokens)
        self.is_complete = finish is not None
        self._deliver(delta)
        return True

    def feed_token(self, position: int, token: int) -> bool:
        """Takes a token without logprobs. Returns False, and takes nothing, if tokens before it are missing."""
        if self.is_complete or self._error is not None:
            return True
        if position == self.next_position:
            self.next_position = position + 1
            try:
                self._take(TokenDelta(position, (plain_token(token),)))
            except Exception as error:
                self._give_up(error)
        return position < self.next_position

    def end(self, error: ServeError) -> None:
        """Ends the stream with an error of the worker."""
        self.is_complete = True
        self.fail(error)

    def fail(self, error: ServeError) -> None:
        """Ends the stream with an error, after the deltas that have arrived."""
        self._error = self._error or error
        self._ended.set()

    async def read(self, take: Callable[[TokenDelta], None]) -> FinishReason:
        """Calls `take` with each delta as soon as it arrives. Returns the finish reason.

        Raises the error that ended the stream, or that `take` has raised.
        """
        self._take = take
        try:
            for delta in self._deltas:
                self._deliver(delta)
            self._deltas.clear()
            await self._ended.wait()
        finally:
            self._take = _ignore  # the reader refers to this stream, which would be a reference cycle
        if self._finish is None:
            assert self._error is not None
            raise self._error
        return self._finish

    def _deliver(self, delta: TokenDelta) -> None:
        try:
            self._take(delta)
        except Exception as error:
            self._give_up(error)
        if delta.finish is not None and self._take is not _ignore:
            self._finish = delta.finish
            self._ended.set()

    def _give_up(self, error: Exception) -> None:
        """Ends the stream because its reader failed. The link and its other streams go on."""
        self._error, self._take, self._finish = error, _ignore, None
        self._ended.set()


def _ignore(_: TokenDelta) -> None:
    """Drops what arrives for a stream without a reader."""
