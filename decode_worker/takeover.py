"""Prompts that wait at their page source are computed here instead: the shell around `twostroke.schedule.takeover`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from decode_worker.answer import Answer
from decode_worker.stage import Stage
from twostroke.schedule.takeover import ANSWER_S, Pace, choose
from twostroke.worker.host import WorkerHost

log = logging.getLogger(__name__)


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
            self._host.metrics.takeovers.inc()
            log.info(
                "taken over request=%s blocks=%d source=%s", pull.spec.request_id, pull.missing_blocks, pull.source
            )
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
        return Pace.beside(
            streams,
            context_tokens,
            budget=self._host.loop.budget,
            chunk_tokens=self._host.scheduler.step_tokens,
            block_size=self._host.facts.block_size,
        )

    def _look_again(self, when_s: float) -> None:
        """Pulls may stay unanswered, and nothing else may happen until then."""
        self.close()
        self._timer = asyncio.get_running_loop().call_at(when_s, self._host.loop.wake)
