"""Owner of open requests: every choice is an answer of its own, and their events come together in one iterator."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping

from router.fleet.broadcast import forget_cached, traces_at
from router.fleet.demand import Demand, DemandReports
from router.fleet.fleet import Fleet
from router.fleet.link_pool import LinkPool
from router.fleet.serving_facts import ServingFacts
from router.fleet.worker import Member
from router.metrics import ROLE, RouterMetrics
from router.routing.policies import policy_named
from router.routing.reservations import Reservations
from router.routing.routing_state import RoutingState
from router.serving.generate_request import FinishEvent, GenerationRequest, TokenEvent
from router.serving.migration import Movement
from router.serving.placement import Placer
from router.serving.recovery import Found, find
from router.serving.request_log import ready_made, request_log, worker_record
from router.serving.request_state import Answer, Surroundings
from twostroke.config import Role, RouterConfig
from twostroke.errors import Cancelled, ConfigError, Draining, InvalidRequest, ServeError
from twostroke.ids import BlockName
from twostroke.kv_cache.block import extend_names
from twostroke.request import FinishReason
from twostroke.rpc.membership import Membership
from twostroke.rpc.traces import known_of
from twostroke.rpc.v1.control_pb2 import GetTraceResponse, KvEventBatch, SubscribeKvEventsRequest, WorkerLoad
from twostroke.tracing.setup import recorder_of

log = logging.getLogger(__name__)

WORKER_RECORD_S = 5.0
"""Between two records of the workers in the request log."""

HASHED_TOKENS = 8192
"""Of a prompt, hashed in one turn of the event loop, which takes some milliseconds."""

Event = TokenEvent | FinishEvent | ServeError


class RouterCore:
    """The `Dispatcher` of a router. `start` it, `close` it; in between it serves."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics) -> None:
        policy_named(config.routing.policy)
        if not config.fleet_address:
            raise ConfigError("a router needs the address of the supervisor's fleet service", field="fleet_address")
        self.router_id = f"router-{secrets.token_hex(4)}"
        self._config = config
        self._metrics = metrics
        self._request_log = request_log(config.routing.request_log, metrics)
        self.us = Membership.of(config.cluster_token, config.cluster_tls)
        metrics.expiries.watch("cluster", self.us.certificates)
        self._routing = RoutingState(self.router_id, self.us, metrics)
        self._fleet = Fleet(
            config, self.us, self.router_id, metrics, self._routing, self._worker_gone, self._worker_back
        )
        self.recorder = recorder_of(self.router_id, ROLE, config.tracing, metrics.registry)
        self._demand = Demand()
        self._tasks: asyncio.TaskGroup | None = None
        self._links: LinkPool | None = None
        self._placer: Placer | None = None
        self._movement: Movement | None = None
        self._running: asyncio.Task[None] | None = None
        self._open: dict[str, _OpenRequest] = {}
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, address: str = "") -> None:
        """`address` is where other routers reach this one's rpc server; without it they do not know of it."""
        started = asyncio.Event()
        self._running = asyncio.create_task(self._run(started, address), name="router core")
        await started.wait()

    async def until_ready(self, timeout_s: float) -> None:
        """Returns once a decode worker serves, or after `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while not self.is_ready and (left_s := until_s - time.monotonic()) > 0:
            await self._fleet.wait_for_change(left_s)

    async def ended(self) -> None:
        """Waits for the end; raises what the core failed of. A router whose core has ended serves nothing any more."""
        assert self._running is not None, "ended() before start()"
        await asyncio.shield(self._running)

    async def close(self) -> None:
        """End everything; open requests fail as Draining. Answers that their clients can resume elsewhere stay open at
        their decode workers, which keep them for a grace period."""
        self._is_draining = True
        for opened in list(self._open.values()):
            opened.leave(Draining("the router is shutting down; another one can go on with this stream"))
            await opened.stop()
        if self._links is not None:
            await self._links.settle()
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
            self._running = None
        await asyncio.to_thread(self._request_log.close)
        await asyncio.to_thread(self.recorder.close)

    @property
    def reservations(self) -> Reservations:
        return self._routing.reservations

    @property
    def facts(self) -> ServingFacts:
        return dataclasses.replace(self._fleet.facts, ready=self.is_ready)

    @property
    def is_ready(self) -> bool:
        return not self._is_draining and self._fleet.can_answer

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[TokenEvent | FinishEvent, None]:
        found = await self._found(request) if request.resumptions else {}
        names = await hash_blocks(request, self._fleet.facts.block_size)
        opened = self._admit(request, names, found)
        try:
            unfinished = len(request.sampling) - len(request.settled)
            while unfinished:
                event = await opened.events.get()
                if isinstance(event, ServeError):
                    raise event
                yield event
                unfinished -= isinstance(event, FinishEvent)
        finally:
            await self._retire(opened)

    async def finish_early(self, request: GenerationRequest, index: int) -> None:
        opened = self._open.get(request.request_id)
        if opened is not None and opened.request is request:  # not another connection's that goes on with it
            opened.finish_early(index)

    async def abort(self, request_id: str) -> bool:
        if request_id not in self._open:
            return False
        self._open[request_id].end(Cancelled(f"request {request_id} was aborted"))
        return True

    def loads(self) -> list[WorkerLoad]:
        return [
            WorkerLoad(worker_id=member.worker, load=member.load, server=member.server)
            for member in self._fleet.members
        ]

    def subscribe(self, request: SubscribeKvEventsRequest) -> AsyncIterator[KvEventBatch]:
        return self._routing.relay.subscribe(request)

    async def forget_cached(self) -> int:
        return await forget_cached(self._fleet.members, self.us)

    async def trace(self, name: str) -> GetTraceResponse:
        known = known_of(self.recorder, name)
        said, silent = await traces_at(self._fleet.members, self.us, known.stream or name)
        for one in said:
            known.stream = known.stream or one.stream
            known.forgotten = known.forgotten or one.forgotten
        known.spans.extend(span for one in said if one.stream == known.stream for span in one.spans)
        known.silent.extend(silent)
        return known

    async def drain(self, deadline_s: float) -> int:
        if not self._is_draining:
            log.info("draining open=%d", len(self._open))
        self._is_draining = True
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.time())):
                await self._idle.wait()
        except TimeoutError:
            log.warning("drain incomplete open=%d", len(self._open))
        return len(self._open)

    async def _run(self, started: asyncio.Event, address: str) -> None:
        try:
            await self._serve(started, address)
        except Exception:
            log.critical("router core failed: it serves nothing any more", exc_info=True)
            self._is_draining = True
            for opened in self._open.values():
                opened.end(Draining("the router has failed and starts again; try again"))
            raise
        finally:
            started.set()

    async def _serve(self, started: asyncio.Event, address: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._links = LinkPool(self.router_id, self.us, self._metrics, self._fleet.vigil, tasks)
            self._placer = Placer(self._config, self._fleet, self._routing, self._links, self._metrics)
            self._movement = Movement(self._fleet, self._links, self._placer, self._metrics, tasks)
            reports = DemandReports(self._config, self.us, self.router_id, self._demand, self._fleet)
            side_tasks = (
                tasks.create_task(reports.run(), name="demand reports"),
                tasks.create_task(self._record_workers(), name="worker records"),
                tasks.create_task(self._placer.run(), name="waiting room"),
            )
            started.set()
            try:
                await self._fleet.run(address)
            finally:
                for task in side_tasks:
                    task.cancel()
                self._links.close()

    async def _record_workers(self) -> None:
        """Every few seconds, and once more at the end."""
        try:
            while True:
                await asyncio.sleep(WORKER_RECORD_S)
                self._put_worker_records()
        finally:
            self._put_worker_records()

    def _put_worker_records(self) -> None:
        for member in self._fleet.members:
            record = worker_record(member)
            if record is not None:
                self._request_log.put(ready_made(record))

    async def _found(self, request: GenerationRequest) -> dict[int, Found]:
        """What decode workers have of a stream that is resumed. If this router serves it still, over a connection that
        its client has given up, that ends, and it is found there, too."""
        if self._links is None:
            return {}
        found = await find(self._links.to_all(self._decode_workers()), request)
        earlier = self._open.pop(request.request_id, None)
        if earlier is not None:
            earlier.leave(Cancelled("the client goes on with this stream over another connection"), always=True)
            await earlier.stop()
            found = await find(self._links.to_all(self._decode_workers()), request)  # it may have moved meanwhile
        self._metrics.taken_over_requests_total.inc(len(found))
        self._metrics.replayed_requests_total.inc(len(request.sampling) - len(request.settled) - len(found))
        return found

    def _decode_workers(self) -> list[Member]:
        return [m for m in self._fleet.members if m.role is Role.DECODE and m.refusal is None]

    def _admit(
        self, request: GenerationRequest, names: tuple[BlockName, ...], found: Mapping[int, Found]
    ) -> _OpenRequest:
        """Check what only the router knows, and begin every choice."""
        if self._is_draining:
            raise Draining("the router takes no new requests; try another one")
        if request.request_id in self._open:
            raise InvalidRequest(f"a request with id {request.request_id!r} is open already", field="request_id")
        facts = self._fleet.facts
        assert self._tasks is not None, "generate() before start()"
        assert self._links is not None
        assert self._placer is not None
        assert self._movement is not None
        around = Surroundings(
            router_id=self.router_id,
            block_size=facts.block_size,
            policy=self._config.routing.policy,
            placer=self._placer,
            links=self._links,
            movement=self._movement,
            metrics=self._metrics,
            request_log=self._request_log,
            demand=self._demand,
            recorder=self.recorder,
        )
        opened = _OpenRequest(request, names, around, self._tasks, found)
        self._open[request.request_id] = opened
        self._idle.clear()
        return opened

    async def _retire(self, opened: _OpenRequest) -> None:
        """No task of the request is left when its id is free again."""
        try:
            await opened.stop()
        finally:
            if self._open.get(opened.request.request_id) is opened:
                del self._open[opened.request.request_id]
            if not self._open:
                self._idle.set()

    def _worker_gone(self, member: Member, reason: str) -> None:
        if self._links is not None:
            has_left = self._fleet.member(member.worker) is not member  # else it may be heard again
            self._links.drop(member, reason, for_good=has_left)

    def _worker_back(self, member: Member) -> None:
        if self._links is not None:
            self._links.settle_with(member)


async def hash_blocks(request: GenerationRequest, block_size: int) -> tuple[BlockName, ...]:
    """The hashes of all full blocks of the prompt. Others are served between its parts."""
    hashes: list[BlockName] = []
    for end in range(HASHED_TOKENS, len(request.prompt) + HASHED_TOKENS, HASHED_TOKENS):
        if hashes:
            await asyncio.sleep(0)
        extend_names(hashes, request.prompt[:end], block_size, request.salt, request.public_blocks)
    return tuple(hashes)


class _OpenRequest:
    """The answers of one request and the queue in which their events come together."""

    def __init__(
        self,
        request: GenerationRequest,
        names: tuple[BlockName, ...],
        around: Surroundings,
        tasks: asyncio.TaskGroup,
        found: Mapping[int, Found],
    ) -> None:
        self.request = request
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._answers = {
            index: Answer(request, index, names, around, self.events.put_nowait, found.get(index))
            for index in range(len(request.sampling))
            if index not in request.settled
        }
        self._tasks = {
            index: tasks.create_task(answer.run(), name=f"answer {answer.request_id}")
            for index, answer in self._answers.items()
        }

    def finish_early(self, index: int) -> None:
        """The caller has what it wants of one choice."""
        task = self._tasks[index]
        if not task.done() and not task.cancelling():
            task.cancel()
            self._answers[index].note_end()
            self.events.put_nowait(FinishEvent(index, FinishReason.STOP, self._answers[index].cached_tokens))

    def leave(self, error: ServeError, *, always: bool = False) -> None:
        """End it here, but not at its decode workers if its client has what it needs to go on with it (or `always`)."""
        if always or (self.request.is_resumable and any(answer.has_begun for answer in self._answers.values())):
            for answer in self._answers.values():
                answer.leave_open()
        self.end(error)

    def end(self, error: ServeError) -> None:
        for task in self._tasks.values():
            task.cancel()
        self.events.put_nowait(error)

    async def stop(self) -> None:
        """Cancel what still runs and wait for it: each answer closes its attempt, without waiting for the worker."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
