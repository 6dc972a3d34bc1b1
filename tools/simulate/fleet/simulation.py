"""Plays a trace against a simulated fleet in virtual time; everything that decides is the real object."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

from tools.simulate.fleet.event_queue import EventQueue
from tools.simulate.fleet.results import EventUse, Gaps, RequestOutcome, SimulatedRun, WorkerUse
from tools.simulate.fleet.routing.router import RouterDependencies, SimulatedRouter
from tools.simulate.fleet.routing.simulated_routing import RoutingSetup
from tools.simulate.fleet.scaling import ScaledWorkers, Scaler
from tools.simulate.fleet.shape import Death, FleetShape, RouterRestart
from tools.simulate.fleet.simulated_request import SimulatedRequest
from tools.simulate.fleet.worker.host import Parts, SharedFleet, SimulatedHost, parts_of
from tools.simulate.fleet.worker.steps import TOKEN
from tools.simulate.fleet.worker.worker_lifecycle import WorkerLifecycle
from tools.simulate.traces.trace import Trace, TraceRow
from twostroke.base.errors import ConfigError, InternalError
from twostroke.base.ids import BlockHash, RequestId
from twostroke.kv_cache.block import HASH_BYTES, hash_block
from twostroke.kv_cache.groups.page_state import PageState

WARM_UP_S = 0.1
"""Seconds before the first request, in which routers meet their workers."""
QUIET_S = 2.0
"""Seconds after the last answer, by which indexes must be the workers' sets."""
END_S = 0.01
"""Seconds for tasks that are cancelled to end."""
MOST_SPAN_S = 1e7
"""Longest span of a trace: more is a mistake in one of its times, and heartbeats would be simulated for hours."""
STUCK_S = 3600.0
"""Seconds without the end of a request after which a run is stuck: no request of any trace takes that long."""


def simulate(
    trace: Trace, shape: FleetShape, setup: RoutingSetup, scaler: Scaler | None = None, parts: Parts | None = None
) -> SimulatedRun:
    """Simulates a trace. `trace` must be in order (see tools.simulate.traces.trace.replayed), with blocks of the
    fleet's size. `scaler` says how many of the shape's workers there are; without one, all.
    """
    if trace.block_tokens != shape.block_size:
        raise ConfigError(
            f"{trace.name} has blocks of {trace.block_tokens} tokens; this fleet's have {shape.block_size}",
            field="block_size",
        )
    _check_lengths(trace, shape)
    check_span(trace)
    begun_s = time.thread_time()
    run = _Simulation(trace, shape, setup, scaler, parts)
    run.play()
    return run.result(time.thread_time() - begun_s)


def _check_lengths(trace: Trace, shape: FleetShape) -> None:
    """Refuses what can never fit, as a live decode worker does (decode_worker.request_manager)."""
    longest, fits = max(trace.rows, key=lambda row: row.input_tokens + row.output_tokens), shape.decode_pool_tokens
    if longest.input_tokens + longest.output_tokens > fits:
        raise ConfigError(
            f"{trace.name} has a request of {longest.input_tokens} + {longest.output_tokens} tokens; all pages of a "
            f"decode worker hold {fits} (see --decode-pool-tokens)",
            field="decode_pages",
        )


def check_span(trace: Trace) -> None:
    """Raises ConfigError for a trace with so much silence that it would take hours to simulate."""
    span_s = trace.rows[-1].timestamp_s - trace.rows[0].timestamp_s
    if span_s > MOST_SPAN_S:
        raise ConfigError(
            f"{trace.name}: {span_s:.3g} s lie between its first and its last request; {MOST_SPAN_S:g} are the most",
            field="timestamp",
        )


class _Simulation:
    def __init__(
        self, trace: Trace, shape: FleetShape, setup: RoutingSetup, scaler: Scaler | None, parts: Parts | None
    ) -> None:
        self._trace = trace
        self._shape = shape
        self._setup = setup
        self._queue = EventQueue()
        self._fleet = SharedFleet(self._queue, shape, parts or parts_of(shape, self._queue))
        self._workers = WorkerLifecycle(self._fleet, None if scaler is None else scaler.begin)
        self._events = EventUse()
        self._outcomes: list[RequestOutcome] = []
        self._last_end_s = 0.0
        self._draws = random.Random(f"{shape.seed} routers")
        self._continuations = Continuations(shape.block_size, name_of)
        dependencies = RouterDependencies(self._queue, shape, self._workers, self._events, self._over)
        self._routers = [
            SimulatedRouter(number, setup(shape, number, self._events), dependencies) for number in range(shape.routers)
        ]
        for router in self._routers:
            router.others = [other for other in self._routers if other is not router]
            for host in self._workers.alive:
                router.join(host)
        self._scaled = (
            None if scaler is None else ScaledWorkers(self._queue, self._workers, scaler, self._join, self._leave)
        )

    def play(self) -> None:
        queue, rows = self._queue, self._trace.rows
        for index, row in enumerate(rows):
            queue.at(WARM_UP_S + row.timestamp_s, partial(self._arrive, index, row))
        queue.at(WARM_UP_S + rows[-1].timestamp_s, self._workers.reach_span_end)
        for death in self._shape.faults.deaths:
            queue.at(WARM_UP_S + death.at_s, partial(self._die, death))
        for restart in self._shape.faults.router_restarts:
            queue.at(WARM_UP_S + restart.at_s, partial(self._restart, restart))
        queue.after(STUCK_S, self._watch)
        with self._fleet.loop.running():
            queue.run()
        self._workers.check_quiet()
        for router in self._routers:
            held = router.routing.reservations
            assert not held, f"{router.name} still holds {held} reservations"

    def result(self, cpu_s: float) -> SimulatedRun:
        routings = [router.routing for router in self._routers]
        first_s = self._trace.rows[0].timestamp_s
        return SimulatedRun(
            policy=self._setup.policy,
            outcomes=tuple(sorted(self._outcomes, key=lambda outcome: outcome.index)),
            workers=tuple(self._use(host) for host in self._workers.latest),
            events=self._events,
            gaps=Gaps(dict(self._fleet.gaps)),
            span_s=self._trace.rows[-1].timestamp_s - first_s,
            duration_s=self._last_end_s - WARM_UP_S - first_s,
            decisions=sum(routing.decisions for routing in routings),
            decision_cpu_s=sum(routing.decision_cpu_s for routing in routings),
            cpu_s=cpu_s,
            unequal_indexes=tuple(self._unequal_indexes()),
            worker_s=self._worker_s(),
            scalings=0 if self._scaled is None else self._scaled.changes,
        )

    def _worker_s(self) -> float:
        if self._scaled is None:
            return (self._shape.prefill + self._shape.decode) * self._last_end_s
        return self._scaled.worker_seconds(self._last_end_s)

    def _join(self, host: SimulatedHost) -> None:
        for router in self._routers:
            router.join(host)

    def _leave(self, host: SimulatedHost) -> None:
        for router in self._routers:
            router.leave(host)

    def _arrive(self, index: int, row: TraceRow) -> None:
        shape = self._shape
        if self._scaled is not None:
            self._scaled.arrived += 1
        numbers = row.blocks[: row.input_tokens // shape.block_size]
        if self._trace.repeats_answers:
            block_hashes = self._continuations.named(numbers, row.input_tokens, row.output_tokens)
        else:
            block_hashes = [name_of(number) for number in numbers]
        request = SimulatedRequest(
            index=index,
            request_id=RequestId(f"{index}#0"),
            arrived_s=self._queue.now_s,
            prompt_tokens=row.input_tokens,
            answer_tokens=row.output_tokens,
            block_hashes=block_hashes,
            tenant=row.tenant,
            priority=row.priority,
        )
        self._fleet.requests[request.request_id] = request
        turn = index if shape.routers_by_turn else self._draws.randrange(shape.routers)
        self._ask(request, self._routers[turn % shape.routers])

    def _ask(self, request: SimulatedRequest, router: SimulatedRouter) -> None:
        self._queue.after(self._shape.delays.frontend_s, lambda: router.take(request))

    def _over(self, outcome: RequestOutcome) -> None:
        self._outcomes.append(outcome)
        del self._fleet.requests[RequestId(f"{outcome.index}#0")]
        if self._scaled is not None:
            self._scaled.over(outcome)
        self._last_end_s = self._queue.now_s
        if len(self._outcomes) == len(self._trace.rows):
            self._queue.after(QUIET_S, self._end)

    def _end(self) -> None:
        """Ends the token streams, which nobody reads any more, and then the run."""
        for service in self._workers.decode_services:
            service.end_streams()
        self._queue.after(END_S, self._queue.stop)

    def _watch(self) -> None:
        """Heartbeats never end: a request that is never answered must end the run."""
        waits_s = self._queue.now_s - self._last_end_s
        arrived = sum(WARM_UP_S + row.timestamp_s <= self._queue.now_s - STUCK_S for row in self._trace.rows)
        if waits_s >= STUCK_S and arrived > len(self._outcomes):
            raise InternalError(f"no request of the simulation has ended for {waits_s:.0f} s")
        self._queue.after(STUCK_S, self._watch)

    def _die(self, death: Death) -> None:
        host = self._workers.host(death.worker)
        attempts = [(request, request.attempts) for request in self._workers.end(death.worker)]
        self._queue.after(self._shape.delays.detection_s, partial(self._notice, host, attempts))
        if death.back_at_s is not None:
            self._queue.at(WARM_UP_S + death.back_at_s, lambda: self._join(self._workers.begin(death.worker)))

    def _notice(self, host: SimulatedHost, lost: list[tuple[SimulatedRequest, int]]) -> None:
        self._leave(host)
        for request, attempt in lost:
            for router in self._routers:
                router.lost(request, attempt)

    def _restart(self, restart: RouterRestart) -> None:
        router = self._routers[restart.router]
        for request in router.restart(self._setup(self._shape, restart.router, self._events)):
            self._ask(request, router)

    def _use(self, host: SimulatedHost) -> WorkerUse:
        pool = host.pool
        return replace(host.use, pages=pool.total, pages_cached=pool.count(PageState.CACHED))

    def _unequal_indexes(self) -> list[str]:
        """Returns what the routers have of each worker, held against its own log."""
        unequal: list[str] = []
        for router in self._routers:
            for host in self._workers.listed:
                told, has = router.routing.blocks(host.worker), host.log.snapshot()
                if told is None or (told.block_count, told.digest) != (has.block_count, has.digest):
                    unequal.append(f"{router.name} {host.worker}")
        return unequal


@lru_cache(maxsize=1 << 18)
def name_of(number: int) -> BlockHash:
    """Returns the hash of the block that has this number in a trace."""
    return BlockHash(hashlib.blake2b(b"trace %d" % number, digest_size=HASH_BYTES).digest())


class Continuations:
    """Names the blocks of one prompt after the other, in the order in which they come.

    A request log names only the blocks of prompts. A later prompt may begin with all blocks of an earlier one, as in a
    chat. What follows is taken to be the answer to the earlier one. So the worker that gave the answer holds these
    blocks: they have the hashes that the simulated answer's blocks got.
    """

    def __init__(self, block_size: int, name_of: Callable[[int], BlockHash]) -> None:
        self._block_size = block_size
        self._name_of = name_of
        self._named: dict[int, BlockHash] = {}
        """Hashes of the numbers that stand for blocks of answers."""
        self._answers: dict[BlockHash, int] = {}
        """The blocks that an answer fills, by the last block before them. It holds answers that no prompt has continued
        yet, or the rest of them."""

    def named(self, numbers: Sequence[int], input_tokens: int, output_tokens: int) -> list[BlockHash]:
        """Returns the hashes of a prompt's full blocks, given their numbers in the trace."""
        hashes: list[BlockHash] = []
        for number in numbers:
            hashes.append(self._hash(number, hashes[-1] if hashes else None))
        filled = (input_tokens + output_tokens - 1) // self._block_size - len(hashes)
        if hashes and filled > 0:
            self._answers.setdefault(hashes[-1], filled)
        return hashes

    def _hash(self, number: int, parent: BlockHash | None) -> BlockHash:
        if number in self._named:
            return self._named[number]
        filled = self._answers.pop(parent, 0) if parent is not None else 0
        if not filled:
            return self._name_of(number)
        assert parent is not None, "an answer has a block before it"
        found = self._named[number] = hash_block(parent, [TOKEN] * self._block_size)
        if filled > 1:
            self._answers[found] = filled - 1
        return found
