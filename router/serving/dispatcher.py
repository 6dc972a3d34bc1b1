"""Owns open requests: hashes their blocks, runs their choices, and yields the tokens of all choices of a request."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping

from router.fleet.demand import DemandReporter
from router.fleet.fleet import Fleet
from router.fleet.link_pool import LinkPool
from router.fleet.named_models import NamedModels, NamedModelsOf, none_named
from router.fleet.token_stream import TokenDelta
from router.fleet.worker import ServingFacts, Worker
from router.metrics import ROLE, RouterMetrics
from router.routing.policies import policy_named
from router.routing.reservations import Reservations
from router.routing.routing_state import RoutingState
from router.serving.choice_state import ChoiceState, Dependencies
from router.serving.migration import Migration
from router.serving.operations import Operations
from router.serving.parent_request import ParentRequest, Take, take_none
from router.serving.placement import Placer
from router.serving.prompt_hashes import PromptHasher
from router.serving.recovery import Recovered, recover
from router.serving.request_log import making, request_log, worker_record
from twostroke.base.errors import Cancelled, ConfigError, Draining, InvalidRequest, ServeError
from twostroke.base.ids import BlockHash
from twostroke.config import Role, RouterConfig
from twostroke.request import FinishReason
from twostroke.rpc.membership import Membership
from twostroke.tracing.recorder import recorder_of

log = logging.getLogger(__name__)

HASHES_SHARE = 5
"""Divisor of the bytes for prepared text: so many are for block hashes. A block of 16 tokens takes 64, its hash 16."""
WORKER_RECORD_S = 5.0
"""Seconds between two records of each worker in the request log."""


class RouterCore:
    """The dispatcher of a router. It serves between `start` and `close`."""

    def __init__(self, config: RouterConfig, metrics: RouterMetrics, named_in: NamedModelsOf = none_named) -> None:
        policy_named(config.routing.policy)
        if not config.fleet_address:
            raise ConfigError("a router needs the address of the supervisor's fleet service", field="fleet_address")
        self.router_id = f"router-{secrets.token_hex(4)}"
        self._config = config
        self._metrics = metrics
        self._request_log = request_log(config.routing.request_log, metrics)
        self.membership = Membership.of(config.cluster_token, config.cluster_tls)
        metrics.expiries.watch("cluster", self.membership.certificates)
        self._hasher = PromptHasher(config.endpoints.text_cache_bytes // HASHES_SHARE, metrics)
        self._routing = RoutingState(self.router_id, self.membership, metrics)
        self._fleet = Fleet(
            config,
            self.membership,
            self.router_id,
            metrics,
            self._routing,
            self._worker_gone,
            self._worker_back,
            named_in,
        )
        self.recorder = recorder_of(self.router_id, ROLE, config.tracing, metrics.registry)
        self.operations = Operations(self._fleet, self._routing, self.membership, self.recorder)
        self._demand = DemandReporter(self.router_id, self._fleet)
        self._with: Dependencies | None = None
        """Dependencies of all requests. None until `start`."""
        self._running: asyncio.Task[None] | None = None
        self._open: dict[str, _OpenChoices] = {}
        self.is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    async def start(self, address: str = "") -> None:
        """Starts the background task. `address` is where other routers reach this one; empty if they do not."""
        started = asyncio.Event()
        self._running = asyncio.create_task(self._run(started, address), name="router core")
        await started.wait()

    async def until_ready(self, timeout_s: float) -> None:
        """Returns once a decode worker serves, or after `timeout_s`."""
        await self._wait_for(lambda: self.is_ready, timeout_s)

    async def ended(self) -> None:
        """Waits until the core has ended, and raises the error of which it failed. Then the router cannot serve."""
        assert self._running is not None, "ended() before start()"
        await asyncio.shield(self._running)

    async def close(self) -> None:
        """Ends all tasks. Open requests fail with Draining.

        Streams that clients can resume at another router stay open at their decode workers for a grace period.
        """
        self.is_draining = True
        for opened in list(self._open.values()):
            opened.leave(Draining("the router is shutting down; another one can continue with this stream"))
            await opened.stop()
        if self._with is not None:
            await self._with.links.flush()
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
        """What all workers have in common. Raises PeerLost while no decode worker is known."""
        return self._fleet.facts

    @property
    def named_models(self) -> NamedModels:
        """Models that are served besides the base model, by name."""
        return self._fleet.named_models

    async def wait_for_named(self, holds: Callable[[NamedModels], bool], timeout_s: float) -> None:
        """Waits until `holds` is true for `named_models`, or until `timeout_s` has passed."""
        await self._wait_for(lambda: holds(self._fleet.named_models), timeout_s)

    async def _wait_for(self, holds: Callable[[], bool], timeout_s: float) -> None:
        until_s = time.monotonic() + timeout_s
        while not holds() and (left_s := until_s - time.monotonic()) > 0:
            await self._fleet.wait_for_change(left_s)

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and self._fleet.can_serve

    @property
    def knows_decode_worker(self) -> bool:
        """Whether a decode worker is known. It may be suspect, or draining."""
        return self._fleet.knows_decode_worker

    async def generate(
        self, request: ParentRequest, take: Take = take_none
    ) -> AsyncGenerator[tuple[int, TokenDelta], None]:
        """Yields (choice, delta) until every choice ends, from the first token on even if the stream is resumed.

        While nothing waits to be yielded, arriving tokens are first passed to `take`, without a switch of tasks. They
        are yielded if it returns False. Every end is yielded.

        Raises ServeError. Closing the iterator (`aclose`, or cancelling its consumer) cancels the request everywhere.
        """
        recovered = await self._recover(request) if request.resumptions else {}
        hashes = await self._hasher.hashes(request.request, self._fleet.facts.block_size)
        if self.is_draining:
            raise Draining("the router takes no new requests; try another one")
        if request.request_id in self._open:
            raise InvalidRequest(f"a request with id {request.request_id!r} is open already", field="request_id")
        assert self._with is not None, "generate() before start()"
        opened = self._open[request.request_id] = _OpenChoices(request, hashes, self._with, recovered, take)
        self._idle.clear()
        try:
            left = len(request.open_choices)
            while left:
                event = await opened.events.get()
                if isinstance(event, Exception):
                    raise event
                yield event
                left -= event[1].finish is not None
        finally:
            await self._retire(opened)

    def finish_early(self, request: ParentRequest, choice: int) -> None:
        """Ends a choice because its text has a stop string. Its end, with reason STOP, is yielded next."""
        opened = self._open.get(request.request_id)
        if opened is not None and opened.request is request:  # another connection may have resumed it
            opened.finish_early(choice)

    async def abort(self, request_id: str) -> bool:
        """Ends an open request: its iterator raises Cancelled. Returns False if no open request has this id."""
        if request_id not in self._open:
            return False
        self._open[request_id].fail(Cancelled(f"request {request_id} was aborted"))
        return True

    async def drain(self, deadline_s: float) -> int:
        """Takes no new work, and waits for open requests until `deadline_s` (Unix seconds). Returns the number left."""
        if not self.is_draining:
            log.info("draining open=%d", len(self._open))
        self.is_draining = True
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
            self.is_draining = True
            for opened in self._open.values():
                opened.fail(Draining("the router has failed and starts again; try again"))
            raise
        finally:
            started.set()

    async def _serve(self, started: asyncio.Event, address: str) -> None:
        async with asyncio.TaskGroup() as tasks:
            links = LinkPool(self.router_id, self.membership, self._metrics, self._fleet.detector, tasks)
            self._fleet.on_change(lambda: links.connect(self._fleet.serving(Role.DECODE)))
            placer = Placer(self._config, self._fleet, self._routing, links, self._metrics)
            self._with = Dependencies(
                router_id=self.router_id,
                tasks=tasks,
                fleet=self._fleet,
                placer=placer,
                links=links,
                migration=Migration(self._fleet, links, placer, self._metrics, tasks),
                metrics=self._metrics,
                request_log=self._request_log,
                demand=self._demand,
                recorder=self.recorder,
            )
            reports = self._demand.run(self._config.fleet_address, self.membership)
            side_tasks = (
                tasks.create_task(reports, name="demand reports"),
                tasks.create_task(self._record_workers(), name="worker records"),
                tasks.create_task(placer.queue.run(), name="admission queue"),
            )
            started.set()
            try:
                await self._fleet.run(address)
            finally:
                for task in side_tasks:
                    task.cancel()
                links.close()

    async def _record_workers(self) -> None:
        """Writes a record of every worker each few seconds, and once more at the end."""
        try:
            while True:
                await asyncio.sleep(WORKER_RECORD_S)
                self._put_worker_records()
        finally:
            self._put_worker_records()

    def _put_worker_records(self) -> None:
        for worker in self._fleet.workers:
            record = worker_record(worker)
            if record is not None:
                self._request_log.put(making(record))

    async def _recover(self, request: ParentRequest) -> dict[int, Recovered]:
        """Returns what decode workers have of a resumed stream, by choice.

        This router may still serve it over a connection that its client has given up. That request is ended first.
        """
        if self._with is None:
            return {}
        links = self._with.links
        recovered = await recover(map(links.to, self._fleet.decode_workers()), request)
        earlier = self._open.pop(request.request_id, None)
        if earlier is not None:
            earlier.leave(Cancelled("the client continues with this stream over another connection"), always=True)
            await earlier.stop()  # a choice may have migrated meanwhile
            recovered = await recover(map(links.to, self._fleet.decode_workers()), request)
        self._metrics.recovered_requests_total.inc(len(recovered))
        self._metrics.replayed_requests_total.inc(len(request.open_choices) - len(recovered))
        return recovered

    async def _retire(self, opened: _OpenChoices) -> None:
        """Ends the request's tasks, and then frees its id."""
        try:
            await opened.stop()
        finally:
            if self._open.get(opened.request.request_id) is opened:
                del self._open[opened.request.request_id]
            if not self._open:
                self._idle.set()

    def _worker_gone(self, worker: Worker, reason: str) -> None:
        if self._with is not None:
            has_left = self._fleet.worker(worker.worker_id) is not worker  # otherwise events of it may come again
            self._with.links.drop(worker, reason, for_good=has_left)

    def _worker_back(self, worker: Worker) -> None:
        if self._with is not None:
            self._with.links.close_unclosed(worker)


class _OpenChoices:
    """The open choices of one request, and their events that wait to be yielded."""

    def __init__(
        self,
        request: ParentRequest,
        hashes: tuple[BlockHash, ...],
        dependencies: Dependencies,
        recovered: Mapping[int, Recovered],
        take: Take,
    ) -> None:
        self.request = request
        self.events = asyncio.Queue[tuple[int, TokenDelta] | Exception]()
        """Ends, errors, and tokens that were not taken at once."""
        self._take = take
        self._choices = {
            choice: ChoiceState(request, choice, hashes, dependencies, self, recovered.get(choice))
            for choice in request.open_choices
        }
        self._turns = deque[asyncio.Future[None]]()
        """One future for each choice that waits to begin. Each begins in an iteration of the event loop of its own."""
        self._tasks = {
            choice: dependencies.tasks.create_task(self._run(state), name=f"request {state.request_id}")
            for choice, state in self._choices.items()
        }

    async def _run(self, state: ChoiceState) -> None:
        if len(self._choices) > 1:
            loop = asyncio.get_running_loop()
            if not self._turns:
                loop.call_soon(self._begin_next)
            turn = loop.create_future()
            self._turns.append(turn)
            await turn
        await state.run()

    def _begin_next(self) -> None:
        """Lets one choice begin. To place a hundred of them at once would hold the loop for a tenth of a second."""
        turn = self._turns.popleft()
        if not turn.done():  # its task may have been cancelled
            turn.set_result(None)
        if self._turns:
            asyncio.get_running_loop().call_soon(self._begin_next)

    def finish_early(self, choice: int) -> None:
        """Ends a choice with reason STOP."""
        task = self._tasks[choice]
        if not task.done() and not task.cancelling():
            task.cancel()
            self._choices[choice].end(FinishReason.STOP)

    def leave(self, error: ServeError, *, always: bool = False) -> None:
        """Ends the request here. If its client can resume it, or `always`, it stays open at its decode workers."""
        if always or (self.request.is_resumable and any(state.has_begun for state in self._choices.values())):
            for state in self._choices.values():
                state.leave_open()
        self.fail(error)

    def tokens(self, choice: int, delta: TokenDelta) -> None:
        try:
            if not self.events.empty() or not self._take(choice, delta):
                self.put((choice, delta))
        except Exception as error:  # it must end only this request, not the worker's stream
            self.put(error)

    def put(self, event: tuple[int, TokenDelta] | Exception) -> None:
        self.events.put_nowait(event)

    def fail(self, error: ServeError) -> None:
        for task in self._tasks.values():
            task.cancel()
        self.put(error)

    async def stop(self) -> None:
        """Cancels the running choices and waits for them. Each closes its attempt without waiting for the worker."""
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks.values())
