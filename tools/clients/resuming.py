"""A client with streams that survive routers: where one breaks off or is silent for too long, the next router continues
it.

async with ResumingClient(grpc=["127.0.0.1:50051", "127.0.0.1:50052"]) as client:
    async for message in client.generate(GenerateRequest(text="Once", ...)):
        print(message.text, end="")
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Self, TypeVar

import aiohttp
import grpc
import grpc.aio

from cluster.flags.client_credentials import ClientTls, authorization
from tools.clients.connect import connector, tls_endpoint
from twostroke.base.errors import (
    ContextLengthExceeded,
    DeadlineExceeded,
    Draining,
    InternalError,
    InvalidRequest,
    Overloaded,
    PeerLost,
    ServeError,
)
from twostroke.rpc.channel import PeerChannel, call_timeout_s, error_of
from twostroke.rpc.server import ERROR_KIND_KEY
from twostroke.rpc.v1 import inference_pb2, inference_pb2_grpc

log = logging.getLogger(__name__)

SILENCE_S = 30.0
"""Seconds without a message, longer than a prompt may wait and be computed. Callers may set less."""
PATIENCE_S = 60.0
"""Seconds for which it keeps trying after the last message of any router."""
ROUND_PAUSE_S = 0.1
"""Seconds to wait before all routers are tried again."""

_BROKEN = frozenset(
    {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED}
)
"""Statuses that gRPC itself gives when a process or a connection ends under a call, besides UNAVAILABLE."""

Json = dict[str, Any]
Message = TypeVar("Message")
Heard = AsyncGenerator[tuple[str, Message | None], None]
"""Pairs of a resume token ("" if it has none) and a message (None for a heartbeat)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPatience:
    """How long a client waits for routers, in seconds."""

    silence_s: float = SILENCE_S
    """A router that is silent for this long is left."""
    gap_s: float = PATIENCE_S
    """A stream fails that no router continues for this long."""
    begin_s: float = PATIENCE_S
    """A stream fails that no router begins for this long."""


class ResumingClient:
    """Streams from the routers of one cluster (`grpc`, `http`: HOST:PORT); the last that served is asked first."""

    def __init__(
        self,
        *,
        grpc: Sequence[str] = (),
        http: Sequence[str] = (),
        patience: RouterPatience = RouterPatience(),
        api_key: str = "",
        tls: ClientTls | None = None,
    ) -> None:
        """`tls`: None where the routers' endpoints take no TLS."""
        self._patience = patience
        self._tls = tls
        self._grpc = [PeerChannel(address, "", None if tls is None else tls_endpoint(tls)) for address in grpc]
        self._http = list(http)
        self._shown = authorization(api_key)
        self._preferred = 0
        self._session: aiohttp.ClientSession | None = None
        self.resumptions = 0
        """How often a stream was continued at another router."""

    async def __aenter__(self) -> Self:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._patience.silence_s, sock_read=self._patience.silence_s
        )
        self._session = aiohttp.ClientSession(connector=connector(self._tls), timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()
        for channel in self._grpc:
            await channel.close()

    def generate(
        self, request: inference_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        """Yields every message of the answer, once. Raises ServeError."""
        deadline_s = None if timeout_s is None else time.monotonic() + call_timeout_s(timeout_s)
        return self._over(len(self._grpc), lambda router, token: self._generate(router, request, token, deadline_s))

    def stream(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] = {}) -> AsyncIterator[Json]:
        """Yields every chunk of a POST of `body`, with "stream": true, to an OpenAI endpoint. Raises ServeError."""
        posted = {**body, "stream": True}
        return self._over(len(self._http), lambda router, token: self._post(router, path, posted, headers, token))

    async def _over(self, routers: int, connect: Callable[[int, str], Heard[Message]]) -> AsyncIterator[Message]:
        token, alive_s, first = "", time.monotonic(), self._preferred
        for number in itertools.count():
            router = (first + number) % routers
            try:
                async with contextlib.aclosing(connect(router, token)) as heard:
                    async for after, message in heard:
                        token, alive_s, self._preferred = after or token, time.monotonic(), router
                        if message is not None:
                            yield message
                return
            except ServeError as error:
                may_go_on = isinstance(error, PeerLost | Draining) or (token and isinstance(error, Overloaded))
                is_last = (number + 1) % routers == 0
                is_over = time.monotonic() - alive_s > (self._patience.gap_s if token else self._patience.begin_s)
                if not may_go_on or (is_last and is_over):
                    raise
                log.info("going on elsewhere after=%s error=%s", token or "nothing", error)
                self.resumptions += bool(token)
            if is_last:
                await asyncio.sleep(ROUND_PAUSE_S)

    async def _generate(
        self, router: int, request: inference_pb2.GenerateRequest, token: str, deadline_s: float | None
    ) -> Heard[inference_pb2.GenerateResponse]:
        channel = self._grpc[router]
        asked = inference_pb2.GenerateRequest()
        asked.CopyFrom(request)
        asked.resume_from = token
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded("the time for the answer is over")
        call = inference_pb2_grpc.InferenceStub(channel.channel).Generate(
            asked, timeout=left_s, metadata=tuple(self._shown.items())
        )
        try:
            while True:
                async with asyncio.timeout(self._patience.silence_s):
                    message = await call.read()
                if not isinstance(message, inference_pb2.GenerateResponse):
                    return
                yield message.resume_token, message if message.resume_token else None
        except TimeoutError:
            raise PeerLost(f"{channel.address} has said nothing for {self._patience.silence_s:g} s") from None
        except grpc.aio.AioRpcError as error:
            named = any(key == ERROR_KIND_KEY for key, _ in error.trailing_metadata() or ())
            if error.code() in _BROKEN and not named:
                raise PeerLost(f"{channel.address}: {error.details()}") from error
            raise error_of(error, channel.address) from error
        finally:
            call.cancel()

    async def _post(
        self, router: int, path: str, body: Mapping[str, Any], headers: Mapping[str, str], token: str
    ) -> Heard[Json]:
        assert self._session is not None, "used outside of its `async with`"
        address = self._http[router]
        resuming = {"X-Resumable-Stream": "true", **({"Last-Event-ID": token} if token else {})}
        try:
            async with self._session.post(
                f"{'http' if self._tls is None else 'https'}://{address}{path}",
                json=body,
                headers={**self._shown, **headers, **resuming},
            ) as got:
                if got.status != HTTPStatus.OK:
                    raise _refusal(got.status, await got.json())
                after = ""
                async for line in got.content:
                    field, _, value = line.decode().rstrip("\r\n").partition(":")
                    value = value.removeprefix(" ")
                    if field == "id":
                        after = value
                    elif field == "data" and value == "[DONE]":
                        return
                    elif field == "data":
                        yield after, _chunk(value)
                    else:
                        yield "", None
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise PeerLost(f"{address}: {type(error).__name__}: {error}") from error
        raise PeerLost(f"{address}: the stream broke off")


def _chunk(data: str) -> Json:
    chunk: Json = json.loads(data)
    if "error" in chunk:
        raise _refusal(0, chunk)
    return chunk


def _refusal(status: int, body: Json) -> ServeError:
    """Converts an error in OpenAI's format."""
    error = body.get("error", {})
    message, code = str(error.get("message")), error.get("code")
    if status == HTTPStatus.SERVICE_UNAVAILABLE or code in ("draining", "peer_lost", "transfer_failed"):
        return PeerLost(message)
    if status == HTTPStatus.TOO_MANY_REQUESTS or code == "overloaded":
        return Overloaded(message)
    if code == "context_length_exceeded":
        return ContextLengthExceeded(message)
    if code == "deadline_exceeded":
        return DeadlineExceeded(message)
    kind = InvalidRequest if error.get("type") == "invalid_request_error" else InternalError
    return kind(message, field=error.get("param"))
