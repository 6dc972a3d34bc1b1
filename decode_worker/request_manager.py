"""The request manager opens, pulls for, streams and closes all requests of a decode worker."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from decode_worker.local_prefill import LocalPrefill
from decode_worker.output_stream import OutputStream
from decode_worker.request_state import RequestState, RequestTrace, Stage
from twostroke.base.errors import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    EngineLost,
    InvalidRequest,
    NotFound,
    ServeError,
    StepFailed,
)
from twostroke.base.fault_points import Point, reach
from twostroke.base.ids import RequestId
from twostroke.base.lifetime import Instant
from twostroke.engine.backends.facts import LoadedModel
from twostroke.request import Attempt, FinishReason, highest_token
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2
from twostroke.scheduler.batching import Step
from twostroke.scheduler.sequence import Sequence
from twostroke.scheduler.values import AdmittedSequence, Emission
from twostroke.worker.answers import AnswerFeatures
from twostroke.worker.role_host import RoleHost, first_token_due_s
from twostroke.worker.services.pages_service import CachedOnlyJob, RequestedBlocks
from twostroke.worker.supply.remote import Ordered, Supplies
from twostroke.worker.worker import RoleServices

log = logging.getLogger(__name__)


class RequestManager(RoleServices):
    def __init__(
        self, host: RoleHost, tasks: asyncio.TaskGroup, new_stream: Callable[..., OutputStream] = OutputStream
    ) -> None:
        """`new_stream` makes the token stream of a router."""
        self._host = host
        self._new_stream = new_stream
        self._requests: dict[RequestId, RequestState] = {}
        self._by_sequence: dict[Sequence, RequestState] = {}
        self._output_streams: dict[str, OutputStream] = {}
        self._local_prefill = LocalPrefill(host)
        self._supplies = Supplies(host, tasks)

    # Calls by routers

    def open(
        self,
        attempt: Attempt,
        source: worker_pb2.PageSource | None = None,
        peer: PeerPrefix | None = None,
        forecast: worker_pb2.SourceForecast | None = None,
        features: AnswerFeatures | None = None,
    ) -> None:
        """Queues a request; it replaces an earlier attempt of the same id, and any that has ended.

        Raises InvalidRequest, DeadlineExceeded or Overloaded; then nothing of this attempt is left behind.
        """
        reach(Point.DECODE_OPENING)
        host = self._host
        check_request(attempt, host.facts, time.time())
        features = features or AnswerFeatures()
        if attempt.scores_prompt:
            source = peer = forecast = None  # cached and pulled pages bring no logits
        self._drop_earlier(attempt)
        sequence = self._sequence(attempt, features)
        sequence.pulled_blocks = len(attempt.block_hashes) if source else peer.blocks if peer else 0
        trace, wanted = RequestTrace(host.recorder, attempt), attempt.request
        ordered = Ordered(
            source, peer, forecast, deadline_s=wanted.deadline_s, weights=wanted.weights, trace=trace.span
        )
        state = RequestState(attempt, sequence, ordered, host.facts.block_size, trace, features)
        state.on_settled = self._local_prefill.note_change
        state.counts_computed = bool(host.pool.others)
        if sequence.computes_all and not state.counts_computed:
            state.missing_blocks = len(attempt.block_hashes)
        host.scheduler.enqueue(state.sequence)
        state.lifetime.mark(Instant.OPENED)
        self._requests[attempt.request_id] = state
        self._by_sequence[state.sequence] = state
        self.output_stream(attempt.router_id).carry(state, state.first_position)
        self._set_timer(state)
        log.info(
            "opened request=%s attempt=%d known=%d source=%s peer=%s",
            attempt.request_id, attempt.number, len(state.sequence.known),
            source.worker_id if source else "local", peer.worker.worker_id if peer else "none",
        )  # fmt: skip
        host.loop.wake()
        reach(Point.DECODE_QUEUED)

    def close_request(self, request_id: RequestId, attempt: int) -> None:
        """Frees everything that a request holds; closing an unknown request is not an error."""
        reach(Point.DECODE_CLOSING)
        state = self._requests.get(request_id)
        if state is not None and not self._is_late(state, attempt) and attempt <= state.attempt.number:
            self._drop(state, Cancelled("closed by its router"))

    def attach(self, request_id: RequestId, attempt: int, router_id: str, from_position: int) -> None:
        """Sends a request's tokens from a position on over the stream of this router."""
        reach(Point.DECODE_ATTACHING)
        state = self._attachable(request_id, attempt, router_id, from_position)
        self.output_stream(state.attempt.router_id).drop(state)
        state.attempt = dataclasses.replace(state.attempt, router_id=router_id)
        self.output_stream(router_id).carry(state, from_position)

    def reattach(self, wanted: worker_pb2.AttachRequest) -> None:
        """Attaches under a later attempt, so that calls of the previous router are stale. Raises as `attach` does."""
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
        self.output_stream(state.attempt.router_id).drop(state)
        request = dataclasses.replace(state.attempt.request, deadline_s=deadline_s)
        state.attempt = dataclasses.replace(
            state.attempt, request=request, router_id=router_id, number=wanted.new_attempt
        )
        state.ordered = dataclasses.replace(state.ordered, deadline_s=deadline_s)
        if not state.has_ended:
            self._set_timer(state)
        self.output_stream(router_id).carry(state, wanted.from_position)
        log.info("reattached request=%s attempt=%d router=%s", request_id, wanted.new_attempt, router_id)

    def find(self, stream: str) -> list[worker_pb2.RequestSnapshot]:
        """Returns what is known of the requests of one client stream, open or ended."""
        begins = f"{stream}#"
        return [state.snapshot() for name, state in self._requests.items() if name.startswith(begins)]

    def output_stream(self, router_id: str) -> OutputStream:
        output_stream = self._output_streams.get(router_id)
        if output_stream is None:
            config = self._host.config
            output_stream = self._output_streams[router_id] = self._new_stream(
                config.runtime.orphan_grace_s,
                config.patience.heartbeat_s,
                lambda requests: self._abandon(router_id, requests),
            )
        return output_stream

    # Calls by the work loop

    def admitted(self, admission: AdmittedSequence) -> None:
        reach(Point.DECODE_ADMITTED)
        state = self._by_sequence[admission.sequence]
        state.move_to(Stage.RESERVED)
        state.lifetime.mark(Instant.ADMITTED)
        state.supply = self._supplies.of(state.sequence, state.ordered, state)
        state.supply.begin(admission.missing)
        self._local_prefill.note_change()
        state.move_to(Stage.PULLING if state.supply.is_pulling else Stage.RUNNING)

    def planning(self) -> None:
        if self._host.config.schedule.local_prefill:
            self._local_prefill.consider(self._by_sequence.values())

    def preempted(self, sequence: Sequence) -> None:
        reach(Point.DECODE_PREEMPTED)
        state = self._by_sequence[sequence]
        state.move_to(Stage.WAITING)
        state.supply = None
        if state.ordered.source is not None:
            sequence.pulled_blocks = len(sequence.known) // state.block_size
        self._host.pulls.prune()
        self._local_prefill.note_change()

    def emitted(self, emissions: list[Emission]) -> None:
        if emissions:
            reach(Point.DECODE_SAMPLED)
        pulling = Stage.PULLING
        updated: defaultdict[str, list[RequestState]] = defaultdict(list)
        for sequence, token, finish in emissions:
            state = self._by_sequence[sequence]
            if finish is FinishReason.ERROR:
                self._fail(state, state.features.why_unsampled(state.attempt.request))
                continue
            state.tokens.append(token)
            if len(state.tokens) == 1:
                self._local_prefill.note_change()
                state.trace.first_token(sequence.steps)
                state.lifetime.mark(Instant.FIRST_TOKEN)
            if state.stage is pulling:  # its blocks arrived through other pulls
                state.move_to(Stage.RUNNING)
            if finish is not None:
                state.finish = finish
                self._end(state, Stage.DONE)
            updated[state.attempt.router_id].append(state)
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

    def begin(self, wanted: RequestedBlocks) -> CachedOnlyJob:
        """Serves a pull from the cache alone: a decode worker computes only for its own requests."""
        return CachedOnlyJob(self._host.pool, wanted, self._host.loop.wake)

    @property
    def open_requests(self) -> int:
        return len(self._by_sequence)

    def close(self) -> None:
        for state in list(self._requests.values()):
            self._drop(state, Cancelled("the worker shuts down"))
        self._local_prefill.close()
        for output_stream in self._output_streams.values():
            output_stream.close()

    # Internals

    def _drop_earlier(self, attempt: Attempt) -> None:
        """Drops an earlier attempt of a request. Raises InvalidRequest if this one comes too late."""
        earlier = self._requests.get(attempt.request_id)
        if earlier is None:
            return
        is_same = attempt.number == earlier.attempt.number
        if not earlier.has_ended and (is_same or self._is_late(earlier, attempt.number)):
            raise InvalidRequest(
                f"request {attempt.request_id} is open already, as attempt {earlier.attempt.number}; "
                f"attempt {attempt.number} comes too late",
                field="request_id",
            )
        self._detach(earlier, attempt.router_id)
        self._drop(earlier, Cancelled("a later attempt replaced it"))

    def _attachable(self, request_id: RequestId, attempt: int, router_id: str, from_position: int) -> RequestState:
        state = self._requests.get(request_id)
        is_late = state is not None and self._is_late(state, attempt)
        if state is not None and is_late and state.attempt.router_id != router_id:
            raise _attached_by(state.attempt.router_id)
        if state is None or is_late or attempt > state.attempt.number:
            raise NotFound(f"request {request_id} attempt {attempt} is not here")
        if not state.first_position <= from_position <= state.end_position:
            raise InvalidRequest(
                f"positions {state.first_position} to {state.end_position} can be attached to, got {from_position}",
                field="from_position",
            )
        return state

    def _is_late(self, state: RequestState, attempt: int) -> bool:
        """Returns whether a call is about an attempt that a later one has replaced, and counts it."""
        if attempt >= state.attempt.number:
            return False
        self._host.metrics.stale_attempts.inc()
        return True

    def _detach(self, state: RequestState, router_id: str) -> None:
        """Notifies the router that had the request, so that it does not recover the stream elsewhere."""
        if state.attempt.router_id != router_id:
            self.output_stream(state.attempt.router_id).detach(state, state.detach_notice(_attached_by(router_id)))

    def _set_timer(self, state: RequestState) -> None:
        if state.timer is not None:
            state.timer.cancel()
        if state.attempt.request.deadline_s is not None:
            delay_s = state.attempt.request.deadline_s - time.time()
            state.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, state)

    def _sequence(self, attempt: Attempt, features: AnswerFeatures) -> Sequence:
        request = attempt.request
        return Sequence(
            attempt.request_id,
            self._host.new_session(),
            attempt.known,
            len(request.prompt),
            [] if attempt.scores_prompt else list(attempt.block_hashes),
            request.salt,
            request.sampling,
            public_blocks=request.public_blocks,
            constraints=self._host.branches.constraints_of(request.weights) + features.constraints,
            reader=features.reader,
            proposer=features.proposer,
            computes_all=features.computes_all,
            due_s=first_token_due_s(self._host),
        )

    def _expire(self, state: RequestState) -> None:
        self._fail(state, DeadlineExceeded("the request's deadline has passed"))

    def _abandon(self, router_id: str, requests: list[RequestState]) -> None:
        """Aborts requests that no router has attached to within the grace period."""
        if not self._output_streams[router_id].is_connected:
            self._output_streams.pop(router_id).close()
        log.info("abandoned router=%s requests=%d", router_id, len(requests))
        for state in requests:
            self._drop(state, Cancelled("its router went away"))

    def _fail(self, state: RequestState, error: ServeError) -> None:
        state.error = error
        self._end(state, Stage.FAILED)
        self.output_stream(state.attempt.router_id).notify(state)

    def _drop(self, state: RequestState, error: ServeError) -> None:
        """Ends a request without a message to its router, and keeps nothing of it."""
        if not state.has_ended:
            state.error = error
            self._end(state, Stage.FAILED)
        self._forget(state)

    def _end(self, state: RequestState, stage: Stage) -> None:
        """Frees what the request holds; its state stays until the router has had time to fetch the end."""
        state.move_to(stage)
        state.lifetime.mark(Instant.DONE)
        del self._by_sequence[state.sequence]
        for feature in state.features.each:
            feature.ended(state.sequence, is_whole=stage is Stage.DONE)
        self._host.scheduler.end(state.sequence)
        self._host.pulls.prune()
        self._local_prefill.note_change()
        self._host.loop.wake()
        self._host.progress.notify()
        self._host.feed.publish()  # routers count its slot as taken until they learn otherwise
        if state.timer is not None:
            state.timer.cancel()
        grace_s = self._host.config.runtime.orphan_grace_s
        state.timer = asyncio.get_running_loop().call_later(grace_s, self._forget, state)
        outcome = state.finish or type(state.error).__name__
        facts = "".join([f" {name}={value:g}" for name, value in state.features.facts.items()])
        log.info("done request=%s tokens=%d outcome=%s%s", state.attempt.request_id, len(state.tokens), outcome, facts)

    def _forget(self, state: RequestState) -> None:
        assert state.timer is not None
        state.timer.cancel()
        del self._requests[state.attempt.request_id]
        output_stream = self._output_streams.get(state.attempt.router_id)
        if output_stream is not None:
            output_stream.drop(state)


def _attached_by(router_id: str) -> Cancelled:
    return Cancelled(f"{router_id} continues with this stream")


def check_request(attempt: Attempt, facts: LoadedModel, now_s: float) -> None:
    """Refuses what can never be served here. Raises InvalidRequest, naming the field, or DeadlineExceeded."""
    request = attempt.request
    prompt, longest = len(request.prompt), len(request.prompt) + request.sampling.max_tokens
    if not prompt:
        raise InvalidRequest("the prompt is empty", field="prompt")
    _check_ids(attempt.known, "prompt", facts)
    _check_ids([token for token, _ in request.sampling.logit_bias], "logit_bias", facts)
    _check_ids(request.sampling.stop_token_ids, "stop_token_ids", facts)
    _check_ids(request.sampling.logprob_token_ids, "logprob_token_ids", facts)
    _check_ids([highest_token(request.sampling.allowed_tokens)], "allowed_token_ids", facts)
    fits = facts.pages * facts.block_size
    if longest > min(fits, facts.max_model_len):
        raise ContextLengthExceeded(
            f"This model's maximum context length is {min(fits, facts.max_model_len)} tokens. However, prompt "
            f"({prompt} tokens) plus max_tokens ({request.sampling.max_tokens}) is {longest}. The model serves "
            f"{facts.max_model_len}, the whole page pool holds {fits} tokens. (context_length_exceeded)",
            field="max_tokens",
        )
    if len(attempt.emitted) >= request.sampling.max_tokens:
        raise InvalidRequest(f"all {request.sampling.max_tokens} tokens are emitted already", field="emitted")
    blocks = attempt.known_tokens // facts.block_size
    if len(attempt.block_hashes) != blocks:
        raise InvalidRequest(f"{len(attempt.block_hashes)} block hashes for {blocks} full blocks", field="block_hashes")
    if request.public_blocks > prompt // facts.block_size:
        raise InvalidRequest(
            f"{request.public_blocks} public blocks, but the prompt has {prompt // facts.block_size}",
            field="public_blocks",
        )
    if request.deadline_s is not None:
        check_deadline(request.deadline_s)
        if request.deadline_s <= now_s:
            raise DeadlineExceeded("the deadline had passed when the request arrived")


def _check_ids(tokens: Iterable[int], field: str, facts: LoadedModel) -> None:
    highest = max(tokens, default=0)
    if highest >= facts.vocab_size:
        raise InvalidRequest(f"token ids go up to {facts.vocab_size - 1}, got {highest}", field=field)


def check_deadline(deadline_s: float) -> None:
    if not math.isfinite(deadline_s):
        raise InvalidRequest(f"the deadline must be finite, got {deadline_s}", field="deadline_s")
