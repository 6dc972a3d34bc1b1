"""A simulated decode worker's role: it owns requests, pulls blocks, emits tokens (as decode_worker.request_manager)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from tools.simulate.fleet.host import Host
from tools.simulate.fleet.peers import pull_from_peer
from tools.simulate.fleet.pulls import Job, Pull, PullSpec
from tools.simulate.fleet.results import Gaps
from tools.simulate.fleet.simulated_request import SimulatedRequest
from tools.simulate.fleet.steps import TOKEN, Flight
from twostroke.request import SamplingParams
from twostroke.scheduler.local_prefill import ANSWER_S, Pace, choose
from twostroke.scheduler.scheduler import Admission, Emission
from twostroke.scheduler.sequence import Sequence
from twostroke.worker.pulls.pages_service import CachedOnlyJob

LOOK_AGAIN_S = 1e-4
"""At least so much later, whatever the rounding of sums of times."""


class Reader(Protocol):
    """The router that a request came from."""

    def began(self, request: SimulatedRequest) -> None:
        """Its first token of this attempt was emitted."""

    def answered(self, request: SimulatedRequest) -> None:
        """Its last token was emitted."""


@dataclass(slots=True, eq=False)
class Answer:
    request: SimulatedRequest
    reader: Reader
    sequence: Sequence
    source: Host | None
    peer: Host | None
    peer_blocks: int
    blocks: int
    """Full ones of the prompt and what was emitted before."""
    missing_blocks: int = 0
    reused_blocks: int = 0
    """Missing blocks that were pulled and not computed for this request."""
    peer_pages: int = 0
    has_begun: bool = False

    def peer_page_came(self) -> None:
        self.peer_pages += 1


class Answers:
    def __init__(self, host: Host, gaps: Counter[int]) -> None:
        self.host = host
        self._gaps = gaps
        """Gaps between tokens of the whole run; see tools.simulate.fleet.results.Gaps."""
        self._answers: dict[Sequence, Answer] = {}

    # What routers ask for

    def open(self, request: SimulatedRequest, reader: Reader, source: Host | None, peer: Host | None) -> None:
        """Raises Overloaded."""
        host, placement = self.host, request.placement
        assert placement is not None
        sequence = Sequence(
            request.request_id,
            host.new_session(),
            [TOKEN] * request.known_tokens,
            request.prompt_tokens,
            list(request.block_hashes),
            sampling=SamplingParams(seed=0, max_tokens=request.answer_tokens, ignore_eos=True),
        )
        host.scheduler.enqueue(sequence)
        self._answers[sequence] = Answer(
            request, reader, sequence, source, peer, placement.peer_blocks, len(request.block_hashes)
        )
        host.wake()

    def lost(self) -> list[Answer]:
        """The worker has died: what it had, as far as its steps had come."""
        done = self.host.steps_done()
        if done is not None:
            self._count(done)
        return list(self._answers.values())

    def drop(self, request: SimulatedRequest) -> None:
        """Its router went away, or nobody wants it."""
        found = [answer for answer in self._answers.values() if answer.request is request]
        for answer in found:
            del self._answers[answer.sequence]
            self.host.scheduler.end(answer.sequence)
        if found:
            self.host.prune()
            self.host.wake()

    # What the scheduler tells

    def serve(self, spec: PullSpec) -> Job:
        """A decode worker computes for its own requests only."""
        return CachedOnlyJob(self.host.pool, spec.block_hashes, list(spec.pages), self.host.wake)

    def admitted(self, admission: Admission) -> None:
        answer = self._answers[admission.sequence]
        sequence, missing = answer.sequence, admission.missing
        if not sequence.preemptions:
            answer.missing_blocks = len(missing)
        if answer.source is not None and missing:
            self.host.pull(self._pull(answer, answer.source, missing))
        elif answer.source is None and answer.peer is not None:
            self._pull_from_peer(answer, answer.peer, missing)

    def planning(self) -> None:
        if self.host.shape.local_prefill:
            self._consider_local_prefill()

    def preempted(self, sequence: Sequence) -> None:
        self.host.prune()

    def emitted(self, flight: Flight, emissions: list[Emission]) -> None:
        self._count(flight)
        for emission in emissions:
            if emission.finish is not None:
                answer = self._answers.pop(emission.sequence)
                answer.reader.answered(answer.request)

    def most_steps(self, flight: Flight) -> int:
        """A first token is told of at once."""
        answers = self._answers
        is_first = any(chunk.samples and not answers[chunk.sequence].has_begun for chunk in flight.step.chunks)
        return 1 if is_first else flight.steps

    # Below: how answers pull and count

    def _pull(self, answer: Answer, source: Host, missing: list[int]) -> PullSpec:
        def ended(pull: Pull) -> None:
            if not answer.sequence.preemptions:  # later pulls bring back what was counted before
                answer.reused_blocks = pull.pulled - pull.computed
            if pull.has_failed and answer.sequence in self._answers:
                self._pull_again(answer)

        sequence = answer.sequence
        return PullSpec(
            request_id=sequence.request_id,
            session=self.host.new_session(),
            source=source,
            block_hashes=sequence.block_hashes[: missing[-1] + 1],
            pages={block: sequence.pages[block] for block in missing},
            peer=answer.peer,
            peer_blocks=answer.peer_blocks,
            from_peer=answer.peer_page_came,
            ended=ended,
        )

    def _consider_local_prefill(self) -> None:
        """Take over one prompt at a time, and none while another prompt is computed here, as a live worker does."""
        host = self.host
        pulls = [pull for pull in host.pulls if pull.spec.cached_within_s is None]
        if len(pulls) < 2:
            return
        pulled = {pull.spec.request_id for pull in pulls}
        running = [s for s in self._answers if s.pages and s.request_id not in pulled]
        if any(len(sequence.known) - sequence.computed >= host.shape.block_size for sequence in running):
            return
        pace = Pace.beside(
            len(running),
            sum(len(sequence.known) for sequence in running),
            budget=host.budget,
            chunk_tokens=host.scheduler.step_tokens,
            block_size=host.shape.block_size,
        )
        now_s, youngest_s = host.queue.now_s, pulls[-1].started_s
        pull = choose(pulls, pace, now_s)
        if pull is not None:
            pull.stop()
        elif now_s - youngest_s < ANSWER_S:
            host.queue.at(max(youngest_s + ANSWER_S, now_s + LOOK_AGAIN_S), host.wake)

    def _pull_again(self, answer: Answer) -> None:
        """The page source has failed: what its peer was to give it is fetched from there, once."""
        peer, answer.peer = answer.peer, None
        if peer is None or peer is answer.source:
            return
        pool, pages = self.host.pool, answer.sequence.pages[: answer.blocks]
        unwritten = [block for block, page in enumerate(pages) if pool.is_arriving(page) and pool.writer(page) is None]
        self._pull_from_peer(answer, peer, unwritten)

    def _pull_from_peer(self, answer: Answer, peer: Host, missing: list[int]) -> None:
        def arrived(block: int) -> None:
            answer.reused_blocks += 1
            answer.peer_page_came()

        held = [block for block in missing if block < answer.peer_blocks]
        pull_from_peer(self.host, answer.sequence, peer, held, arrived)

    def _count(self, flight: Flight) -> None:
        """Tokens of these steps have been emitted."""
        first_s = flight.begun_s + flight.after(1)
        last_s = flight.end_s
        for chunk in flight.step.chunks:
            answer = self._answers.get(chunk.sequence)
            if answer is None or not chunk.samples:
                continue
            request = answer.request
            request.emitted += flight.steps
            if request.last_token_s is not None:
                self._note_gap(request, first_s - request.last_token_s)
            request.last_token_s = last_s
            if not answer.has_begun:
                self._begin(answer, last_s)
            if flight.steps > 1:
                request.longest_gap_s = max(
                    request.longest_gap_s, last_s - flight.begun_s - flight.after(flight.steps - 1)
                )
        self._note_steps(flight)

    def _begin(self, answer: Answer, now_s: float) -> None:
        answer.has_begun = True
        request, size = answer.request, self.host.shape.block_size
        if request.first_token_s is None:
            request.first_token_s = now_s
            blocks = answer.blocks - answer.missing_blocks + answer.reused_blocks
            request.cached_tokens = min(blocks * size, request.prompt_tokens)
            request.pulled_tokens = min(answer.peer_pages * size, request.cached_tokens)
        answer.reader.began(request)

    def _note_gap(self, request: SimulatedRequest, gap_s: float) -> None:
        request.longest_gap_s = max(request.longest_gap_s, gap_s)
        self._gaps[Gaps.bucket_of(gap_s)] += 1

    def _note_steps(self, flight: Flight) -> None:
        """Between the tokens of all steps but the first, as long as those steps were."""
        streams, steps = flight.terms.streams, flight.steps
        if steps < 2:
            return
        shortest, longest = (Gaps.bucket_of(flight.after(step) - flight.after(step - 1)) for step in (2, steps))
        if shortest == longest and not flight.noisy:
            self._gaps[shortest] += streams * (steps - 1)
            return
        for step in range(2, steps + 1):
            self._gaps[Gaps.bucket_of(flight.after(step) - flight.after(step - 1))] += streams
