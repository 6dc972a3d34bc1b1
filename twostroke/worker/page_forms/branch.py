"""Page forms as a branch of a worker: those that store a block as a whole, and pulls between workers of two forms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from twostroke.config import Role
from twostroke.kv_cache.form import page_form
from twostroke.observability.telemetry import family_of
from twostroke.rpc.v1 import control_pb2
from twostroke.scheduler.branches import SharedConstraint
from twostroke.scheduler.constraints.exact_blocks import ExactBlocks
from twostroke.scheduler.values import SchedulerLimits
from twostroke.transfer.base import Identity
from twostroke.transfer.registry import HOST_NAMES, open_transports
from twostroke.transfer.sockets.tls import wrapper_for
from twostroke.worker.branches import Branch, BranchHost
from twostroke.worker.page_forms.converted_pages import ConvertedPages
from twostroke.worker.page_forms.converting_landing import ConvertingLanding


class PageForms(Branch):
    def __init__(self, host: BranchHost) -> None:
        super().__init__(host)
        self._end = end = _end_of(host)
        self.served = end if isinstance(end, ConvertedPages) else None
        self.landing = end if isinstance(end, ConvertingLanding) else None
        host.metrics.registry.register(_Conversions(host.config.role, end))

    def shared(self, limits: SchedulerLimits) -> tuple[SharedConstraint, ...]:
        config = self.host.config
        spans_block = not config.model.is_paced and page_form(config.kv_format).spans_block
        return (ExactBlocks(self.host.pool, limits.block_size),) if spans_block else ()

    async def open(self, identity: Identity) -> None:
        if self._end is not None:
            fingerprint = self.host.facts.identity_in(self._end.form)
            await self._end.open(dataclasses.replace(identity, fingerprint=fingerprint))

    async def shut(self) -> None:
        if self._end is not None:
            await self._end.close()

    def add_to_load(self, load: control_pb2.Load) -> None:
        load.conversion_page_s = 0.0 if self._end is None else self._end.converter.page_s


def _end_of(host: BranchHost) -> ConvertedPages | ConvertingLanding | None:
    """Returns this worker's end of pulls between roles of two forms: the source's, the puller's, or neither."""
    config, conversion = host.config, host.facts.conversion
    if conversion is None:
        return None
    names = [name for name in config.runtime.transports or HOST_NAMES if name != "cuda_ipc"]  # they lie in host memory
    transports = open_transports(
        names, config.host, config.patience.dead_after_s, wrapper_for(config.cluster_tls), config.ports.converted
    )
    end = ConvertedPages if config.role is Role.PREFILL else ConvertingLanding
    return end(host.memory, conversion, transports)


class _Conversions(Collector):
    """Reports the cost of conversions at every scrape."""

    def __init__(self, role: Role, end: ConvertedPages | ConvertingLanding | None) -> None:
        self._role = role.value
        self._end = end

    def collect(self) -> Iterable[CounterMetricFamily]:
        end = self._end
        pages, seconds = (0, 0.0) if end is None else (end.converter.pages, end.converter.seconds)
        original_bytes, sent_bytes = end.served_bytes if isinstance(end, ConvertedPages) else (0, 0)
        for name, text, value in (
            ("converted_pages", "Pages converted here, from another form or for workers of one.", pages),
            ("conversion_seconds", "Time spent on converting pages.", seconds),
            ("converted_original_bytes", "Bytes of served converted pages, as they lie here.", original_bytes),
            ("converted_sent_bytes", "Bytes of served converted pages, as they were sent.", sent_bytes),
        ):
            yield family_of(CounterMetricFamily, self._role, name, text, value)
