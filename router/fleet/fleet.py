"""The workers of the fleet: those in the supervisor's view, with their epochs and fingerprints checked.

The supervisor lists the epochs of workers. Each is followed (see `feed`) until the supervisor lists it as neither
serving nor draining. While the supervisor cannot be reached, its last view stays valid, and broken event streams show
which workers are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import grpc.aio

from router.fleet.feed import EventSink, Feed, FeedDependencies
from router.fleet.liveness import Change, FailureDetector
from router.fleet.metrics import FleetMetrics, ScalingMetrics
from router.fleet.named_models import NamedModels, NamedModelsOf
from router.fleet.worker import SAME_FACTS, Liveness, ServingFacts, Worker, WorkerStatus
from router.metrics import RouterMetrics
from twostroke.base.errors import PeerLost
from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import Epoch, WorkerId
from twostroke.base.tokenizer_file import is_of, tokenizer_field
from twostroke.config import Role, RouterConfig
from twostroke.kv_cache.form import KvForm
from twostroke.rpc.channel import PeerChannel, error_of
from twostroke.rpc.convert import form_of
from twostroke.rpc.membership import Membership
from twostroke.rpc.silence import listening
from twostroke.rpc.v1 import fleet_pb2
from twostroke.rpc.v1.control_pb2 import (
    WORKER_STATE_DRAINING,
    WORKER_STATE_SERVING,
    WORKER_STATE_STARTING,
    WorkerLoad,
)
from twostroke.rpc.v1.fleet_pb2_grpc import FleetStub

log = logging.getLogger(__name__)

RECONNECT_PAUSE_S = 0.25
"""Seconds between two attempts to reach the supervisor."""
VIEW_SILENCE_S = 6.0
"""Seconds of silence after which the supervisor is asked again, three times its longest one. Its last view stands."""


class Fleet:
    """Owns the workers that the supervisor lists, and what is known of them."""

    def __init__(
        self,
        config: RouterConfig,
        membership: Membership,
        router_id: str,
        metrics: RouterMetrics,
        events: EventSink,
        on_gone: Callable[[Worker, str], None],
        on_back: Callable[[Worker], None],
        named_in: NamedModelsOf,
    ) -> None:
        """`on_gone` is called when an epoch has ended or is judged dead, `on_back` when a dead one is heard again."""
        self._events = events
        self.fingerprint: str | None = None
        """Fingerprint of the workers that new requests go to.

        The supervisor may set it. Otherwise it is that of the first worker, and all others must have the same.
        """
        self._is_told_fingerprint = False
        """Whether the supervisor has set `fingerprint`, because workers change their weights one by one."""
        self._named_in = named_in
        self.named_models: NamedModels = {}
        """Models that are served besides the base model, by name, from the supervisor's last view."""
        self._forms: dict[Role, KvForm] = {}
        """Page form of the first worker of each role. All others of the role must have the same one."""
        self._config = config
        self._tokenizer = tokenizer_field(Path(config.model_dir)) if config.model_dir else None
        """This router's tokenizer, as fingerprints name it. None: a paced model."""
        self._membership = membership
        self._router_id = router_id
        self._metrics = metrics
        self._on_gone, self._on_back = on_gone, on_back
        self.detector = FailureDetector(config.patience, metrics, self._judged)
        self._workers: dict[WorkerId, Worker] = {}
        self._latest: dict[WorkerId, Epoch] = {}
        """Latest epoch of every worker, even after it is gone: an earlier epoch must not come back."""
        self._followers: dict[WorkerId, asyncio.Task[None]] = {}
        self._awaits_decode = False
        """Whether the supervisor lists a decode worker that is dead or starting, and will serve soon."""
        self._changed = asyncio.Event()
        self._change_listeners: list[Callable[[], None]] = []
        self._report_listeners: list[Callable[[], None]] = []
        self._facts: ServingFacts | None = None
        self._feed_dependencies = FeedDependencies(
            membership=membership,
            events=events,
            metrics=metrics,
            detector=self.detector,
            on_introduced=self._accept,
            on_status_change=self._note_change,
            on_load_report=self._note_report,
        )
        FleetMetrics(metrics.registry, self._workers, events.block_count)
        self._scaling = ScalingMetrics(metrics.registry)

    async def run(self, address: str) -> None:
        """Follows supervisor and workers until it is cancelled. Other routers reach this one at `address`, if any."""
        request = fleet_pb2.WatchRequest(watcher=self._router_id, address=address)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.detector.run(), name="failure detector")
            while True:
                await self._watch(request, tasks)
                await asyncio.sleep(RECONNECT_PAUSE_S)

    @property
    def facts(self) -> ServingFacts:
        if self._facts is None:
            raise PeerLost("no decode worker has introduced itself yet; try again when the fleet is up")
        return self._facts

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    def serving(self, role: Role) -> list[Worker]:
        return [w for w in self._workers.values() if w.role is role and w.status is WorkerStatus.SERVING]

    def taking_begun(self, role: Role) -> list[Worker]:
        """Returns workers that take requests begun with their weights, even if new requests go to other weights."""
        return [w for w in self._workers.values() if w.role is role and w.takes_begun]

    def decode_workers(self) -> list[Worker]:
        """Returns all decode workers that were not refused, whether they serve or not."""
        return [w for w in self._workers.values() if w.role is Role.DECODE and w.refusal is None]

    def loads(self) -> list[WorkerLoad]:
        return [WorkerLoad(worker_id=w.worker_id, load=w.load, server=w.server) for w in self._workers.values()]

    @property
    def can_serve(self) -> bool:
        """Whether a decode worker serves or is suspect. Requests wait for a suspect one, so the router is ready."""
        statuses = {w.status for w in self.decode_workers()}
        return bool(statuses & {WorkerStatus.SERVING, WorkerStatus.SUSPECT})

    @property
    def knows_decode_worker(self) -> bool:
        """Whether a decode worker still runs. It may be suspect or draining, or have other weights."""
        here = (WorkerStatus.SERVING, WorkerStatus.SUSPECT, WorkerStatus.DRAINING, WorkerStatus.OTHER_WEIGHTS)
        return any(w.status in here for w in self.decode_workers())

    @property
    def is_leaving(self) -> bool:
        """Whether every decode worker drains and no other is expected, so that none will take a request."""
        return {w.status for w in self.decode_workers()} == {WorkerStatus.DRAINING} and not self._awaits_decode

    def worker(self, worker_id: WorkerId) -> Worker | None:
        return self._workers.get(worker_id)

    def on_change(self, listener: Callable[[], None]) -> None:
        """Calls `listener` whenever a worker's status changes."""
        self._change_listeners.append(listener)

    def on_report(self, listener: Callable[[], None]) -> None:
        """Calls `listener` whenever a worker reports or its status changes. It is called often, so it must be quick."""
        self._report_listeners.append(listener)

    async def wait_for_change(self, timeout_s: float) -> None:
        """Returns when a worker's status changes, or after `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()

    async def _watch(self, request: fleet_pb2.WatchRequest, tasks: asyncio.TaskGroup) -> None:
        channel = PeerChannel(self._config.fleet_address, self._membership)
        try:
            call = FleetStub(channel.channel).Watch(request, metadata=channel.metadata)
            async with listening(VIEW_SILENCE_S) as heard:
                while isinstance(view := await call.read(), fleet_pb2.FleetView):
                    heard()
                    reach(Point.ROUTER_VIEW)
                    self._take(view, tasks)
            log.warning("fleet watch ended address=%s", channel.address)
        except TimeoutError:
            log.warning("fleet watch silent address=%s seconds=%g", channel.address, VIEW_SILENCE_S)
        except grpc.aio.AioRpcError as error:
            log.warning("fleet watch broken address=%s error=%s", channel.address, error_of(error, channel.address))
        finally:
            await channel.close()

    def _take(self, view: fleet_pb2.FleetView, tasks: asyncio.TaskGroup) -> None:
        """Takes over the supervisor's view: workers join, leave, or change their state.

        A restarted supervisor lists workers as STARTING until it has found them. Such workers stay, with what is known
        of them. A worker that has died is listed as DEAD before it is listed as STARTING.
        """
        listed: set[WorkerId] = set()
        self._awaits_decode = False
        for entry in view.workers:
            worker_id, epoch = WorkerId(entry.worker_id), _usable_epoch(entry)
            self._awaits_decode |= entry.returns and entry.role == Role.DECODE
            if epoch is None:
                self._awaits_decode |= entry.role == Role.DECODE
                if entry.state == WORKER_STATE_STARTING:
                    listed.add(worker_id)
                continue
            if epoch < self._latest.get(worker_id, epoch):
                self._metrics.stale_epochs_refused_total.inc()
                latest = self._latest[worker_id]
                log.warning("stale epoch refused worker=%s epoch=%s latest=%s", worker_id, epoch, latest)
                continue
            listed.add(worker_id)
            known = self._workers.get(worker_id)
            if known is not None and (known.epoch, known.address) == (epoch, entry.address):
                known.state = entry.state
                continue
            if known is not None:
                self._leave(known, f"epoch {epoch} has begun")
            self._join(Worker(worker_id, Role(entry.role), entry.address, epoch, entry.state), tasks)
        for worker in self.workers:
            if worker.worker_id not in listed:
                self._leave(worker, "the supervisor lists no serving process of it")
        if view.fingerprint:
            self._route_to(view.fingerprint)
        self._events.follow_routers(view.routers, tasks)
        self._scaling.take(view.scaling)
        self.named_models = self._named_in(view)
        self._note_change()

    def _route_to(self, fingerprint: str) -> None:
        """Has new requests go to the workers with this fingerprint. Others finish the requests that they have."""
        if self._is_told_fingerprint and fingerprint == self.fingerprint:
            return
        log.info("requests go to other weights fingerprint=%s before=%s", fingerprint, self.fingerprint)
        self._is_told_fingerprint, self.fingerprint = True, fingerprint
        for worker in self._workers.values():
            worker.has_other_weights = worker.fingerprint not in ("", fingerprint)
        self._restate_facts()

    def _join(self, worker: Worker, tasks: asyncio.TaskGroup) -> None:
        log.info("worker joins worker=%s epoch=%s address=%s", worker.worker_id, worker.epoch, worker.address)
        self._latest[worker.worker_id] = worker.epoch
        self._workers[worker.worker_id] = worker
        self.detector.begin(worker)
        feed = Feed(worker, self._feed_dependencies)
        self._followers[worker.worker_id] = tasks.create_task(feed.run(), name=f"feed {worker.worker_id}")

    def _leave(self, worker: Worker, reason: str) -> None:
        log.info(
            "worker leaves worker=%s epoch=%s liveness=%s reason=%s",
            worker.worker_id,
            worker.epoch,
            worker.liveness,
            reason,
        )
        self.detector.end(worker)
        self._followers.pop(worker.worker_id).cancel()
        del self._workers[worker.worker_id]
        self._events.forget(worker.worker_id)
        self._restate_facts()
        self._on_gone(worker, reason)

    def _judged(self, worker: Worker, change: Change) -> None:
        worker.liveness = change.now
        if change.now is Liveness.DEAD:
            self._on_gone(worker, f"{change.cause}: {change.signals}")
        elif change.before is Liveness.DEAD:
            self._on_back(worker)
        self._note_change()

    def _note_change(self) -> None:
        """Wakes all tasks that wait for a change of the fleet, and calls the listeners."""
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._change_listeners:
            listener()
        self._note_report()

    def _note_report(self) -> None:
        for listener in self._report_listeners:
            listener()

    def _accept(self, worker: Worker) -> None:
        """Accepts a worker that has introduced itself, or refuses it until its epoch ends."""
        assert worker.server is not None
        shown = worker.server.fingerprint
        if self.fingerprint is None:
            self.fingerprint = shown
        worker.has_other_weights = self._is_told_fingerprint and shown != self.fingerprint
        if worker.has_other_weights:
            log.info("worker has other weights worker=%s epoch=%s", worker.worker_id, worker.epoch)
        if shown != self.fingerprint and not worker.has_other_weights:
            worker.refusal = f"fingerprint {shown} is not the fleet's {self.fingerprint}"
        elif self._tokenizer is not None and not is_of(self._tokenizer, shown):
            worker.refusal = f"its fingerprint {shown} has another tokenizer than this router's {self._tokenizer}"
        else:
            worker.refusal = self._other_form(worker)
        if worker.refusal is not None:
            log.error(
                "worker refused worker=%s epoch=%s reason=%s: it does not serve the same KV; "
                "restart it with the fleet's model and formats, or this router with the new fleet",
                worker.worker_id,
                worker.epoch,
                worker.refusal,
            )
        self._restate_facts()
        self._note_change()

    def _other_form(self, worker: Worker) -> str | None:
        """Returns why the form of the worker's pages does not fit the fleet's. None: it fits."""
        form, known = worker.kv_form, self._forms.get(worker.role)
        if known not in (form, None):
            return f"its pages are {form}, those of the fleet's {worker.role.value} workers are {known}"
        forms = {**self._forms, worker.role: form}
        prefill, decode = forms.get(Role.PREFILL), forms.get(Role.DECODE)
        if prefill is not None and decode is not None and not decode.takes(prefill):
            return f"pages of decode workers are {decode}, and those of prefill workers {prefill}"
        self._forms = forms
        return None

    def _restate_facts(self) -> None:
        """Makes the facts from the present decode workers. Without any, the last facts stay."""
        current = (worker for worker in self.decode_workers() if not worker.has_other_weights)
        models = [worker.model for worker in current if worker.model is not None]
        if not models:
            return
        assert self.fingerprint is not None, "taken from the first worker that introduced itself"
        model, pool_pages = models[0], min(model.pool_pages for model in models)
        self._facts = ServingFacts(
            **{name: getattr(model, name) for name in SAME_FACTS},
            eos_token_ids=tuple(model.eos_token_ids),
            pool_tokens=pool_pages * model.block_size,
            pool_pages=pool_pages,
            kv_form=form_of(model),
            fingerprint=self.fingerprint,
        )


def _usable_epoch(entry: fleet_pb2.WorkerEntry) -> Epoch | None:
    """Returns the listed epoch of a worker that serves or drains, or None."""
    if entry.role not in (Role.PREFILL, Role.DECODE) or not entry.address:
        return None
    if entry.state not in (WORKER_STATE_SERVING, WORKER_STATE_DRAINING):
        return None
    try:
        return Epoch.parse(entry.epoch)
    except ValueError:
        log.error("worker ignored worker=%s epoch=%r: not an epoch", entry.worker_id, entry.epoch)
        return None
