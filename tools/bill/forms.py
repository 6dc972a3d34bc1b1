"""One bill per page form: what a token and a page take, how many fit into each tier, and what a step can reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tools.bill.model import BilledModel
from tools.bill.options import BillFlags
from twostroke.base.errors import ConfigError
from twostroke.engine.backends.memory_plan import MemoryPlan
from twostroke.kv_cache.form import FORMS
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
        """Returns what a decode step of so many streams reads. Each stream attends to `tokens`."""
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
            bills[form] = _bill_of(form, plan if form == flags.form else _planned_in(form, model), flags)
        except ConfigError as error:
            if form == flags.form:
                raise
            if error.field == "kv_format":  # such pages cannot be
                continue
            layout = PoolLayout.of(0, model.block_bytes(form))
            size = PoolSize(0, layout.block_bytes, flags.memory.block_size)
            bills[form] = FormBill(form, size, layout, (0,), 0, plan.weights.step)
    return bills


def _planned_in(form: str, model: BilledModel) -> MemoryPlan:
    return model.planned(model.config(kv_format=form, kv_exact_layers=0))


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
