"""The page exchange: all by which one epoch of a worker gives pages to other workers and gets theirs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from twostroke.config import Role, WorkerConfig
from twostroke.kv_cache.form import KvForm
from twostroke.rpc.membership import Membership
from twostroke.transfer.base import Identity, PageEndpoint, PageTransport
from twostroke.transfer.registry import HOST_NAMES, default_names, open_transports
from twostroke.transfer.sockets.tls import SocketWrapper, wrapper_for
from twostroke.worker.engine_state import EngineState
from twostroke.worker.landing.converted_pages import ConvertedPages
from twostroke.worker.landing.digests import PageDigests
from twostroke.worker.landing.landing import ConvertingLanding, DirectLanding
from twostroke.worker.metrics import WorkerMetrics
from twostroke.worker.pulls.pull_client import PullClient, PullLimits
from twostroke.worker.request_validator import RequestValidator


class PageExchange:
    """Owns the page transports; `open` before use, `close` at the end."""

    def __init__(
        self,
        transports: list[PageTransport],
        converted: ConvertedPages | None,
        converting: ConvertingLanding | None,
        digests: PageDigests,
        pulls: PullClient,
    ) -> None:
        self.transports = transports
        self.converted = converted
        """Converts a prefill worker's pages for decode workers of another form."""
        self.converting = converting
        """Converts a prefill worker's pages after a decode worker of another form has pulled them."""
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
        """Makes the page exchange of a worker. `wake` is called when pages arrive."""
        wrapper = wrapper_for(config.cluster_tls)
        transports = _transports_of(config, engine_state, wrapper)
        converted, converting = _conversions_of(config, engine_state, wrapper)
        digests = PageDigests(engine_state.memory)
        pulls = PullClient(
            validator,
            engine_state.pool,
            DirectLanding(digests, transports, engine_state.memory.pages),
            metrics,
            converting=converting,
            us=us,
            limits=PullLimits(copy_s=config.pull_timeout_s, silence_s=config.patience.dead_after_s),
            wake=wake,
        )
        return cls(transports, converted, converting, digests, pulls)

    @property
    def conversion_page_s(self) -> float:
        """Seconds of converting a page; 0 where nothing is converted."""
        end = self.converted or self.converting
        return 0.0 if end is None else end.converter.page_s

    async def open(self, identity: Identity, engine_state: EngineState) -> None:
        """Lets workers of this identity read pages, and convert pages at this end of pulls between forms."""
        for transport in self.transports:
            self.endpoints.append(await transport.open(engine_state.memory, identity))
        if self.converted is not None:
            await self.converted.open(_in_form(identity, engine_state, self.converted.form))
        if self.converting is not None:
            self.converting.open(_in_form(identity, engine_state, self.converting.form))

    async def close(self) -> None:
        await self.pulls.close()
        for transport in self.transports:
            await transport.close()
        if self.converted is not None:
            await self.converted.close()
        if self.converting is not None:
            await self.converting.close()
        await self.digests.close()


def _transports_of(config: WorkerConfig, engine_state: EngineState, wrapper: SocketWrapper) -> list[PageTransport]:
    names = config.runtime.transports or default_names(engine_state.memory)
    return open_transports(names, config.host, config.patience.dead_after_s, wrapper, config.ports.pages)


def _conversions_of(
    config: WorkerConfig, engine_state: EngineState, wrapper: SocketWrapper
) -> tuple[ConvertedPages | None, ConvertingLanding | None]:
    """Returns this worker's end of pulls between roles of two forms: the source's, the puller's, or neither."""
    conversion = engine_state.facts.conversion
    if conversion is None:
        return None, None
    names = [name for name in config.runtime.transports or HOST_NAMES if name != "cuda_ipc"]  # they lie in host memory
    transports = open_transports(names, config.host, config.patience.dead_after_s, wrapper, config.ports.converted)
    if config.role is Role.PREFILL:
        return ConvertedPages(engine_state.memory, conversion, transports), None
    return None, ConvertingLanding(engine_state.memory, conversion, transports)


def _in_form(identity: Identity, engine_state: EngineState, form: KvForm) -> Identity:
    return dataclasses.replace(identity, fingerprint=engine_state.facts.identity_in(form))
