"""When a decode worker computes a prompt itself instead of waiting for its page source: pure choice, thin shell.

A source computes pulls in the order in which they came. Those at the end of its queue wait for the others, while the
decode worker's own compute may be idle, or has room beside its streams.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decode_worker.answer import Answer
from decode_worker.stage import Stage
from twostroke.schedule.cost import Queued
from twostroke.worker.host import WorkerHost
from twostroke.worker.pull_client import OpenPull

log = logging.getLogger(__name__)

ANSWER_S = 0.03
"""A source that has the pages in its cache has announced some of them by then."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How prompts are computed, here and at the source."""

    chunk_blocks: int
    """Of one step of the source. What lies within the first of its queue may be under way."""
    source_s: float
    """Per block, at a source that does nothing else."""
    local_s: float
    """Per block, here, beside the streams that run."""


def choose(pulls: Sequence[OpenPull], pace: Pace, now_s: float) -> OpenPull | None:
    """The oldest pull that its source has not begun, that would be done sooner here, and without which the source has
    work for as long as that takes: this worker's streams are slowed down for a source that is busy, not for one that
    would be idle.
    """
    in_all = _missing_blocks(pulls)
    ahead: Counter[str] = Counter()
    for pull in pulls:
        source = pull.spec.source.worker_id
        is_waiting = not pull.has_begun and ahead[source] >= pace.chunk_blocks
        ahead[source] += pull.missing_blocks
        if not is_waiting or not pull.is_computable or now_s - pull.started_s < ANSWER_S:
            continue
        local_s = pull.missing_blocks * pace.local_s
        waits_s, others_s = (blocks * pace.source_s for blocks in (ahead[source], in_all[source] - pull.missing_blocks))
        if local_s <= min(waits_s, others_s):
            return pull
    return None


def _missing_blocks(pulls: Sequence[OpenPull]) -> Counter[str]:
    """By source."""
    missing: Counter[str] = Counter()
    for pull in pulls:
        missing[pull.spec.source.worker_id] += pull.missing_blocks
    return missing


class Takeover:
    """Takes over one prompt at a time, and none while any other prompt is computed here."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._timer: asyncio.TimerHandle | None = None

    def consider(self, answers: Iterable[Answer]) -> None:
        """Runs before each step is planned, so whenever something has changed."""
        pulls = [pull for pull in self._host.pulls.open_pulls() if not pull.spec.is_from_peer]
        if len(pulls) < 2 or any(pull.is_left for pull in pulls):
            return
        pace = self._pace(answers)
        if pace is None:
            return
        now_s = asyncio.get_running_loop().time()
        pull = choose(pulls, pace, now_s)
        if pull is not None:
            source = pull.spec.source.worker_id
            self._host.metrics.takeovers.inc()
            log.info("taken over request=%s blocks=%d source=%s", pull.spec.request_id, pull.missing_blocks, source)
            self._host.pulls.leave(pull.spec.session)
        elif now_s - pulls[-1].started_s < ANSWER_S:
            self._look_again(pulls[-1].started_s + ANSWER_S)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _pace(self, answers: Iterable[Answer]) -> Pace | None:
        """None while a prompt is computed here."""
        streams = context_tokens = 0
        for answer in answers:
            if answer.stage is not Stage.RUNNING:
                continue
            sequence = answer.sequence
            if len(sequence.known) - sequence.computed >= answer.block_size:
                return None
            streams += 1
            context_tokens += len(sequence.known)
        budget = self._host.loop.budget
        block_size, chunk_tokens = self._host.facts.block_size, self._host.scheduler.step_tokens
        there, here = Queued(chunk_tokens), Queued(chunk_tokens, 0.0, streams, context_tokens)
        source_s, local_s = (budget.drain_s(chunk, chunk_tokens) / chunk_tokens for chunk in (there, here))
        return Pace(-(-chunk_tokens // block_size), block_size * source_s, block_size * local_s)

    def _look_again(self, when_s: float) -> None:
        """Pulls may stay unanswered, and nothing else may happen until then."""
        self.close()
        self._timer = asyncio.get_running_loop().call_at(when_s, self._host.loop.wake)
