"""Local prefill computes prompts here that would wait at their page source (`twostroke.scheduler.local_prefill`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from decode_worker.request_state import RequestState, Stage
from twostroke.scheduler.local_prefill import ANSWER_S, PrefillSpeeds, choose
from twostroke.worker.role_host import RoleHost

log = logging.getLogger(__name__)

LOOK_S = ANSWER_S / 2
"""Least seconds between two decisions about the same pulls: the speed of steps changes little in this time."""


class LocalPrefill:
    """Chooses one prompt at a time, and none while another prompt is computed here."""

    def __init__(self, host: RoleHost) -> None:
        self._host = host
        self._timer: asyncio.TimerHandle | None = None
        self._next_s = 0.0
        """Time of the next decision on the event loop's clock, unless something changes before."""

    def note_change(self) -> None:
        """Notes that a pull has begun or ended, or that more or less is computed here: the next step looks again."""
        self._next_s = 0.0

    def consider(self, requests: Iterable[RequestState]) -> None:
        """Stops one pull whose prompt would be computed sooner here; called before each step is planned.

        If other workers compute prompts with this worker's cores, it stops none: two at once would each take twice as
        long.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s < self._next_s or self._host.loop.lends:
            return
        self._next_s = now_s + LOOK_S
        pulls = [pull for pull in self._host.pulls.open_pulls() if not pull.spec.is_from_peer]
        if len(pulls) < 2 or any(pull.is_stopped for pull in pulls):
            return
        pace = self._pace(requests)
        if pace is None:
            return
        pull = choose(pulls, pace, now_s)
        if pull is not None:
            self._host.metrics.local_prefills.inc()
            log.info(
                "local prefill request=%s blocks=%d source=%s", pull.spec.request_id, pull.missing_blocks, pull.source
            )
            self._host.pulls.stop_one(pull.spec.session)
        elif now_s - pulls[-1].started_s < ANSWER_S:
            self._look_again(pulls[-1].started_s + ANSWER_S)
            self._next_s = min(self._next_s, pulls[-1].started_s + ANSWER_S)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _pace(self, requests: Iterable[RequestState]) -> PrefillSpeeds | None:
        """Returns how fast prompts are computed, or None while one is computed here."""
        streams = context_tokens = 0
        for state in requests:
            if state.stage is not Stage.RUNNING:
                continue
            sequence = state.sequence
            if len(sequence.known) - sequence.computed >= state.block_size:
                return None
            streams += 1
            context_tokens += len(sequence.known)
        return PrefillSpeeds.beside(
            streams,
            context_tokens,
            budget=self._host.loop.budget,
            chunk_tokens=self._host.scheduler.step_tokens,
            block_size=self._host.facts.block_size,
        )

    def _look_again(self, when_s: float) -> None:
        """Wakes the work loop at `when_s`, because nothing else may happen until then."""
        self.close()
        self._timer = asyncio.get_running_loop().call_at(when_s, self._host.loop.wake)
