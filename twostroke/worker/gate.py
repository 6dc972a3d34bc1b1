"""Who may ask this worker for anything: the right life of it, with the same KV, while it takes new work."""

from __future__ import annotations

from twostroke.errors import Draining, EngineLost, FingerprintMismatch, StaleEpoch
from twostroke.ids import Epoch
from twostroke.worker.metrics import WorkerMetrics


class Gate:
    def __init__(self, worker_id: str, epoch: Epoch, fingerprint: str, metrics: WorkerMetrics) -> None:
        self.worker_id = worker_id
        self.epoch = epoch
        self.fingerprint = fingerprint
        self.is_draining = False
        self.lost: EngineLost | None = None
        """Nothing is taken, nor read, any more."""
        self._metrics = metrics

    def check(self, fingerprint: str, epoch: str, *, is_work: bool = True) -> None:
        """Raises FingerprintMismatch (with both values), StaleEpoch, EngineLost or Draining. An empty epoch means any
        life.

        What is not work, reading what is here already, goes on while the worker drains: that is how it leaves.
        """
        if epoch and epoch != str(self.epoch):
            self._metrics.stale_epochs.inc()
            raise StaleEpoch(f"{self.worker_id} lives in epoch {self.epoch}, the call is for {epoch}")
        if fingerprint != self.fingerprint:
            raise FingerprintMismatch(
                f"{self.worker_id} has fingerprint {self.fingerprint!r}, the caller has {fingerprint!r}; "
                "all workers and routers of a cluster must serve the same model, dtype and block size"
            )
        if self.lost is not None:
            raise EngineLost(f"{self.worker_id} has lost its engine and is replaced: {self.lost.message}")
        if self.is_draining and is_work:
            raise Draining(f"{self.worker_id} is draining and takes no new work")
