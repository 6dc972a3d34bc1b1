"""The router's connection to one life of one decode worker: opens and closes answers, shares one token stream.

When only the token stream breaks, the same life is asked to go on from the next position of every open answer. When
that life is dead (see `liveness`), or the stream cannot be had again for as long as silence is borne, the link is lost
and all of its answers fail as PeerLost; their owner opens them elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Protocol, TypeVar

import grpc.aio

from router.fleet.failure_detector import Vigil
from router.fleet.liveness import Signal
from router.fleet.token_stream import AnswerStream
from router.fleet.worker import Member
from router.metrics import RouterMetrics
from twostroke.errors import Cancelled, NotFound, PeerLost, ServeError, StaleEpoch
from twostroke.fault_points import Point, reach
from twostroke.ids import RequestId
from twostroke.rpc.channel import PeerChannel, call_timeout_s, error_of, is_refusal
from twostroke.rpc.membership import Membership
from twostroke.rpc.server import ERROR_KIND_KEY
from twostroke.rpc.v1 import control_pb2, worker_pb2
from twostroke.rpc.v1.control_pb2_grpc import ControlStub
from twostroke.rpc.v1.worker_pb2_grpc import DecodeStub, PagesStub

log = logging.getLogger(__name__)

Answered_co = TypeVar("Answered_co", covariant=True)

OPEN_TIMEOUT_S = 10.0
"""Open only queues; a worker that needs longer is as good as lost."""
CLOSE_TIMEOUT_S = 2.0
"""A worker that cannot be told drops the answer by itself when its grace period ends."""
REACH_TIMEOUT_S = 1.0
"""Of one attempt to reach the same life again."""
DELIVERY_S = 0.002
"""Of one turn of the event loop, for tokens that a step brought: those of a thousand choices come together."""
REACH_PAUSE_S = 0.15
"""Longer than the channel's first backoff, so that every attempt really dials."""
RESTREAM_PAUSE_S = 0.02
"""A worker that ends its token stream again and again must not keep the router busy."""

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
"""What gRPC itself says when a connection or a process ends under a call."""


class _Call(Awaitable[Answered_co], Protocol):
    """A unary call under way."""


class WorkerLink:
    def __init__(self, member: Member, router_id: str, us: Membership, metrics: RouterMetrics, vigil: Vigil) -> None:
        self._member = member
        self._vigil = vigil
        self.worker = member.worker
        self.epoch = member.epoch
        self.lost: PeerLost | None = None
        self.is_over = False
        """That life is; else it may be reached again, though this link is lost."""
        self._router_id = router_id
        self._metrics = metrics
        self._channel = PeerChannel(member.address, us)
        self._decode = DecodeStub(self._channel.channel)
        self._streams: dict[tuple[RequestId, int], AnswerStream] = {}
        self._opening: set[tuple[RequestId, int]] = set()
        self._repairing: set[tuple[RequestId, int]] = set()
        self._connections = 0
        """Token streams begun so far."""
        self._up = asyncio.Event()
        self._down_since_s = vigil.awake_s

    async def run(self) -> None:
        """Keep the token stream open until this life is lost; then (or when cancelled) fail what is open."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while self.lost is None:
                    if await self._reach():
                        await self._stream(tasks)
                        await asyncio.sleep(RESTREAM_PAUSE_S)
                    else:
                        await asyncio.sleep(REACH_PAUSE_S)
                    self._lose_if_down_for_long()
        finally:
            self.lose("link closed")
            await self._channel.close()

    def lose(self, reason: str) -> None:
        """This life is over: every open answer fails at once."""
        if self.lost is not None:
            return
        self.lost = PeerLost(f"decode worker {self.worker} (life {self.epoch}) is lost: {reason}")
        log.warning(
            "link lost worker=%s epoch=%s open=%d reason=%s", self.worker, self.epoch, len(self._streams), reason
        )
        self._up.set()
        for stream in self._streams.values():
            stream.fail(self.lost)

    async def open(self, message: worker_pb2.OpenRequest, stream: AnswerStream) -> None:
        """Queue an answer on the worker; its tokens go to `stream`. Whatever this raises, call `forget` after it."""
        async with self._beginning(stream):
            await self._answer_to(self._decode.Open(message, metadata=self._channel.metadata, timeout=OPEN_TIMEOUT_S))

    async def find(self, stream: str) -> list[worker_pb2.FoundAnswer]:
        """What the worker has of a stream, whichever router began it."""
        request = worker_pb2.FindRequest(stream=stream)
        found = await self._answer_to(
            self._decode.Find(request, metadata=self._channel.metadata, timeout=REACH_TIMEOUT_S)
        )
        return list(found.answers)

    async def take_over(self, stream: AnswerStream, had_attempt: int, deadline_s: float | None) -> None:
        """From another router, that had it as `had_attempt`. Whatever this raises, call `forget` after it."""
        async with self._beginning(stream):
            await self._attach(stream, had_attempt, deadline_s)

    def forget(self, stream: AnswerStream) -> None:
        """No more tokens are wanted; whether the worker has to be told is the caller's business."""
        self._streams.pop((stream.request_id, stream.attempt), None)

    async def close(self, stream: AnswerStream) -> bool:
        """Tell the worker that the answer is no longer wanted; False where it could not be told."""
        if self.lost is not None:
            return False
        reach(Point.ROUTER_CLOSING)
        request = worker_pb2.CloseRequest(request_id=stream.request_id, attempt=stream.attempt)
        try:
            await self._answer_to(self._decode.Close(request, metadata=self._channel.metadata, timeout=CLOSE_TIMEOUT_S))
        except ServeError as error:
            log.warning("close failed request=%s worker=%s error=%s", stream.request_id, self.worker, error)
            return False
        return True

    async def fetch(self, message: worker_pb2.FetchRequest) -> int:
        """Let the worker bring blocks into its cache; how many of those named it has then."""
        call = PagesStub(self._channel.channel).Fetch(
            message, metadata=self._channel.metadata, timeout=call_timeout_s(message.within_s + REACH_TIMEOUT_S)
        )
        return (await self._answer_to(call)).blocks

    @contextlib.asynccontextmanager
    async def _beginning(self, stream: AnswerStream) -> AsyncIterator[None]:
        """Inside, the worker is told of the stream; what came over a connection that broke meanwhile is asked for."""
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
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                await self._up.wait()
        except TimeoutError:
            raise PeerLost(f"decode worker {self.worker} began no token stream within {OPEN_TIMEOUT_S} s") from None
        if self.lost is not None:
            raise self.lost

    async def _reach(self) -> bool:
        """True once the worker has answered as the life that is meant; False where it is to be tried again, or lost."""
        try:
            await self._check_life()
        except PeerLost as error:
            log.warning("worker not reached worker=%s epoch=%s error=%s", self.worker, self.epoch, error)
            if is_refusal(error):
                self._vigil.refused(self._member)
            return False
        except ServeError as error:
            self.lose(f"{type(error).__name__}: {error}")
            return False
        return True

    def _lose_if_down_for_long(self) -> None:
        patience_s = self._vigil.patience.dead_after_s
        if not self._up.is_set() and self._vigil.awake_s - self._down_since_s >= patience_s:
            self.lose(f"it has had no token stream for {patience_s:g} s")

    async def _check_life(self) -> None:
        control = ControlStub(self._channel.channel)
        info = await self._answer_to(
            control.GetServerInfo(
                control_pb2.GetServerInfoRequest(), metadata=self._channel.metadata, timeout=REACH_TIMEOUT_S
            )
        )
        if info.epoch != str(self.epoch):
            self._metrics.stale_epochs_refused_total.inc()
            raise StaleEpoch(f"{self._channel.address} is now life {info.epoch}")

    async def _stream(self, tasks: asyncio.TaskGroup) -> None:
        """One connection of the token stream, until it breaks."""
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
            log.warning("token stream ended worker=%s epoch=%s", self.worker, self.epoch)
        except TimeoutError:
            log.warning("no token stream begun worker=%s epoch=%s", self.worker, self.epoch)
        except grpc.aio.AioRpcError as error:
            log.warning("token stream broken worker=%s epoch=%s error=%s", self.worker, self.epoch, error.details())
        finally:
            call.cancel()
            if self.lost is None and self._up.is_set():
                self._up.clear()
                self._down_since_s = self._vigil.awake_s

    def _begin_connection(self, tasks: asyncio.TaskGroup) -> None:
        """The worker's first (empty) batch says that it knows the stream: from here on attaching cannot overtake it."""
        self._connections += 1
        for key, stream in self._streams.items():
            if key not in self._opening:
                self._repair(stream, tasks)
        self._up.set()

    async def _deliver(self, batch: worker_pb2.TokenBatch, tasks: asyncio.TaskGroup) -> None:
        self._vigil.heard(self._member, Signal.TOKENS)
        until_s = time.perf_counter() + DELIVERY_S
        for entry in batch.entries:
            if time.perf_counter() > until_s:
                await asyncio.sleep(0)
                until_s = time.perf_counter() + DELIVERY_S
            stream = self._streams.get((RequestId(entry.request_id), entry.attempt))
            if stream is None:
                self._metrics.stale_tokens_total.inc()
            elif not stream.feed(entry):
                self._repair(stream, tasks)

    def _repair(self, stream: AnswerStream, tasks: asyncio.TaskGroup) -> None:
        """Ask for what is missing, unless that has been done already."""
        key = (stream.request_id, stream.attempt)
        if key in self._repairing or stream.is_complete:
            return
        self._repairing.add(key)
        tasks.create_task(self._attach_or_fail(stream), name=f"attach {stream.request_id}")

    async def _attach_or_fail(self, stream: AnswerStream) -> None:
        connection = self._connections
        try:
            await self._attach(stream)
        except Cancelled as error:
            stream.end(error)
        except ServeError as error:
            if connection == self._connections and self._up.is_set():
                stream.fail(PeerLost(f"decode worker {self.worker} no longer sends {stream.request_id}: {error}"))
        finally:
            if connection == self._connections:
                self._repairing.discard((stream.request_id, stream.attempt))

    async def _attach(
        self, stream: AnswerStream, had_attempt: int | None = None, deadline_s: float | None = None
    ) -> None:
        if self.lost is not None:
            raise self.lost
        reach(Point.ROUTER_ATTACHING)
        request = worker_pb2.AttachRequest(
            request_id=stream.request_id,
            attempt=stream.attempt if had_attempt is None else had_attempt,
            router_id=self._router_id,
            from_position=stream.next_position,
            take_as=0 if had_attempt is None else stream.attempt,
            deadline_s=deadline_s,
        )
        try:
            await self._answer_to(
                self._decode.Attach(request, metadata=self._channel.metadata, timeout=self._vigil.patience.dead_after_s)
            )
        except NotFound as error:
            raise PeerLost(f"decode worker {self.worker} no longer has {stream.request_id}") from error
        self._metrics.attached_requests_total.inc()
        log.info(
            "attached request=%s attempt=%d worker=%s position=%d",
            stream.request_id,
            stream.attempt,
            self.worker,
            request.from_position,
        )

    async def _answer_to(self, call: _Call[Answered_co]) -> Answered_co:
        """The response, or what its failure means: trouble of the link itself is PeerLost."""
        try:
            return await call
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
