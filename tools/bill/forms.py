"""One bill per page form: what a token and a page take, how many fit into each tier, and what a step can reach."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tools.bill.model import BilledModel
from tools.bill.options import BillFlags
from twostroke.base.errors import ConfigError
from twostroke.config import CacheConfig, ScheduleConfig
from twostroke.config.cache import HOST_CACHE_BYTES
from twostroke.kv_cache.form import FORMS, page_form
from twostroke.kv_cache.layout import PageRegion, PoolLayout
from twostroke.kv_cache.pool_size import PoolSize, enough_pages, host_pool_bytes
from twostroke.kv_cache.tiers.disk_store import disk_pages
from twostroke.kv_cache.windows.pool_share import SharedPool
from twostroke.models.memory_needs import DeviceNeeds, MemoryReading, device_pages, exact_blocks, exact_bytes

BILLED_DEVICE: Final = "with --device-memory"


@dataclass(frozen=True, slots=True)
class FormBill:
    """A worker's pages in one form."""

    form: str
    size: PoolSize
    host_pages: int
    disk_pages: int
    weights_step_bytes: int
    """What a step reads besides pages."""
    host_further: int = 0
    """Pages of the second page group in host memory, where there is one."""

    @property
    def token_bytes(self) -> float:
        return self.size.block_bytes / self.size.block_size

    @property
    def host_tier_bytes(self) -> int:
        """What the host tier takes, if there is one."""
        if not self.host_pages:
            return 0
        further = self.size.further
        parts = 0 if further is None else host_pool_bytes(self.host_further, further.page_bytes)
        return host_pool_bytes(self.host_pages, self.size.page_bytes) + parts

    @property
    def pool_bytes(self) -> int:
        """What the pool takes on a CPU, with its scratch page and generations."""
        return _layout_of(self.size).host_bytes

    def step_bytes(self, streams: int, tokens: int) -> float:
        """Returns what a decode step of so many streams reads. Each stream attends to `tokens`."""
        size, further = self.size, self.size.further
        seen_bytes = tokens * size.page_bytes / size.block_size
        if further is not None:
            seen_bytes += min(tokens, further.seen_tokens) * further.page_bytes / size.block_size
        return self.weights_step_bytes + streams * seen_bytes

    def ceiling(self, bytes_per_s: float, streams: int, tokens: int) -> float | None:
        """Returns the most tokens per second of all streams together; None for a model that reads nothing."""
        if not self.weights_step_bytes:
            return None
        return streams * bytes_per_s / self.step_bytes(streams, tokens)


def form_bills(model: BilledModel, flags: BillFlags) -> dict[str, FormBill]:
    """Returns a bill for every form that the model's pages can have.

    Raises ConfigError where the pool is refused in the form that is asked for.
    """
    memory = flags.memory
    bills = {}
    model.check_form(flags.form, memory.block_size)
    for form in dict.fromkeys((*FORMS, flags.form)):
        try:
            model.check_form(form, memory.block_size)
        except ConfigError:
            continue
        try:
            bills[form] = _bill_of(model, form, flags)
        except ConfigError:
            if form == flags.form:
                raise
            size = PoolSize(0, model.page_bytes(form, memory.block_size), memory.block_size)
            bills[form] = FormBill(form, size, 0, 0, model.weights.step)
    if flags.model.max_model_len is not None:
        bills[flags.form].size.check(flags.model.max_model_len)
    return bills


def _bill_of(model: BilledModel, form: str, flags: BillFlags) -> FormBill:
    """Raises ConfigError where the pool or a tier is refused."""
    size, memory = _size(model, form, flags), flags.memory
    host, *host_further = _tier_pages(size, memory.host_cache_bytes, _host_pages)
    disk, *_ = _tier_pages(size, memory.disk_cache_bytes, disk_pages)
    return FormBill(form, size, host, disk, model.weights.step, sum(host_further))


def _layout_of(size: PoolSize) -> PoolLayout:
    further = [] if size.further is None else [PageRegion(size.further.pages, size.further.page_bytes)]
    return PoolLayout.of(size.pages, size.page_bytes, *further)


def _tier_pages(size: PoolSize, most_bytes: int, pages_in: Callable[[int, int], int]) -> list[int]:
    """Returns how many pages of each group a tier holds; `pages_in` counts those of one size in some bytes."""
    layout = _layout_of(size)
    sizes = layout.page_sizes
    if not most_bytes:
        return [0] * len(sizes)
    return [pages_in(int(most_bytes * layout.share(group)), page_bytes) for group, page_bytes in enumerate(sizes)]


def _host_pages(most_bytes: int, page_bytes: int) -> int:
    return enough_pages(most_bytes, page_bytes, least=1, flag="--host-cache")


def _size(model: BilledModel, form: str, flags: BillFlags) -> PoolSize:
    memory = flags.memory
    page_bytes = model.page_bytes(form, memory.block_size)
    by_whole_blocks = memory.device_memory_bytes is not None and page_form(form).spans_block
    window = model.groups[-1].window if model.groups and not by_whole_blocks else None
    apart = [group.page_bytes(form, memory.block_size) for group in model.groups]
    pool = shared_pool(model, flags, (page_bytes,) if window is None else tuple(apart))
    if memory.device_memory_bytes is None:
        return pool.size(memory.kv_cache_memory_bytes or HOST_CACHE_BYTES)
    reading = MemoryReading(BILLED_DEVICE, memory.device_memory_bytes, memory.device_memory_bytes)
    working = model.working_bytes + _exact_bytes(model, form, flags)
    needs = DeviceNeeds(weight_bytes=model.weights.total, working_bytes=working, page_bytes=page_bytes)
    cache = CacheConfig(block_size=memory.block_size, kv_cache_memory_bytes=memory.kv_cache_memory_bytes)
    return pool.size(device_pages(reading, needs, cache) * page_bytes)


def shared_pool(model: BilledModel, flags: BillFlags, page_sizes: tuple[int, ...]) -> SharedPool:
    """Returns how a worker splits its pool, with pages of these sizes: of one group, or of each."""
    schedule = ScheduleConfig(max_num_seqs=flags.model.max_num_seqs)
    return SharedPool(
        page_sizes=page_sizes,
        window=model.groups[-1].window if len(page_sizes) > 1 else None,
        block_size=flags.memory.block_size,
        longest=model.longest,
        step_tokens=schedule.step_tokens(on_gpu=flags.memory.device_memory_bytes is not None),
    )


def _exact_bytes(model: BilledModel, form: str, flags: BillFlags) -> int:
    """Returns what unfinished blocks take in addition to the pages; a paced model's pages have one size in
    every form.
    """
    if not model.groups:
        return 0
    block_size, sequences = flags.memory.block_size, flags.model.max_num_seqs
    tokens = ScheduleConfig(max_num_seqs=sequences).step_tokens(on_gpu=True)
    blocks = exact_blocks(page_form(form), block_size, tokens=tokens, sequences=sequences)
    shapes = [group.shape(block_size) for group in model.groups]
    return sum(exact_bytes(blocks, page_form(form), shape, flags.model.dtype) for shape in shapes)
