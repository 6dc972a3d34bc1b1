"""The request manager opens, pulls for, streams and closes all requests of a decode worker."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections import defaultdict
from collections.abc import Iterable

from decode_worker.grammar_metrics import GrammarMetrics
from decode_worker.grammars import Grammars
from decode_worker.local_prefill import LocalPrefill
from decode_worker.output_stream import OutputStream
from decode_worker.request_check import check_deadline, check_request
from decode_worker.request_state import RequestState, RequestTrace, Stage, facts_of_drafts
from decode_worker.service import DecodeService
from decode_worker.speculations import SpeculationMetrics, Speculations
from twostroke.config import Role
from twostroke.errors import (
    Cancelled,
    DeadlineExceeded,
    EngineLost,
    InvalidRequest,
    NonFiniteLogits,
    NotFound,
    ServeError,
    StepFailed,
)
from twostroke.fault_points import Point, reach
from twostroke.grammar.state import GrammarState
from twostroke.ids import RequestId, WorkerId
from twostroke.lifetime import Instant
from twostroke.request import FinishReason, Request
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostroke.scheduler.batching import Step
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import AdmittedSequence, Emission
from twostroke.worker.host import WorkerHost
from twostroke.worker.pins.keeper import PinKeeper
from twostroke.worker.pulls.ordered_pull import ExpectedPages, OrderedPull
from twostroke.worker.pulls.pages_service import CachedOnlyJob, RequestedBlocks
from twostroke.worker.pulls.peer_pulls import PeerPulls
from twostroke.worker.pulls.pull_spec import PullReport, PullSpec, unwritten_windows, windows_of
from twostroke.worker.role_host import RoleHost, first_token_due_s
from twostroke.worker.worker import RoleServices

log = logging.getLogger(__name__)


class RequestManager(RoleServices):
    def __init__(self, host: RoleHost, tasks: asyncio.TaskGroup) -> None:
        self._host = host
        self._tasks = tasks
        self._requests: dict[RequestId, RequestState] = {}
        self._by_sequence: dict[Sequence, RequestState] = {}
        self._output_streams: dict[str, OutputStream] = {}
        self._local_prefill = LocalPrefill(host)
        self._peer_pulls = PeerPulls(host, tasks)
        metrics = SpeculationMetrics(host.metrics.registry, Role.DECODE.value)
        self._speculations = Speculations(host.config.schedule, host.determinism, metrics)
        self._grammars = Grammars(host.facts, GrammarMetrics(host.metrics.registry, Role.DECODE.value))

    # Calls by routers

    def open(
        self,
        request: Request,
        source: worker_pb2.PageSource | None = None,
        peer: PeerPrefix | None = None,
        forecast: worker_pb2.SourceForecast | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        """Queue a request; it replaces an earlier attempt of the same id, and any that has ended.

        Raises InvalidRequest, DeadlineExceeded or Overloaded; then nothing of this attempt is left behind.
        """
        reach(Point.DECODE_OPENING)
        host = self._host
        check_request(request, host.facts, time.time())
        self._speculations.check(request)
        if request.scores_prompt:
            source = peer = forecast = None  # pages that are here, or come, bring no logits
        self._drop_earlier(request)
        sequence = self._sequence(request)
        sequence.grammar = grammar
        sequence.speculation = self._speculations.of(request, grammar)
        sequence.pulled_blocks = len(request.block_hashes) if source else peer.blocks if peer else 0
        state = RequestState(
            request, sequence, source, host.facts.block_size, RequestTrace(host.recorder, request), peer, forecast
        )
        state.has_windows = host.pool.windows is not None
        host.scheduler.enqueue(state.sequence)
        state.lifetime.mark(Instant.OPENED)
        self._requests[request.request_id] = state
        self._by_sequence[state.sequence] = state
        self.output_stream(request.router_id).carry(state, state.first_position)
        self._set_timer(state)
        log.info(
            "opened request=%s attempt=%d known=%d source=%s peer=%s",
            request.request_id, request.attempt, len(state.sequence.known),
            source.worker_id if source else "local", peer.worker.worker_id if peer else "none",
        )  # fmt: skip
        host.loop.wake()
        reach(Point.DECODE_QUEUED)

    def close_request(self, request_id: RequestId, attempt: int) -> None:
        """Free everything that a request holds; closing an unknown request is no error."""
        reach(Point.DECODE_CLOSING)
        state = self._requests.get(request_id)
        if state is not None and not self._is_late(state, attempt) and attempt <= state.request.attempt:
            self._drop(state, Cancelled("closed by its router"))

    def attach(self, request_id: RequestId, attempt: int, router_id: str, from_position: int) -> None:
        """Send a request's tokens from a position on over the stream of this router."""
        reach(Point.DECODE_ATTACHING)
        state = self._attachable(request_id, attempt, router_id, from_position)
        self.output_stream(state.request.router_id).drop(state)
        state.request = dataclasses.replace(state.request, router_id=router_id)
        self.output_stream(router_id).carry(state, from_position)

    def reattach(self, wanted: worker_pb2.AttachRequest) -> None:
        """Attach under a later attempt, so that calls of the previous router are stale. Raises as `attach` does."""
        reach(Point.DECODE_ATTACHING)
        request_id, router_id = RequestId(wanted.request_id), wanted.router_id
        state = self._attachable(request_id, wanted.attempt, router_id, wanted.from_position)
        if wanted.new_attempt <= wanted.attempt:
            raise InvalidRequest(
                f"attempt {wanted.new_attempt} is not later than {wanted.attempt}", field="new_attempt"
            )
        deadline_s = wanted.deadline_s if wanted.HasField("deadline_s") else None
        if deadline_s is not None:
            check_deadline(deadline_s)
        self._detach(state, router_id)
        self.output_stream(state.request.router_id).drop(state)
        state.request = dataclasses.replace(
            state.request,
            router_id=router_id,
            attempt=wanted.new_attempt,
            deadline_s=deadline_s,
        )
        if not state.has_ended:
            self._set_timer(state)
        self.output_stream(router_id).carry(state, wanted.from_position)
        log.info("reattached request=%s attempt=%d router=%s", request_id, wanted.new_attempt, router_id)

    def find(self, stream: str) -> list[worker_pb2.RequestSnapshot]:
        """Return what is known of the requests of one client stream, open or ended."""
        begins = f"{stream}#"
        return [state.snapshot() for name, state in self._requests.items() if name.startswith(begins)]

    def output_stream(self, router_id: str) -> OutputStream:
        output_stream = self._output_streams.get(router_id)
        if output_stream is None:
            config = self._host.config
            output_stream = self._output_streams[router_id] = OutputStream(
                config.runtime.orphan_grace_s,
                config.patience.heartbeat_s,
                lambda requests: self._abandon(router_id, requests),
            )
        return output_stream

    # Calls by the work loop

    def ordered_pull(self, sequence: Sequence) -> OrderedPull | None:
        state = self._by_sequence[sequence]
        expected = self._expected_pages(state)
        if expected is None:
            return None
        return OrderedPull(
            expected,
            lambda blocks: self._pull_given_up(state, blocks),
            lambda blocks: self._pull_given_up_windows(state, blocks),
        )

    def admitted(self, admission: AdmittedSequence) -> None:
        reach(Point.DECODE_ADMITTED)
        state = self._by_sequence[admission.sequence]
        state.move_to(Stage.RESERVED)
        state.lifetime.mark(Instant.ADMITTED)
        if not admission.sequence.preemptions and not state.has_windows:
            needs_all = admission.sequence.needs_scores
            state.missing_blocks = len(state.request.block_hashes if needs_all else admission.missing)
        if self._began(state, self._start_pull(state, admission.missing, admission.missing_windows)):
            state.move_to(Stage.PULLING)
        else:
            state.move_to(Stage.RUNNING)

    def planning(self) -> None:
        if self._host.config.schedule.local_prefill:
            self._local_prefill.consider(self._by_sequence.values())

    def preempted(self, sequence: Sequence) -> None:
        reach(Point.DECODE_PREEMPTED)
        state = self._by_sequence[sequence]
        state.move_to(Stage.WAITING)
        state.pulls.clear()
        if state.source is not None:
            sequence.pulled_blocks = len(sequence.known) // state.block_size
        self._host.pulls.prune()

    def emitted(self, emissions: list[Emission]) -> None:
        if emissions:
            reach(Point.DECODE_SAMPLED)
        pulling = Stage.PULLING
        updated: defaultdict[str, list[RequestState]] = defaultdict(list)
        for sequence, token, finish in emissions:
            state = self._by_sequence[sequence]
            if finish is FinishReason.ERROR:
                self._fail(state, _unsampled(sequence))
                continue
            state.tokens.append(token)
            if len(state.tokens) == 1:
                state.trace.first_token(sequence.steps)
                state.lifetime.mark(Instant.FIRST_TOKEN)
            if state.stage is pulling:  # its blocks arrived through other pulls
                state.move_to(Stage.RUNNING)
            if finish is not None:
                state.finish = finish
                self._end(state, Stage.DONE)
            updated[state.request.router_id].append(state)
        for router_id, states in updated.items():
            self.output_stream(router_id).notify(*states)

    def computed(self, step: Step, seconds: float) -> None:
        for chunk in step.chunks:
            state = self._by_sequence.get(chunk.sequence)
            if state is not None and chunk.end - chunk.start > 1:
                state.trace.chunks.ran(chunk.start, chunk.end, seconds)

    def failed(self, sequences: list[Sequence], error: Exception) -> None:
        reason = f"the engine could not compute this request: {type(error).__name__}: {error}"
        for sequence in sequences:
            self._fail(self._by_sequence[sequence], StepFailed(reason))

    def lost(self, error: EngineLost) -> None:
        for state in list(self._by_sequence.values()):
            self._fail(state, error)

    # Calls by the worker

    def register(self, host: WorkerHost, pins: PinKeeper) -> None:
        worker_pb2_grpc.add_DecodeServicer_to_server(
            DecodeService(self, host.validator, pins.hint, self._grammars), host.rpc.server
        )
        host.rpc.offer("twostroke.v1.Decode")

    def begin(self, wanted: RequestedBlocks) -> CachedOnlyJob:
        """Serve a pull from the cache alone: a decode worker computes only for its own requests."""
        return CachedOnlyJob(self._host.pool, wanted, self._host.loop.wake)

    @property
    def open_requests(self) -> int:
        return len(self._by_sequence)

    def close(self) -> None:
        for state in list(self._requests.values()):
            self._drop(state, Cancelled("the worker shuts down"))
        self._local_prefill.close()
        self._grammars.close()
        for output_stream in self._output_streams.values():
            output_stream.close()

    # Internals

    def _drop_earlier(self, request: Request) -> None:
        """Drop an earlier attempt of a request. Raises InvalidRequest if this one comes too late."""
        earlier = self._requests.get(request.request_id)
        if earlier is None:
            return
        is_same = request.attempt == earlier.request.attempt
        if not earlier.has_ended and (is_same or self._is_late(earlier, request.attempt)):
            raise InvalidRequest(
                f"request {request.request_id} is open already, as attempt {earlier.request.attempt}; "
                f"attempt {request.attempt} comes too late",
                field="request_id",
            )
        self._detach(earlier, request.router_id)
        self._drop(earlier, Cancelled("a later attempt replaced it"))

    def _attachable(self, request_id: RequestId, attempt: int, router_id: str, from_position: int) -> RequestState:
        state = self._requests.get(request_id)
        is_late = state is not None and self._is_late(state, attempt)
        if state is not None and is_late and state.request.router_id != router_id:
            raise _attached_by(state.request.router_id)
        if state is None or is_late or attempt > state.request.attempt:
            raise NotFound(f"request {request_id} attempt {attempt} is not here")
        if not state.first_position <= from_position <= state.end_position:
            raise InvalidRequest(
                f"positions {state.first_position} to {state.end_position} can be attached to, got {from_position}",
                field="from_position",
            )
        return state

    def _is_late(self, state: RequestState, attempt: int) -> bool:
        """Tell whether a call is about an attempt that a later one has replaced, and count it."""
        if attempt >= state.request.attempt:
            return False
        self._host.metrics.stale_attempts.inc()
        return True

    def _detach(self, state: RequestState, router_id: str) -> None:
        """Notify the router that had the request, so that it does not recover the stream elsewhere."""
        if state.request.router_id != router_id:
            self.output_stream(state.request.router_id).detach(state, state.detach_notice(_attached_by(router_id)))

    def _set_timer(self, state: RequestState) -> None:
        if state.timer is not None:
            state.timer.cancel()
        if state.request.deadline_s is not None:
            delay_s = state.request.deadline_s - time.time()
            state.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, state)

    def _sequence(self, request: Request) -> Sequence:
        return Sequence(
            request.request_id,
            self._host.new_session(),
            request.known,
            len(request.prompt),
            [] if request.scores_prompt else list(request.block_hashes),
            request.salt,
            request.sampling,
            public_blocks=request.public_blocks,
            adapter=request.adapter,
            needs_scores=request.scores_prompt,
            due_s=first_token_due_s(self._host),
        )

    def _start_pull(
        self, state: RequestState, missing: list[int], windows: Iterable[int] = ()
    ) -> asyncio.Future[PullReport] | None:
        """Pull all missing blocks, and these window parts, from the page source, or without one what a peer holds."""
        sequence, source, peer = state.sequence, state.source, state.peer
        if source is None:
            return self._pull_from_peer(state, peer, missing, windows) if peer is not None else None
        if not missing and not windows:
            return None
        spec = PullSpec(
            sequence.request_id,
            self._host.new_session(),
            source,
            list(sequence.known),
            list(sequence.block_hashes),
            {block: sequence.pages[block] for block in missing},
            peer,
            deadline_s=state.request.deadline_s,
            trace=state.trace.span,
            adapter=sequence.adapter,
            windows=windows_of(sequence, windows),
        )
        return self._host.pulls.start(spec, self._tasks)

    def _expected_pages(self, state: RequestState) -> ExpectedPages | None:
        """Return what the page source will send, or without one the peer; None while nothing is known of that."""
        if state.source is None:
            return None if state.peer is None else self._peer_pulls.expected(state.peer)
        if state.forecast is None or state.sequence.preemptions:  # the forecast was for its first pull
            return None
        link = self._host.pulls.links.of(WorkerId(state.source.worker_id))
        blocks = len(state.request.block_hashes)
        return ExpectedPages.of_source(state.forecast, blocks, link, self._host.facts.page_bytes)

    def _pull_given_up(self, state: RequestState, blocks: list[int]) -> None:
        """Pull blocks whose load was given up."""
        unwritten = self._host.pool.unwritten_blocks(state.sequence.pages, blocks)
        if not unwritten or state.has_ended:
            return
        if not state.sequence.preemptions and not state.has_windows:
            state.missing_blocks += len(unwritten)
        self._began(state, self._start_pull(state, unwritten))

    def _pull_given_up_windows(self, state: RequestState, blocks: list[int]) -> None:
        unwritten = unwritten_windows(state.sequence, self._host.pool, blocks)
        if unwritten and not state.has_ended:
            self._began(state, self._start_pull(state, [], unwritten))

    def _pull_from_peer(
        self, state: RequestState, peer: PeerPrefix, blocks: list[int], windows: Iterable[int] = ()
    ) -> asyncio.Future[PullReport] | None:
        return self._peer_pulls.start(state.sequence, peer, blocks, windows, trace=state.trace.span)

    def _began(self, state: RequestState, pull: asyncio.Future[PullReport] | None, *, is_second: bool = False) -> bool:
        if pull is None:
            return False
        state.pulls.add(pull)
        pull.add_done_callback(lambda ended: self._pull_ended(state, ended, is_second=is_second))
        return True

    def _pull_ended(self, state: RequestState, pull: asyncio.Future[PullReport], *, is_second: bool) -> None:
        report = None if pull.cancelled() else pull.result()
        if report is not None:
            state.pulled(report)
        if pull not in state.pulls or state.has_ended:
            return
        state.pulls.remove(pull)
        if report is not None and report.failure is not None and not is_second:
            self._began(state, self._start_second_pull(state), is_second=True)
        if not state.pulls and state.stage is Stage.PULLING:
            state.move_to(Stage.RUNNING)

    def _start_second_pull(self, state: RequestState) -> asyncio.Future[PullReport] | None:
        """Fetch from the peer what the failed page source was to fetch there, before more is computed here."""
        peer, source = state.peer, state.source
        if peer is None or source is None or peer.worker.worker_id == source.worker_id:
            return None
        blocks = range(len(state.request.block_hashes))
        windows = self._host.scheduler.pull_to(state.sequence, peer.blocks)
        return self._pull_from_peer(
            state, peer, self._host.pool.unwritten_blocks(state.sequence.pages, blocks), windows
        )

    def _expire(self, state: RequestState) -> None:
        self._fail(state, DeadlineExceeded("the request's deadline has passed"))

    def _abandon(self, router_id: str, requests: list[RequestState]) -> None:
        """Abort requests that no router has attached to within the grace period."""
        if not self._output_streams[router_id].is_connected:
            self._output_streams.pop(router_id).close()
        log.info("abandoned router=%s requests=%d", router_id, len(requests))
        for state in requests:
            self._drop(state, Cancelled("its router went away"))

    def _fail(self, state: RequestState, error: ServeError) -> None:
        state.error = error
        self._end(state, Stage.FAILED)
        self.output_stream(state.request.router_id).notify(state)

    def _drop(self, state: RequestState, error: ServeError) -> None:
        """End a request without a message, and keep nothing of it."""
        if not state.has_ended:
            state.error = error
            self._end(state, Stage.FAILED)
        self._forget(state)

    def _end(self, state: RequestState, stage: Stage) -> None:
        """Free what the request holds; its state stays until the router has had time to fetch the end."""
        state.move_to(stage)
        state.lifetime.mark(Instant.DONE)
        del self._by_sequence[state.sequence]
        if state.sequence.grammar is not None:
            self._grammars.ended(state.sequence.grammar)
        if stage is Stage.DONE:
            self._speculations.finished(state.sequence)
        self._host.scheduler.end(state.sequence)
        self._host.pulls.prune()
        self._host.loop.wake()
        self._host.progress.notify()
        self._host.feed.publish()  # routers count its slot as taken until they learn otherwise
        if state.timer is not None:
            state.timer.cancel()
        grace_s = self._host.config.runtime.orphan_grace_s
        state.timer = asyncio.get_running_loop().call_later(grace_s, self._forget, state)
        outcome = state.finish or type(state.error).__name__
        drafts = "".join(f" {name}={tokens}" for name, tokens in facts_of_drafts(state.sequence.speculation).items())
        log.info("done request=%s tokens=%d outcome=%s%s", state.request.request_id, len(state.tokens), outcome, drafts)

    def _forget(self, state: RequestState) -> None:
        assert state.timer is not None
        state.timer.cancel()
        del self._requests[state.request.request_id]
        output_stream = self._output_streams.get(state.request.router_id)
        if output_stream is not None:
            output_stream.drop(state)


def _unsampled(sequence: Sequence) -> ServeError:
    """Return why a sequence got no token."""
    failure = None if sequence.grammar is None else sequence.grammar.failure
    if failure is not None:
        return InvalidRequest(failure, field="grammar")
    return NonFiniteLogits("the model's numbers overflowed for this request: no token to draw")


def _attached_by(router_id: str) -> Cancelled:
    return Cancelled(f"{router_id} goes on with this stream")
