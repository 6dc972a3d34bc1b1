"""All open answers of a decode worker: opened, pulled for, emitted, closed."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time

from decode_worker import admission
from decode_worker.answer import Answer
from decode_worker.answer_trace import AnswerTrace
from decode_worker.outbox import Outbox
from decode_worker.service import DecodeService
from decode_worker.stage import Stage
from decode_worker.takeover import Takeover
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
from twostroke.ids import RequestId
from twostroke.lifetime import Instant
from twostroke.request import FinishReason, Request
from twostroke.rpc.peer import PeerPrefix
from twostroke.rpc.v1 import worker_pb2, worker_pb2_grpc
from twostroke.schedule.batching import Step
from twostroke.schedule.scheduler import Admission, Emission
from twostroke.schedule.sequence import Sequence
from twostroke.worker.host import WorkerHost
from twostroke.worker.pages_service import Wanted
from twostroke.worker.peer_pulls import PeerPulls
from twostroke.worker.pull_client import PullReport, PullSpec
from twostroke.worker.resident import ResidentJob
from twostroke.worker.worker import RoleServices

log = logging.getLogger(__name__)


class AnswerBook(RoleServices):
    def __init__(self, host: WorkerHost, tasks: asyncio.TaskGroup) -> None:
        self._host = host
        self._tasks = tasks
        self._answers: dict[RequestId, Answer] = {}
        self._by_sequence: dict[Sequence, Answer] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._takeover = Takeover(host)
        self._peer_pulls = PeerPulls(host, tasks)

    # What routers ask for

    def open(
        self, request: Request, source: worker_pb2.PageSource | None = None, peer: PeerPrefix | None = None
    ) -> None:
        """Queue a request. It replaces an earlier attempt of the same id, and any that has ended.

        Raises InvalidRequest, DeadlineExceeded or Overloaded; then nothing is left behind.
        """
        reach(Point.DECODE_OPENING)
        host = self._host
        admission.check(request, host.facts, time.time())
        earlier = self._answers.get(request.request_id)
        if earlier is not None:
            is_same = request.attempt == earlier.request.attempt
            if not earlier.has_ended and (is_same or self._is_late(earlier, request.attempt)):
                raise InvalidRequest(
                    f"request {request.request_id} is open already, as attempt {earlier.request.attempt}; "
                    f"attempt {request.attempt} comes too late",
                    field="request_id",
                )
            self._part(earlier, request.router_id)
            self._drop(earlier, Cancelled("a later attempt took its place"))
        sequence = self._sequence(request)
        sequence.pulled_blocks = len(request.names) if source is not None else peer.blocks if peer is not None else 0
        answer = Answer(request, sequence, source, host.facts.block_size, AnswerTrace(host.recorder, request), peer)
        host.scheduler.enqueue(answer.sequence)
        answer.lifetime.mark(Instant.OPENED)
        self._answers[request.request_id] = answer
        self._by_sequence[answer.sequence] = answer
        self.outbox(request.router_id).carry(answer, answer.first_position)
        self._set_timer(answer)
        log.info(
            "opened request=%s attempt=%d known=%d source=%s peer=%s",
            request.request_id, request.attempt, len(answer.sequence.known),
            source.worker_id if source else "local", peer.worker.worker_id if peer else "none",
        )  # fmt: skip
        host.loop.wake()
        reach(Point.DECODE_QUEUED)

    def close_request(self, request_id: RequestId, attempt: int) -> None:
        """Free everything a request holds; closing what is not there is no error."""
        reach(Point.DECODE_CLOSING)
        answer = self._answers.get(request_id)
        if answer is not None and not self._is_late(answer, attempt) and attempt <= answer.request.attempt:
            self._drop(answer, Cancelled("closed by its router"))

    def attach(self, request_id: RequestId, attempt: int, router_id: str, from_position: int) -> None:
        """Send an answer's tokens from a position on, over another (or the same) router's stream."""
        reach(Point.DECODE_ATTACHING)
        answer = self._attachable(request_id, attempt, router_id, from_position)
        self.outbox(answer.request.router_id).drop(answer)
        answer.request = dataclasses.replace(answer.request, router_id=router_id)
        self.outbox(router_id).carry(answer, from_position)

    def take_over(self, wanted: worker_pb2.AttachRequest) -> None:
        """Attach under a later attempt: whatever the router that had it still asks about the earlier one is late.

        Raises as `attach` does.
        """
        reach(Point.DECODE_ATTACHING)
        request_id, router_id = RequestId(wanted.request_id), wanted.router_id
        answer = self._attachable(request_id, wanted.attempt, router_id, wanted.from_position)
        if wanted.take_as <= wanted.attempt:
            raise InvalidRequest(f"attempt {wanted.take_as} is not later than {wanted.attempt}", field="take_as")
        deadline_s = wanted.deadline_s if wanted.HasField("deadline_s") else None
        if deadline_s is not None:
            admission.check_deadline(deadline_s)
        self._part(answer, router_id)
        self.outbox(answer.request.router_id).drop(answer)
        answer.request = dataclasses.replace(
            answer.request,
            router_id=router_id,
            attempt=wanted.take_as,
            deadline_s=deadline_s,
        )
        if not answer.has_ended:
            self._set_timer(answer)
        self.outbox(router_id).carry(answer, wanted.from_position)
        log.info("taken over request=%s attempt=%d router=%s", request_id, wanted.take_as, router_id)

    def find(self, stream: str) -> list[worker_pb2.FoundAnswer]:
        """What is known of the answers of one stream, open or not."""
        begins = f"{stream}#"
        return [answer.found() for name, answer in self._answers.items() if name.startswith(begins)]

    def outbox(self, router_id: str) -> Outbox:
        outbox = self._outboxes.get(router_id)
        if outbox is None:
            config = self._host.config
            outbox = self._outboxes[router_id] = Outbox(
                config.runtime.orphan_grace_s,
                config.patience.heartbeat_s,
                lambda answers: self._abandon(router_id, answers),
            )
        return outbox

    # What the scheduler tells

    def admitted(self, admission: Admission) -> None:
        reach(Point.DECODE_ADMITTED)
        answer = self._by_sequence[admission.sequence]
        answer.move_to(Stage.RESERVED)
        answer.lifetime.mark(Instant.ADMITTED)
        if not admission.sequence.preemptions:
            answer.missing_blocks = len(admission.missing)
        if self._began(answer, self._start_pull(answer, admission.missing)):
            answer.move_to(Stage.PULLING)
        else:
            answer.move_to(Stage.RUNNING)

    def planning(self) -> None:
        if self._host.config.schedule.local_prefill:
            self._takeover.consider(self._by_sequence.values())

    def preempted(self, sequence: Sequence) -> None:
        reach(Point.DECODE_PREEMPTED)
        self._by_sequence[sequence].move_to(Stage.WAITING)
        self._host.pulls.prune()

    def settled(self, emissions: list[Emission]) -> None:
        if emissions:
            reach(Point.DECODE_SAMPLED)
        for emission in emissions:
            answer = self._by_sequence[emission.sequence]
            if emission.finish is FinishReason.ERROR:
                self._fail(answer, NonFiniteLogits("the model's numbers overflowed for this request: no token to draw"))
                continue
            answer.tokens.append(emission.token)
            answer.trace.emitted(emission.sequence.steps)
            answer.lifetime.mark(Instant.FIRST_TOKEN)
            if answer.stage is Stage.PULLING:  # others' pages sufficed before its own pull had ended
                answer.move_to(Stage.RUNNING)
            if emission.finish is not None:
                answer.finish = emission.finish
                self._end(answer, Stage.DONE)
            self.outbox(answer.request.router_id).tell(answer)

    def computed(self, step: Step, seconds: float) -> None:
        for chunk in step.chunks:
            answer = self._by_sequence.get(chunk.sequence)
            if answer is not None and chunk.end - chunk.start > 1:
                answer.trace.chunks.ran(chunk.start, chunk.end, seconds)

    def failed(self, sequences: list[Sequence], error: Exception) -> None:
        reason = f"the engine could not compute this request: {type(error).__name__}: {error}"
        for sequence in sequences:
            self._fail(self._by_sequence[sequence], StepFailed(reason))

    def lost(self, error: EngineLost) -> None:
        for answer in list(self._by_sequence.values()):
            self._fail(answer, error)

    # How a role is mounted

    def register(self, host: WorkerHost) -> None:
        worker_pb2_grpc.add_DecodeServicer_to_server(DecodeService(self, host.gate), host.rpc.server)
        host.rpc.offer("twostroke.v1.Decode")

    def begin(self, wanted: Wanted) -> ResidentJob:
        """A decode worker computes for its own requests only."""
        return ResidentJob(self._host.pool, wanted.names, wanted.blocks, self._host.loop.wake)

    @property
    def open_requests(self) -> int:
        return len(self._by_sequence)

    def close(self) -> None:
        for answer in list(self._answers.values()):
            self._drop(answer, Cancelled("the worker shuts down"))
        self._takeover.close()
        for outbox in self._outboxes.values():
            outbox.close()

    # Below: how answers begin, pull and end

    def _attachable(self, request_id: RequestId, attempt: int, router_id: str, from_position: int) -> Answer:
        answer = self._answers.get(request_id)
        is_late = answer is not None and self._is_late(answer, attempt)
        if answer is not None and is_late and answer.request.router_id != router_id:
            raise _taken_by(answer.request.router_id)
        if answer is None or is_late or attempt > answer.request.attempt:
            raise NotFound(f"request {request_id} attempt {attempt} is not here")
        if not answer.first_position <= from_position <= answer.end_position:
            raise InvalidRequest(
                f"positions {answer.first_position} to {answer.end_position} can be attached to, got {from_position}",
                field="from_position",
            )
        return answer

    def _is_late(self, answer: Answer, attempt: int) -> bool:
        """Whether it is about an attempt that a later one has replaced; counted."""
        if attempt >= answer.request.attempt:
            return False
        self._host.metrics.stale_attempts.inc()
        return True

    def _part(self, answer: Answer, taker: str) -> None:
        """Tell the router that had it, if that is another one: it must not look for it elsewhere."""
        if answer.request.router_id != taker:
            self.outbox(answer.request.router_id).part(answer, answer.farewell(_taken_by(taker)))

    def _set_timer(self, answer: Answer) -> None:
        if answer.timer is not None:
            answer.timer.cancel()
        if answer.request.deadline_s is not None:
            delay_s = answer.request.deadline_s - time.time()
            answer.timer = asyncio.get_running_loop().call_later(delay_s, self._expire, answer)

    def _sequence(self, request: Request) -> Sequence:
        return Sequence(
            request.request_id,
            self._host.new_session(),
            request.known,
            len(request.prompt),
            list(request.names),
            request.salt,
            request.sampling,
            request.public_blocks,
        )

    def _start_pull(self, answer: Answer, missing: list[int]) -> asyncio.Task[PullReport] | None:
        """Of all missing blocks from the page source; without one, of those that a peer holds."""
        sequence, source, peer = answer.sequence, answer.source, answer.peer
        if source is None:
            return self._pull_from_peer(answer, peer, missing) if peer is not None else None
        if not missing:
            return None
        spec = PullSpec(
            sequence.request_id,
            self._host.new_session(),
            source,
            list(sequence.known),
            list(sequence.names),
            {block: sequence.pages[block] for block in missing},
            peer,
            deadline_s=answer.request.deadline_s,
            trace=answer.trace.span,
        )
        return self._host.pulls.start(spec, self._tasks)

    def _pull_from_peer(self, answer: Answer, peer: PeerPrefix, blocks: list[int]) -> asyncio.Task[PullReport] | None:
        return self._peer_pulls.start(answer.sequence, peer, blocks, trace=answer.trace.span)

    def _began(self, answer: Answer, pull: asyncio.Task[PullReport] | None) -> bool:
        if pull is None:
            return False
        answer.pull = pull
        pull.add_done_callback(lambda task: self._pull_ended(answer, task))
        return True

    def _pull_ended(self, answer: Answer, pull: asyncio.Task[PullReport]) -> None:
        report = None if pull.cancelled() else pull.result()
        if report is not None:
            answer.pulled(report)
        if answer.stage is not Stage.PULLING or answer.pull is not pull:
            return
        has_failed = report is not None and report.failure is not None
        if not (has_failed and self._began(answer, self._start_second_pull(answer))):
            answer.move_to(Stage.RUNNING)

    def _start_second_pull(self, answer: Answer) -> asyncio.Task[PullReport] | None:
        """The page source has failed: what its peer was to give it is fetched from there, once, before any more is
        computed here."""
        peer, answer.peer = answer.peer, None
        if peer is None or answer.source is None or peer.worker.worker_id == answer.source.worker_id:
            return None
        pool, pages = self._host.pool, answer.sequence.pages[: len(answer.request.names)]
        unwritten = [block for block, page in enumerate(pages) if pool.is_arriving(page) and pool.writer(page) is None]
        return self._pull_from_peer(answer, peer, unwritten)

    def _expire(self, answer: Answer) -> None:
        self._fail(answer, DeadlineExceeded("the request's deadline has passed"))

    def _abandon(self, router_id: str, answers: list[Answer]) -> None:
        """Nobody asked for these answers within the grace period."""
        if not self._outboxes[router_id].is_connected:
            self._outboxes.pop(router_id).close()
        log.info("abandoned router=%s requests=%d", router_id, len(answers))
        for answer in answers:
            self._drop(answer, Cancelled("its router went away"))

    def _fail(self, answer: Answer, error: ServeError) -> None:
        answer.error = error
        self._end(answer, Stage.FAILED)
        self.outbox(answer.request.router_id).tell(answer)

    def _drop(self, answer: Answer, error: ServeError) -> None:
        """End it without telling anybody, and keep nothing."""
        if not answer.has_ended:
            answer.error = error
            self._end(answer, Stage.FAILED)
        self._forget(answer)

    def _end(self, answer: Answer, stage: Stage) -> None:
        """Everything it holds goes back at once; the answer itself stays until its router has had time to fetch it."""
        answer.move_to(stage)
        answer.lifetime.mark(Instant.DONE)
        del self._by_sequence[answer.sequence]
        self._host.scheduler.end(answer.sequence)
        self._host.pulls.prune()
        self._host.loop.wake()
        self._host.progress.tell()
        self._host.feed.publish()  # routers count its seat as taken until they hear otherwise
        if answer.timer is not None:
            answer.timer.cancel()
        grace_s = self._host.config.runtime.orphan_grace_s
        answer.timer = asyncio.get_running_loop().call_later(grace_s, self._forget, answer)
        outcome = answer.finish or type(answer.error).__name__
        log.info("done request=%s tokens=%d outcome=%s", answer.request.request_id, len(answer.tokens), outcome)

    def _forget(self, answer: Answer) -> None:
        assert answer.timer is not None
        answer.timer.cancel()
        del self._answers[answer.request.request_id]
        outbox = self._outboxes.get(answer.request.router_id)
        if outbox is not None:
            outbox.drop(answer)


def _taken_by(router_id: str) -> Cancelled:
    return Cancelled(f"{router_id} goes on with this stream")
