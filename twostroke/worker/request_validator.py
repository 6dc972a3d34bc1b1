"""The request validator refuses calls for another epoch or fingerprint, and new work while draining."""

from __future__ import annotations

from twostroke.base.errors import Draining, EngineLost, FingerprintMismatch, StaleEpoch
from twostroke.base.ids import Epoch
from twostroke.worker.metrics import WorkerMetrics


class RequestValidator:
    def __init__(
        self, worker_id: str, epoch: Epoch, fingerprint: str, metrics: WorkerMetrics, *, kv_form: str = ""
    ) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.fingerprint = fingerprint
        self.kv_form = kv_form
        """The form of the worker's pages. Calls with another form are not refused here: pages may be converted."""
        self.is_draining = False
        self.lost: EngineLost | None = None
        """The error that ended the engine; every call is refused from then on."""
        self._metrics = metrics

    def check(self, fingerprint: str, epoch: str, *, is_work: bool = True) -> None:
        """Refuses a call: raises StaleEpoch, FingerprintMismatch, EngineLost or Draining. An empty `epoch` means any.

        Reads of cached pages (`is_work` False) continue while the worker drains, so that others can fetch them.
        """
        if epoch and epoch != str(self.epoch):
            self._metrics.stale_epochs.inc()
            raise StaleEpoch(f"{self.worker_id} is in epoch {self.epoch}, the call is for {epoch}")
        if fingerprint != self.fingerprint:
            raise FingerprintMismatch(
                f"{self.worker_id} has fingerprint {self.fingerprint!r}, the caller has {fingerprint!r}; "
                "all workers and routers of a cluster must serve the same model, dtype and block size"
            )
        if self.lost is not None:
            raise EngineLost(f"{self.worker_id} has lost its engine and is replaced: {self.lost.message}")
        if self.is_draining and is_work:
            raise Draining(f"{self.worker_id} is draining and takes no new work")
