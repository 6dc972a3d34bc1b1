"""The lower tiers as a branch of a worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

from twostroke.base.ids import BlockHash
from twostroke.config import WorkerConfig
from twostroke.engine.backends.built import BuiltEngine
from twostroke.rpc.v1 import control_pb2
from twostroke.scheduler.sequence import Sequence as KnownSequence
from twostroke.worker.branches import Branch, BranchHost
from twostroke.worker.engine_state import LoadedBranch
from twostroke.worker.role_host import RoleHandlers
from twostroke.worker.supply.supply import Supplier
from twostroke.worker.tiers.copies.eviction_copies import EvictionCopies
from twostroke.worker.tiers.group_tiers import GroupTiers
from twostroke.worker.tiers.loads.prefetch import Prefetch
from twostroke.worker.tiers.loads.tier_loads import TierLoads
from twostroke.worker.tiers.metrics import TierMetrics, tier_rates
from twostroke.worker.tiers.opening import open_tiers


class Tiers(Branch):
    @staticmethod
    def load(config: WorkerConfig, built: BuiltEngine) -> GroupTiers | None:
        """Opens the tiers. None if the settings give no bytes to any tier."""
        cache = config.cache
        if not cache.host_cache_bytes and not cache.disk_cache_bytes:
            return None
        return open_tiers(config, built.model, built.memory)

    @classmethod
    def mount(cls, host: BranchHost, loaded: LoadedBranch | None) -> Tiers | None:
        return cls(host, loaded) if isinstance(loaded, GroupTiers) else None

    def __init__(self, host: BranchHost, tiers: GroupTiers) -> None:
        super().__init__(host)
        self.tiers = tiers
        full, pool, block_size = tiers.full, host.pool, host.facts.block_size
        self.gate = self.copies = EvictionCopies(full.offload, pool, host.memory, host.wake, self._loaded_depth)
        self.loads = TierLoads(
            tiers.groups,
            pool,
            block_size,
            new_session=host.new_session,
            compute_s=host.compute_s,
            wake=host.wake,
        )
        self.below = self.loads.for_others
        self.prefetch: Prefetch = Prefetch(full, pool, self.loads, block_size, compute_s=host.compute_s, wake=host.wake)
        tiers.report_to(TierMetrics(host.metrics.registry, host.config.role.value))

    def suppliers_of(self, sequence: KnownSequence) -> Sequence[Supplier]:
        return (self.loads.for_sequences.supplier_of(sequence),)

    def watching(self, handlers: RoleHandlers) -> Iterable[Callable[[], Awaitable[object]]]:
        """Returns the adoption of dead workers' pages."""
        return (lambda: asyncio.gather(*self.tiers.adopting(self.host.feed.publish_changes)),)

    def stop(self) -> None:
        self.prefetch.stop()
        self.loads.running.stop()

    async def close(self) -> None:
        self.copies.stop()
        await self.tiers.wait_idle()

    def add_to_load(self, load: control_pb2.Load) -> None:
        load.tiers.extend(tier_rates(self.tiers.uses()))

    def forget_cached(self) -> int:
        return self.tiers.forget_all()

    def _loaded_depth(self, hashes: Sequence[BlockHash]) -> int:
        return self.loads.for_sequences.depth(hashes)
