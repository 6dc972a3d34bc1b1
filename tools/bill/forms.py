"""One bill per page form: what a token and a page take, how many fit into each tier, and what a step can reach.

A mixed bill says what it takes to give decode workers pages of another form than prefill workers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tools.bill.model import BilledModel
from tools.bill.options import BillFlags
from twostroke.base.errors import ConfigError
from twostroke.config import Role, WorkerConfig
from twostroke.config.cache import KV_FORMATS
from twostroke.engine.backends.facts import PIECE_TOKENS
from twostroke.engine.backends.memory_plan import MemoryPlan
from twostroke.kv_cache.form import FORMS, Conversion, KvForm
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.pool_size import PoolSize, enough_pages, host_pool_bytes
from twostroke.kv_cache.tiers.disk_store import disk_pages


@dataclass(frozen=True, slots=True)
class FormBill:
    """A worker's pages in one form."""

    form: str
    size: PoolSize
    layout: PoolLayout
    host: tuple[int, ...]
    """Pages of each page group in host memory."""
    disk_pages: int
    weights_step_bytes: int
    """What a step reads besides pages."""

    @property
    def host_pages(self) -> int:
        return self.host[0]

    @property
    def token_bytes(self) -> float:
        return self.size.block_bytes / self.size.block_size

    @property
    def host_tier_bytes(self) -> int:
        """What the host tier takes, if there is one."""
        if not self.host_pages:
            return 0
        return sum(map(host_pool_bytes, self.host, self.layout.page_sizes))

    @property
    def pool_bytes(self) -> int:
        """What the pool takes on a CPU, with its scratch page and generations."""
        return self.layout.host_bytes

    def step_bytes(self, streams: int, tokens: int) -> float:
        """Returns what a decode step of this many streams reads. Each stream attends to `tokens`."""
        return self.weights_step_bytes + streams * self.size.seen_bytes(tokens)

    def ceiling(self, bytes_per_s: float, streams: int, tokens: int) -> float | None:
        """Returns the most tokens per second of all streams together; None for a model that reads nothing."""
        if not self.weights_step_bytes:
            return None
        return streams * bytes_per_s / self.step_bytes(streams, tokens)


def form_bills(model: BilledModel) -> dict[str, FormBill]:
    """Returns a bill for every form that the model's pages can have.

    Raises ConfigError where the pool is refused in the form that is asked for.
    """
    flags, plan = model.flags, model.plan
    if flags.model.max_model_len is not None:
        plan.size.check(flags.model.max_model_len)
    bills = {}
    for form in dict.fromkeys((*FORMS, flags.form)):
        try:
            own = plan if form == flags.form else model.planned(model.config(kv_format=form, kv_exact_layers=0))
            bills[form] = _bill_of(form, own, flags)
        except ConfigError as error:
            if form == flags.form:
                raise
            if error.field == "kv_format":  # such pages cannot be
                continue
            layout = PoolLayout.of(0, model.block_bytes(form))
            size = PoolSize(0, layout.block_bytes, flags.memory.block_size)
            bills[form] = FormBill(form, size, layout, (0,), 0, plan.weights.step)
    return bills


def _bill_of(form: str, plan: MemoryPlan, flags: BillFlags) -> FormBill:
    """Raises ConfigError where a tier is refused."""
    memory = flags.memory
    host = _tier_pages(plan.layout, memory.host_cache_bytes, _host_pages)
    disk, *_ = _tier_pages(plan.layout, memory.disk_cache_bytes, disk_pages)
    return FormBill(form, plan.size, plan.layout, tuple(host), disk, plan.weights.step)


def _tier_pages(layout: PoolLayout, most_bytes: int, pages_in: Callable[[int, int], int]) -> list[int]:
    """Returns how many pages of each group a tier holds; `pages_in` counts those of one size in some bytes."""
    sizes = layout.page_sizes
    if not most_bytes:
        return [0] * len(sizes)
    return [pages_in(int(most_bytes * layout.share(group)), page_bytes) for group, page_bytes in enumerate(sizes)]


def _host_pages(most_bytes: int, page_bytes: int) -> int:
    return enough_pages(most_bytes, page_bytes, least=1, flag="--host-cache")


@dataclass(frozen=True, slots=True)
class MixedBill:
    """Prefill workers keep pages in the billed form, decode workers in this one."""

    form: str
    """The form of decode workers' pages."""
    sent_page_bytes: int
    """Bytes of a page on its way."""
    prefill_pages: int
    """Pages of a prefill worker, each with room for what it is converted into; on a GPU that room is the host's."""
    conversion_s: float | None
    """Seconds to convert one page on a core of this machine; None where nothing is measured."""


def mixed_bills(model: BilledModel, forms: dict[str, FormBill]) -> tuple[MixedBill, ...]:
    """Returns a bill for every other form that decode workers can have; none for a paced model."""
    if not model.groups:
        return ()
    asked = model.flags.form
    there = [form for form in dict.fromkeys((asked, *KV_FORMATS)) if form in forms]
    cache_flags = {form: {} if form == asked else {"decode_kv_format": form} for form in there}
    configs = {form: model.config(Role.PREFILL, **cache) for form, cache in cache_flags.items()}
    return tuple(
        _mixed(model, forms[form], config)
        for form, config in configs.items()
        if config.kv_format != config.peer_kv_format
    )


def _mixed(model: BilledModel, sent: FormBill, config: WorkerConfig) -> MixedBill:
    flags = model.flags
    try:
        pages = model.planned(config).layout.regions[0].pages
    except ConfigError:  # such a worker would be refused
        pages = 0
    seconds = _conversion_s(model, sent.form) if flags.machine.measure else None
    return MixedBill(config.peer_kv_format, sent.size.block_bytes, pages, seconds)


def _conversion_s(model: BilledModel, form: str) -> float:
    """Measures it as a prefill worker does when it starts."""
    from twostroke.worker.page_forms.page_converter import time_of_a_conversion

    flags, seconds = model.flags, 0.0
    is_native = flags.model.dtype == "bfloat16" and flags.memory.block_size % PIECE_TOKENS == 0
    for group in model.groups:
        # What is subtracted from keys is no matter of their values.
        shape, has_centers = group.shape, model.spec is not None and model.spec.has_key_bias
        centers = np.zeros((shape.layers, shape.kv_heads, shape.head_dim), np.float32) if has_centers else None
        has_pieces = is_native and shape.latent_dim is None
        conversion = Conversion(
            KvForm(flags.form), KvForm(form, flags.form), shape, has_pieces=has_pieces, key_centers=centers
        )
        seconds += time_of_a_conversion(conversion)
    return seconds
