"""What changes on the tiers of one page group, for the event log and the metrics of an epoch."""

from __future__ import annotations

from twostroke.base.ids import BlockHash
from twostroke.kv_cache.events import EventLog
from twostroke.kv_cache.parts import GroupKind
from twostroke.kv_cache.tier import Tier
from twostroke.worker.tiers.metrics import TierMetrics


class TierChanges:
    """One owner, one thread: the worker's event loop."""

    def __init__(self, group: GroupKind) -> None:
        self._group = group
        self._log: EventLog | None = None
        self._metrics: TierMetrics | None = None

    def begin_epoch(self, log: EventLog) -> None:
        """Announces in this log from now on."""
        self._log = log

    def report_to(self, metrics: TierMetrics) -> None:
        """Counts in these metrics from now on."""
        self._metrics = metrics

    @property
    def metrics(self) -> TierMetrics:
        assert self._metrics is not None, "no epoch has begun"
        return self._metrics

    def stored(self, tier: Tier, block_hash: BlockHash) -> None:
        """Announces a block that can be loaded from now on."""
        if self._log is not None:
            self._log.stored(block_hash, tier, self._group)

    def wrote(self, tier: Tier, block_hash: BlockHash, size_bytes: int) -> None:
        """Announces a block that was written to a tier."""
        self.metrics.wrote(tier, size_bytes)
        self.stored(tier, block_hash)

    def removed(self, tier: Tier, block_hash: BlockHash, reason: str) -> None:
        """Announces a block that has left a tier."""
        self._announce_removed(tier, block_hash)
        self.metrics.evicted(tier, reason)

    def aged(self, tier: Tier, block_hash: BlockHash, age_s: float) -> None:
        """Announces a block that has left a tier because others needed its room."""
        self._announce_removed(tier, block_hash)
        self.metrics.aged(tier, age_s)

    def _announce_removed(self, tier: Tier, block_hash: BlockHash) -> None:
        if self._log is not None:
            self._log.removed(block_hash, tier, self._group)
