"""Runs `Admission` with a clock, and with a future for each queued request."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from router.admission.admission import Admission
from router.admission.measures import FalseRejections
from router.admission.queued_request import Placement, QueuedRequest, Reason, Refused, Stranded, Verdict
from router.metrics import DECISION_BUCKETS_S, ROLE, RouterMetrics
from router.routing.selector import Workers
from twostroke.base.errors import Overloaded
from twostroke.base.ids import RequestId
from twostroke.observability.telemetry import TTFT_BUCKETS_S

PAUSE_S = 0.002
"""Seconds between two wakes: reports of many workers arrive together."""


class AdmissionQueue:
    def __init__(self, admission: Admission, workers: Callable[[], Workers], metrics: RouterMetrics) -> None:
        self._admission = admission
        self._workers = workers
        self._metrics = _AdmissionMetrics(metrics)
        self._waiting: dict[RequestId, asyncio.Future[Verdict]] = {}
        self._changed = asyncio.Event()
        self._metrics.queued.set_function(lambda: admission.queued)
        self._metrics.fairness.set_function(lambda: admission.fairness(time.monotonic()))

    async def admit(self, request: QueuedRequest, workers: Workers) -> Placement | None:
        """Returns the placement when the request may go. None: all decode workers have gone meanwhile.

        Raises Overloaded. After a placement, call `first_token` and, when the request is over, `left`.
        """
        entered_s = time.monotonic()
        begun_s = time.perf_counter()
        verdict: Verdict | None = self._admission.enter(request, workers, entered_s)
        self._metrics.decision_seconds.observe(time.perf_counter() - begun_s)
        if verdict is None:
            verdict = await self._wait(request.request_id)
            self._metrics.queue_seconds.observe(time.monotonic() - entered_s)
        if isinstance(verdict, Refused):
            self._metrics.refusals.labels(ROLE, verdict.reason.value).inc()
            raise _overloaded(verdict)
        return None if isinstance(verdict, Stranded) else verdict

    def notice(self) -> None:
        """Notes a change that may let a request go."""
        if self._waiting or len(self._admission.false_rejections):
            self._changed.set()

    def opened(self, seconds: float) -> None:
        self._admission.capacity.opened_in(seconds)

    def first_token(self, request_id: RequestId) -> None:
        if self._admission.first_token(request_id, time.monotonic()):
            self.notice()

    def left(self, request_id: RequestId) -> None:
        """Notes that the request is over, queued or sent."""
        self._admission.leave(request_id, time.monotonic())
        self.notice()

    async def run(self) -> None:
        """Wakes admission and hands its verdicts to waiting requests, until it is cancelled."""
        while True:
            wake_at_s = self._admission.wake_at_s
            left_s = None if wake_at_s is None else wake_at_s - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._changed.wait()
            self._changed.clear()
            for verdict in self._admission.wake(self._workers(), time.monotonic()):
                future = self._waiting.pop(verdict.request_id, None)
                if future is not None and not future.done():
                    future.set_result(verdict)
            self._metrics.follow(self._admission.false_rejections)
            await asyncio.sleep(PAUSE_S)

    async def _wait(self, request_id: RequestId) -> Verdict:
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        self._changed.set()
        try:
            return await future
        except asyncio.CancelledError:
            self._waiting.pop(request_id, None)
            self.left(request_id)
            raise


class _AdmissionMetrics:
    def __init__(self, metrics: RouterMetrics) -> None:
        self.decision_seconds = metrics.histogram(
            "decision_seconds", "Time taken to choose workers for one request.", DECISION_BUCKETS_S
        )
        self.queue_seconds = metrics.histogram(
            "queue_seconds", "Time that queued requests waited in the router for their turn.", TTFT_BUCKETS_S
        )
        self.queued = metrics.gauge("queued_requests", "Requests that wait in the router for their turn.")
        self.fairness = metrics.gauge(
            "tenant_fairness", "Jain's index over tenants of prefill seconds given to those asked for, over a minute."
        )
        self.refusals = metrics.labelled_counter("refusals", "Requests refused, by reason.", "reason")
        self._followed = metrics.counter(
            "followed_refusals", "Refusals of which it is found out whether they were right."
        )
        self._false = metrics.counter("false_refusals", "Refused requests that would have had the first token in time.")
        self._seen_followed = self._seen_false = 0
        for reason in Reason:
            self.refusals.labels(ROLE, reason.value)

    def follow(self, rejections: FalseRejections) -> None:
        """Counts the refusals that were judged since the last call."""
        self._followed.inc(rejections.followed - self._seen_followed)
        self._false.inc(rejections.count - self._seen_false)
        self._seen_followed, self._seen_false = rejections.followed, rejections.count


def _overloaded(refused: Refused) -> Overloaded:
    if refused.reason is Reason.QUEUE_FULL:
        return Overloaded("too many requests wait for their turn; try again later")
    allowed_by = "--slo-ttft allows" if refused.reason is Reason.SLO else "the request's deadline allows"
    return Overloaded(
        f"the first token is predicted in {refused.first_token_s:.2f} s, {refused.late_s:.2f} s later than "
        f"{allowed_by}; try again then",
        retry_after_s=refused.late_s,
    )
