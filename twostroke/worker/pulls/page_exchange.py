"""The page exchange: all by which one epoch of a worker gives pages to other workers and gets theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from twostroke.config import WorkerConfig
from twostroke.rpc.membership import Membership
from twostroke.transfer.base import Identity, PageEndpoint, PageTransport
from twostroke.transfer.registry import HOST_NAMES, default_names, open_transports
from twostroke.transfer.sockets.tls import SocketWrapper, wrapper_for
from twostroke.worker.engine_state import EngineState
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.pulls.converted_pages import ConvertedPages
from twostroke.worker.pulls.digests import PageDigests
from twostroke.worker.pulls.pull_client import PullClient, PullLimits
from twostroke.worker.request_validator import RequestValidator


class PageExchange:
    """Owns the page transports; `open` before use, `close` at the end."""

    def __init__(
        self,
        transports: list[PageTransport],
        converted: ConvertedPages | None,
        digests: PageDigests,
        pulls: PullClient,
    ) -> None:
        self.transports = transports
        self.converted = converted
        """Converts pages for the other role, where that one has another form."""
        self.digests = digests
        self.pulls = pulls
        self.endpoints: list[PageEndpoint] = []

    @classmethod
    def of(
        cls,
        config: WorkerConfig,
        engine_state: EngineState,
        *,
        us: Membership,
        validator: RequestValidator,
        metrics: WorkerMetrics,
        wake: Callable[[], None],
    ) -> PageExchange:
        """`wake` is called as pages arrive."""
        wrapper = wrapper_for(config.cluster_tls)
        transports = _transports_of(config, engine_state, wrapper)
        digests = PageDigests(engine_state.memory)
        pulls = PullClient(
            validator,
            engine_state.pool,
            digests,
            transports,
            metrics,
            us=us,
            limits=PullLimits(copy_s=config.pull_timeout_s, silence_s=config.patience.dead_after_s),
            wake=wake,
        )
        return cls(transports, _converted_of(config, engine_state, wrapper), digests, pulls)

    @property
    def conversion_page_s(self) -> float:
        """Seconds of converting a page; 0 where nothing is converted."""
        return self.converted.page_s if self.converted is not None else 0.0

    async def open(self, identity: Identity, engine_state: EngineState) -> None:
        """Let workers of this identity read pages, and those of the other form converted ones."""
        for transport in self.transports:
            self.endpoints.append(await transport.open(engine_state.memory, identity))
        if self.converted is not None:
            await self.converted.open(dataclasses.replace(identity, fingerprint=engine_state.facts.converted_identity))

    async def close(self) -> None:
        await self.pulls.close()
        for transport in self.transports:
            await transport.close()
        if self.converted is not None:
            await self.converted.close()
        await self.digests.close()


def _transports_of(config: WorkerConfig, engine_state: EngineState, wrapper: SocketWrapper) -> list[PageTransport]:
    names = config.runtime.transports or default_names(engine_state.memory)
    return open_transports(names, config.host, config.patience.dead_after_s, wrapper, config.ports.pages)


def _converted_of(config: WorkerConfig, engine_state: EngineState, wrapper: SocketWrapper) -> ConvertedPages | None:
    """Return what converts pages for the other role, where that one has another form."""
    conversion = engine_state.facts.conversion
    if conversion is None:
        return None
    names = [name for name in config.runtime.transports or HOST_NAMES if name != "cuda_ipc"]  # they lie in host memory
    transports = open_transports(names, config.host, config.patience.dead_after_s, wrapper, config.ports.converted)
    return ConvertedPages(engine_state.memory, conversion, transports)
