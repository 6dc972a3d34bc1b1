"""The page exchange: all by which one epoch of a worker gives pages to other workers and gets theirs."""

from __future__ import annotations

from collections.abc import Callable

from twostroke.config import WorkerConfig
from twostroke.rpc.membership import Membership
from twostroke.transfer.base import Identity, PageEndpoint, PageTransport
from twostroke.transfer.registry import default_names, open_transports
from twostroke.transfer.sockets.tls import wrapper_for
from twostroke.worker.engine_state import EngineState
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.page_ends import DirectLanding, LandingInOtherForm, PageDigests
from twostroke.worker.pulls.pull_client import PullClient, PullLimits
from twostroke.worker.request_validator import RequestValidator


class PageExchange:
    """Owns the page transports; `open` before use, `close` at the end."""

    def __init__(
        self,
        config: WorkerConfig,
        engine_state: EngineState,
        *,
        us: Membership,
        validator: RequestValidator,
        metrics: WorkerMetrics,
        converting: LandingInOtherForm | None,
        wake: Callable[[], None],
    ) -> None:
        """`wake` is called when pages arrive."""
        self._memory = memory = engine_state.memory
        names, silence_s = config.runtime.transports or default_names(memory), config.patience.dead_after_s
        wrapper = wrapper_for(config.cluster_tls)
        self.transports: list[PageTransport] = open_transports(
            names, config.host, silence_s, wrapper, config.ports.pages
        )
        self.endpoints: list[PageEndpoint] = []
        self.digests = PageDigests(memory)
        self.pulls = PullClient(
            validator,
            engine_state.pool,
            DirectLanding(self.digests, self.transports, memory.pages),
            metrics,
            converting=converting,
            us=us,
            limits=PullLimits(copy_s=config.pull_timeout_s, silence_s=silence_s),
            wake=wake,
        )

    async def open(self, identity: Identity) -> None:
        """Lets workers of this identity read pages."""
        for transport in self.transports:
            self.endpoints.append(await transport.open(self._memory, identity))

    async def close(self) -> None:
        await self.pulls.close()
        for transport in self.transports:
            await transport.close()
        await self.digests.close()
