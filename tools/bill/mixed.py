"""What it takes to give decode workers pages of another form than prefill workers: bytes moved, pages kept, seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tools.bill.forms import FormBill, shared_pool
from tools.bill.model import BilledModel
from tools.bill.options import BillFlags
from twostroke.base.errors import ConfigError
from twostroke.config import Role
from twostroke.config.cache import HOST_CACHE_BYTES, KV_FORMATS, form_name
from twostroke.config.worker import ranks_of
from twostroke.engine.backends.facts import PIECE_TOKENS
from twostroke.kv_cache.form import Conversion, KvForm
from twostroke.kv_cache.pool_size import PoolSize
from twostroke.kv_cache.windows.pool_share import SharedPool


@dataclass(frozen=True, slots=True)
class MixedBill:
    """Prefill workers keep pages in the billed form, decode workers in this one, or of another number of ranks."""

    form: str
    """The form of decode workers' pages."""
    sent_page_bytes: int
    """Bytes of a page on its way."""
    prefill_pages: int
    """Pages of a prefill worker, each with room for what it is converted into; on a GPU that room is the host's."""
    conversion_s: float | None
    """Seconds to convert one page on a core of this machine; None where nothing is measured."""


def mixed_bills(model: BilledModel, forms: dict[str, FormBill], flags: BillFlags) -> tuple[MixedBill, ...]:
    """Returns a bill for every other form that decode workers can have; none for a paced model."""
    if not model.groups:
        return ()
    own = ranked(flags.form, flags, Role.PREFILL)
    there = [form for form in dict.fromkeys((flags.form, *KV_FORMATS)) if form in forms]
    return tuple(_mixed(model, forms, flags, form) for form in there if ranked(form, flags, Role.DECODE) != own)


def ranked(form: str, flags: BillFlags, role: Role) -> str:
    """Returns the form of pages that workers of a role keep in `form`: it says how many ranks they have."""
    return form_name(form, 0, flags.model.dtype, ranks_of(flags.model.config, role))


def _mixed(model: BilledModel, forms: dict[str, FormBill], flags: BillFlags, form: str) -> MixedBill:
    own, sent = forms[flags.form].size, forms[form].size
    pages = own.pages
    if flags.memory.device_memory_bytes is None:
        pool_bytes = flags.memory.kv_cache_memory_bytes or HOST_CACHE_BYTES
        pages = _prefill_pages(shared_pool(model, flags, _sizes_beside(own, sent)), pool_bytes)
    seconds = _conversion_s(model, flags, form) if flags.machine.measure else None
    return MixedBill(ranked(form, flags, Role.DECODE), sent.block_bytes, pages, seconds)


def _prefill_pages(pool: SharedPool, pool_bytes: int) -> int:
    try:
        return pool.layout(pool_bytes).regions[0].pages
    except ConfigError:  # such a worker would be refused
        return 0


def _sizes_beside(own: PoolSize, sent: PoolSize) -> tuple[int, ...]:
    """Returns the bytes of a page and of its converted copy: of each group, if both forms keep groups apart."""
    if own.further is None or sent.further is None:
        return (own.block_bytes + sent.block_bytes,)
    return own.page_bytes + sent.page_bytes, own.further.page_bytes + sent.further.page_bytes


def _conversion_s(model: BilledModel, flags: BillFlags, form: str) -> float:
    """Measures it as a prefill worker does when it starts."""
    from twostroke.worker.landing.page_converter import time_of_a_conversion

    block, seconds = flags.memory.block_size, 0.0
    is_native = flags.model.dtype == "bfloat16" and block % PIECE_TOKENS == 0
    for group in model.groups:
        # What is subtracted from keys is no matter of their values.
        size = (group.layers, group.kv_heads, group.head_dim)
        centers = np.zeros(size, np.float32) if model.has_key_centers else None
        has_pieces = is_native and group.latent_rank is None
        conversion = Conversion(
            KvForm(flags.form), KvForm(form, flags.form), group.shape(block), has_pieces=has_pieces, key_centers=centers
        )
        seconds += time_of_a_conversion(conversion)
    return seconds
