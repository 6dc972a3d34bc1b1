"""What it takes to give decode workers pages of another form than prefill workers: bytes moved, pages kept, seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tools.bill.forms import FormBill
from tools.bill.model import BilledModel
from twostroke.base.errors import ConfigError
from twostroke.config import Role, WorkerConfig
from twostroke.config.cache import KV_FORMATS
from twostroke.engine.backends.facts import PIECE_TOKENS
from twostroke.kv_cache.form import Conversion, KvForm


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
    configs = {form: _prefill_config(model, form) for form in there}
    return tuple(
        _mixed(model, forms[form], config)
        for form, config in configs.items()
        if config.kv_format != config.peer_kv_format
    )


def _prefill_config(model: BilledModel, form: str) -> WorkerConfig:
    """Returns the config of a prefill worker, where decode workers' pages have a form."""
    return model.config(Role.PREFILL, **({} if form == model.flags.form else {"decode_kv_format": form}))


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
