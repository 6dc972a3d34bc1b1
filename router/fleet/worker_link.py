"""The router's connection to one epoch of one decode worker, for all of its requests and their tokens.

If only the shared token stream breaks, the link asks the same epoch to continue every open request from its next
position. The link is lost if that epoch is dead (see `liveness`), if another epoch answers at its address, or if it had
no token stream for as long as silence is tolerated. Then every open request fails as PeerLost, and its owner opens it
at another worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc.aio
from google.protobuf.message import Message

from router.fleet.liveness import FailureDetector, Signal
from router.fleet.token_stream import TokenStream
from router.fleet.worker import Worker
from router.metrics import RouterMetrics
from twostroke.base.errors import Cancelled, NotFound, PeerLost, ServeError
from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import RequestId
from twostroke.rpc.channel import PeerChannel, call_timeout_s, error_of, is_refusal
from twostroke.rpc.membership import Membership
from twostroke.rpc.server import ERROR_KIND_KEY
from twostroke.rpc.v1 import control_pb2, worker_pb2
from twostroke.rpc.v1.control_pb2_grpc import ControlStub
from twostroke.rpc.v1.worker_pb2_grpc import DecodeStub, PagesStub

log = logging.getLogger(__name__)

Response = TypeVar("Response")

OPEN_TIMEOUT_S = 10.0
"""Deadline of Open, in seconds. Open only queues a request, so a worker that needs longer counts as lost."""
CLOSE_TIMEOUT_S = 2.0
"""Deadline of Close, in seconds. Without a Close, the worker drops the request after its grace period."""
REACH_TIMEOUT_S = 1.0
"""Deadline of one attempt to reach the worker, in seconds."""
DELIVERY_S = 0.002
"""Seconds of one turn of the event loop for a step's tokens: those of a thousand choices come together."""
REACH_PAUSE_S = 0.15
"""Seconds between attempts: longer than the channel's first backoff, so that each attempt really connects."""
RESTREAM_PAUSE_S = 0.02
"""Seconds after a token stream has ended: a worker that always ends it must not keep the router busy."""

_LINK_TROUBLE = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.ABORTED,
    }
)
"""Status codes of gRPC itself when a connection or a process ends during a call."""


class WorkerLink:
    def __init__(
        self,
        worker: Worker,
        router_id: str,
        membership: Membership,
        metrics: RouterMetrics,
        detector: FailureDetector,
    ) -> None:
        self._worker = worker
        self._detector = detector
        self.worker_id = worker.worker_id
        self.epoch = worker.epoch
        self.lost: PeerLost | None = None
        self.is_over = False
        """Whether the epoch has ended. Otherwise a new link may reach it, even if this one is lost."""
        self._router_id = router_id
        self._metrics = metrics
        self._channel = PeerChannel(worker.address, membership)
        self._decode = DecodeStub(self._channel.channel)
        self._streams: dict[tuple[RequestId, int], TokenStream] = {}
        self._numbered: dict[int, TokenStream] = {}
        """Streams by the numbers that the worker has given them on the present connection."""
        self._opening: set[tuple[RequestId, int]] = set()
        self._repairing: set[tuple[RequestId, int]] = set()
        """Streams for which an Attach on the present connection is under way."""
        self._connections = 0
        """Number of token streams that have begun."""
        self._up = asyncio.Event()
        self._down_since_s = detector.awake_s

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the worker. Empty: not known yet."""
        return self._worker.fingerprint

    async def run(self) -> None:
        """Keeps the token stream open until the link is lost or this is cancelled. Then open requests fail."""
        patience_s = self._detector.patience.dead_after_s
        try:
            async with asyncio.TaskGroup() as tasks:
                while self.lost is None:
                    if await self._reach():
                        await self._stream(tasks)
                        await asyncio.sleep(RESTREAM_PAUSE_S)
                    else:
                        await asyncio.sleep(REACH_PAUSE_S)
                    if not self._up.is_set() and self._detector.awake_s - self._down_since_s >= patience_s:
                        self.lose(f"it has had no token stream for {patience_s:g} s")
        finally:
            self.lose("link closed")
            await self._channel.close()

    def lose(self, reason: str) -> None:
        """Marks the link as lost, and fails every open request."""
        if self.lost is not None:
            return
        self.lost = PeerLost(f"decode worker {self.worker_id} (epoch {self.epoch}) is lost: {reason}")
        log.warning(
            "link lost worker=%s epoch=%s open=%d reason=%s", self.worker_id, self.epoch, len(self._streams), reason
        )
        self._up.set()
        for stream in self._streams.values():
            stream.fail(self.lost)

    async def open(self, message: worker_pb2.OpenRequest, stream: TokenStream) -> None:
        """Opens a request at the worker. Its tokens go to `stream`. If this raises, call `forget`."""
        async with self._beginning(stream):
            await self._call(self._decode.Open, message, OPEN_TIMEOUT_S)

    async def find(self, stream: str) -> list[worker_pb2.RequestSnapshot]:
        """Returns the worker's attempts of a client's stream, whichever router began them."""
        found = await self._call(self._decode.Find, worker_pb2.FindRequest(stream=stream), REACH_TIMEOUT_S)
        return list(found.requests)

    async def reattach(self, stream: TokenStream, had_attempt: int, deadline_s: float | None) -> None:
        """Takes over attempt `had_attempt` of another router, under a new number. If this raises, call `forget`."""
        async with self._beginning(stream):
            await self._attach(stream, had_attempt, deadline_s)

    def forget(self, stream: TokenStream) -> None:
        """Delivers no more tokens to the stream. The caller decides whether it needs a Close."""
        self._streams.pop((stream.request_id, stream.attempt), None)
        self._unnumber(stream)

    async def close(self, stream: TokenStream) -> bool:
        """Calls Close at the worker: the attempt is not wanted any more. Returns whether this need not be tried again.

        A link or a call that failed is tried again. A worker that refuses would refuse again.
        """
        if self.lost is not None:
            return False
        reach(Point.ROUTER_CLOSING)
        request = worker_pb2.CloseRequest(request_id=stream.request_id, attempt=stream.attempt)
        try:
            await self._call(self._decode.Close, request, CLOSE_TIMEOUT_S)
        except ServeError as error:
            log.warning("close failed request=%s worker=%s error=%s", stream.request_id, self.worker_id, error.label())
            return not error.retryable
        return True

    async def fetch(self, message: worker_pb2.FetchRequest) -> int:
        """Has the worker pull blocks into its cache. Returns how many of them it has afterwards."""
        fetch, timeout_s = PagesStub(self._channel.channel).Fetch, call_timeout_s(message.within_s + REACH_TIMEOUT_S)
        return (await self._call(fetch, message, timeout_s)).blocks

    @contextlib.asynccontextmanager
    async def _beginning(self, stream: TokenStream) -> AsyncIterator[None]:
        """Registers a stream that the block opens. If the connection broke meanwhile, attaches the stream again."""
        await self._until_up()
        key = (stream.request_id, stream.attempt)
        connection = self._connections
        self._streams[key] = stream
        self._opening.add(key)
        try:
            yield
        finally:
            self._opening.discard(key)
        if connection != self._connections:
            await self._attach(stream)

    async def _until_up(self) -> None:
        if not self._up.is_set():
            try:
                async with asyncio.timeout(OPEN_TIMEOUT_S):
                    await self._up.wait()
            except TimeoutError:
                problem = f"decode worker {self.worker_id} began no token stream within {OPEN_TIMEOUT_S} s"
                raise PeerLost(problem) from None
        if self.lost is not None:
            raise self.lost

    async def _reach(self) -> bool:
        """Returns whether the expected epoch has answered. If another one or an error did, the link is lost."""
        control = ControlStub(self._channel.channel)
        try:
            info = await self._call(control.GetServerInfo, control_pb2.GetServerInfoRequest(), REACH_TIMEOUT_S)
        except PeerLost as error:
            log.warning("worker not reached worker=%s epoch=%s error=%s", self.worker_id, self.epoch, error)
            if is_refusal(error):
                self._detector.refused(self._worker)
            return False
        except ServeError as error:
            self.lose(f"{type(error).__name__}: {error}")
            return False
        if info.epoch != str(self.epoch):
            self._metrics.stale_epochs_refused_total.inc()
            self.lose(f"{self._channel.address} is now epoch {info.epoch}")
            return False
        return True

    async def _stream(self, tasks: asyncio.TaskGroup) -> None:
        """Reads one connection of the token stream until it breaks."""
        call = self._decode.Tokens(worker_pb2.TokensRequest(router_id=self._router_id), metadata=self._channel.metadata)
        self._repairing.clear()
        try:
            async with asyncio.timeout(REACH_TIMEOUT_S) as limit:
                batch = await call.read()
                limit.reschedule(None)
                if isinstance(batch, worker_pb2.TokenBatch):
                    self._begin_connection(tasks)
                while isinstance(batch, worker_pb2.TokenBatch):
                    await self._deliver(batch, tasks)
                    batch = await call.read()
            log.warning("token stream ended worker=%s epoch=%s", self.worker_id, self.epoch)
        except TimeoutError:
            log.warning("no token stream begun worker=%s epoch=%s", self.worker_id, self.epoch)
        except grpc.aio.AioRpcError as error:
            log.warning("token stream broken worker=%s epoch=%s error=%s", self.worker_id, self.epoch, error.details())
        finally:
            call.cancel()
            if self.lost is None and self._up.is_set():
                self._up.clear()
                self._down_since_s = self._detector.awake_s

    def _begin_connection(self, tasks: asyncio.TaskGroup) -> None:
        """Attaches open requests. The worker's first (empty) batch shows that no Attach can overtake the stream."""
        self._connections += 1
        self._numbered.clear()
        for key, stream in self._streams.items():
            if key not in self._opening:
                self._repair(stream, tasks)
        self._up.set()

    async def _deliver(self, batch: worker_pb2.TokenBatch, tasks: asyncio.TaskGroup) -> None:
        self._detector.heard(self._worker, Signal.TOKENS)
        until_s = time.perf_counter() + DELIVERY_S
        for entry in batch.entries:
            if time.perf_counter() > until_s:
                await asyncio.sleep(0)
                until_s = time.perf_counter() + DELIVERY_S
            stream = self._streams.get((RequestId(entry.request_id), entry.attempt))
            if stream is None:
                self._metrics.stale_tokens_total.inc()
                continue
            self._number(stream, entry.number)
            if not stream.feed(entry):
                self._repair(stream, tasks)
        for number, position, token in zip(batch.numbers, batch.positions, batch.tokens, strict=False):
            if time.perf_counter() > until_s:
                await asyncio.sleep(0)
                until_s = time.perf_counter() + DELIVERY_S
            stream = self._numbered.get(number)
            if stream is None:
                self._metrics.stale_tokens_total.inc()
            elif not stream.feed_token(position, token):
                self._repair(stream, tasks)

    def _number(self, stream: TokenStream, number: int) -> None:
        """Notes the number that the worker has given a stream. 0: none."""
        if number and number != stream.number:
            self._unnumber(stream)
            stream.number = number
        if number:
            self._numbered[number] = stream

    def _unnumber(self, stream: TokenStream) -> None:
        if self._numbered.get(stream.number) is stream:
            del self._numbered[stream.number]

    def _repair(self, stream: TokenStream, tasks: asyncio.TaskGroup) -> None:
        """Attaches a stream again to get its missing tokens, unless that is under way."""
        key = (stream.request_id, stream.attempt)
        if key in self._repairing or stream.is_complete:
            return
        self._repairing.add(key)
        tasks.create_task(self._attach_or_fail(stream), name=f"attach {stream.request_id}")

    async def _attach_or_fail(self, stream: TokenStream) -> None:
        connection = self._connections
        try:
            await self._attach(stream)
        except Cancelled as error:
            stream.end(error)
        except ServeError as error:
            if connection == self._connections and self._up.is_set():
                stream.fail(PeerLost(f"decode worker {self.worker_id} no longer sends {stream.request_id}: {error}"))
        finally:
            if connection == self._connections:
                self._repairing.discard((stream.request_id, stream.attempt))

    async def _attach(
        self, stream: TokenStream, had_attempt: int | None = None, deadline_s: float | None = None
    ) -> None:
        if self.lost is not None:
            raise self.lost
        reach(Point.ROUTER_ATTACHING)
        request = worker_pb2.AttachRequest(
            request_id=stream.request_id,
            attempt=stream.attempt if had_attempt is None else had_attempt,
            router_id=self._router_id,
            from_position=stream.next_position,
            new_attempt=0 if had_attempt is None else stream.attempt,
            deadline_s=deadline_s,
        )
        try:
            await self._call(self._decode.Attach, request, self._detector.patience.dead_after_s)
        except NotFound as error:
            raise PeerLost(f"decode worker {self.worker_id} no longer has {stream.request_id}") from error
        self._metrics.attached_requests_total.inc()
        log.info(
            "attached request=%s attempt=%d worker=%s position=%d",
            stream.request_id,
            stream.attempt,
            self.worker_id,
            request.from_position,
        )

    async def _call(self, method: Callable[..., Awaitable[Response]], request: Message, timeout_s: float) -> Response:
        """Returns the response. Raises PeerLost if the connection failed, or else the worker's error."""
        try:
            return await method(request, metadata=self._channel.metadata, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            trailing = error.trailing_metadata() or ()
            if error.code() in _LINK_TROUBLE and all(key != ERROR_KIND_KEY for key, _ in trailing):
                raise PeerLost(f"{self._channel.address}: {error.details() or error.code().name}") from error
            raise error_of(error, self._channel.address) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise PeerLost(f"{self._channel.address}: the connection was closed") from None
