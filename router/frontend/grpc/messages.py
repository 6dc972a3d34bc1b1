"""The messages of one answer over gRPC: in order, one on its way at a time, without a task for any of them."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import deque
from collections.abc import Coroutine
from typing import Any

from router.frontend.output_share import AT_ONCE
from router.frontend.params import ClientRequest
from router.frontend.request_handler import TextEvent
from router.frontend.resume import SentProgress
from router.frontend.text.tokenizer import Text, token_text
from twostroke.request import SampledToken
from twostroke.rpc.entrance import Context
from twostroke.rpc.v1.inference_pb2 import GenerateResponse, TokenLogprob, Usage


class Messages:
    """gRPC takes one message at a time and says when it has left. A few that come meanwhile wait here.

    The coroutine of a write is run from here up to where it waits, and on from there by the callback of what it waits
    for: a task for each token costs half as much as the write itself.
    """

    def __init__(self, request: ClientRequest, text: Text, context: Context) -> None:
        self._request_id = request.request_id
        self._text = text
        self._context = context
        self._progress = SentProgress(request.point)
        self._unsent: deque[TextEvent | None] = deque()
        """Events that are in no message yet, in order. None is a beat."""
        self._writing: Coroutine[Any, Any, Any] | None = None
        """The write on its way, or the one that has failed."""
        self._failure: BaseException | None = None
        """What a write has raised: nothing more will leave."""
        self._drains: list[asyncio.Future[None]] = []
        self._end: TextEvent | None = None
        self.is_started = False
        self.sent_s = time.monotonic()
        self.turn = asyncio.Lock()

    @property
    def is_ready(self) -> bool:
        return self._failure is None and len(self._unsent) < AT_ONCE

    @property
    def has_end(self) -> bool:
        """The event that ends the stream was put."""
        return self._end is not None

    def put(self, event: TextEvent) -> None:
        if event.is_sent:
            return
        if event.usage is None:
            self._unsent.append(event)
        else:
            self._end = event

    def flush(self) -> None:
        while self._unsent and self._writing is None:
            event = self._unsent.popleft()
            message = GenerateResponse(request_id=self._request_id) if event is None else self._message(event)
            self._writing = self._context.write(message)
            self._advance()

    async def drain(self) -> None:
        self.flush()
        if self._writing is not None and self._failure is None:
            drained = asyncio.get_running_loop().create_future()
            self._drains.append(drained)
            await drained
        if self._failure is not None:
            raise self._failure

    async def beat(self) -> None:
        self._unsent.append(None)
        await self.drain()

    def end(self) -> GenerateResponse:
        """Returns the message that ends the stream, once all others have left."""
        assert self._end is not None, "the stream has no end yet"
        return self._message(self._end)

    def close(self) -> None:
        """Begins no more writes. The one on its way ends with the call."""
        self._unsent.clear()

    def _advance(self) -> None:
        """Runs the write on its way up to where it waits."""
        assert self._writing is not None, "nothing is on its way"
        try:
            waited: asyncio.Future[Any] = self._writing.send(None)
        except StopIteration:
            self._writing, self.is_started, self.sent_s = None, True, time.monotonic()
        except (Exception, asyncio.CancelledError) as error:
            self._failure = error
        else:
            waited.add_done_callback(self._go_on)

    def _go_on(self, _waited: asyncio.Future[Any]) -> None:
        self._advance()
        self.flush()
        if self._drains and (self._writing is None or self._failure is not None):
            drains, self._drains = self._drains, []
            for drained in drains:
                if not drained.done():  # who waited may have been cancelled
                    drained.set_result(None)

    def _message(self, event: TextEvent) -> GenerateResponse:
        name = self._progress.sent_token if event.finish is None else self._progress.finished
        message = GenerateResponse(
            request_id=self._request_id, index=event.choice, text=event.text, resume_token=name(event.choice)
        )
        if event.token is not None:
            message.token_ids.append(event.token.token)
            if event.token.logprob is not None:
                message.logprobs.append(self._logprob(event.token))
        if event.finish is not None:
            message.finish_reason = event.finish.value
        if event.usage is not None:
            message.usage.CopyFrom(Usage(**dataclasses.asdict(event.usage)))
        return message

    def _logprob(self, token: SampledToken) -> TokenLogprob:
        assert token.logprob is not None
        return TokenLogprob(
            token_id=token.token,
            token=token_text(self._text, token.token),
            logprob=token.logprob,
            top=[
                TokenLogprob(token_id=other, token=token_text(self._text, other), logprob=logprob)
                for other, logprob in token.top
            ],
        )
