"""Facts about a worker's loaded model and its page pool, for the parts of a worker that compute nothing. No torch
here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from twostroke.base.cache_key import cache_key
from twostroke.base.ids import PageId
from twostroke.base.tokenizer_file import tokenizer_field
from twostroke.config import Role, WorkerConfig
from twostroke.config.worker import kv_format_of
from twostroke.engine.backends.memory_plan import MemoryPlan
from twostroke.kv_cache.block import HASH_SCHEME
from twostroke.kv_cache.form import Conversion, KvForm, page_form
from twostroke.kv_cache.groups.page_group import PageGroup
from twostroke.kv_cache.layout import PageRegion, PoolLayout
from twostroke.kv_cache.windows.shape import WindowShape
from twostroke.models.weights.digest import DIGEST_BYTES
from twostroke.page_forms.page_form import PageShape

if TYPE_CHECKING:  # torch, which a fleet of paced workers does without
    import torch

    from twostroke.models.spec import ModelSpec

PIECE_TOKENS = 16
"""Tokens of a piece in the native order. Blocks are cut into pieces if their size is a multiple of it."""
GROUPS_APART = ";groups=apart"
"""Added to the fingerprint where each page group of the model has pages of its own."""
NATIVE_ORDER = ";order=pieces"
"""Added to the fingerprint where native kernels store the tokens of a page in their own order: see native/page.h."""

TRACES: Final = ("_name_or_path", "transformers_version")
"""Fields of a config.json that say which program saved it last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Facts about the loaded model and its page pool, for the parts of a worker that compute nothing."""

    name: str
    """The name by which clients call it."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    kv_form: KvForm
    """The form of its pages."""
    conversion: Conversion | None = None
    """How pages of prefill workers are converted for decode workers. None where both have the same form."""
    block_size: int
    page_bytes: int
    """Bytes of a page of the first page group."""
    pages: int
    """Pages of the first group: one for each block that a pool holds."""
    advice: str
    """Advice to the operator about the size of the page pool, or empty."""
    fingerprint: str
    """Workers whose fingerprints differ hold different KV and never exchange pages. It does not include the page form.
    """
    further: tuple[PageRegion, ...] = ()
    """The pages of further page groups."""
    page_groups: tuple[PageGroup, ...] = ()
    """The layers of each page group."""
    model_dir: str = ""
    """The folder of the model's files; empty for a paced model."""

    @property
    def layout(self) -> PoolLayout:
        """Returns how the pages of all groups lie in the pool's memory."""
        return PoolLayout.of(self.pages, self.page_bytes, *self.further)

    @property
    def window_shape(self) -> WindowShape | None:
        """Returns how the pages of the window group are laid out; None where there is no such group."""
        if not self.further:
            return None
        window = self.page_groups[-1].window
        assert window is not None, "the last of several groups has a window"
        ends = () if self.conversion is None else (self.conversion.source, self.conversion.target)
        has_exact_blocks = any(page_form(form.format).spans_block for form in (self.kv_form, *ends))
        first, slots = PageId(self.layout.first(1)), self.further[0].pages
        return WindowShape(first, slots, window, self.block_size, has_exact_blocks)

    @property
    def page_identity(self) -> str:
        """The fingerprint and the form: pages of the same blocks are interchangeable where both agree."""
        return self.identity_in(self.kv_form)

    def identity_in(self, form: KvForm) -> str:
        """Returns the identity of pages of the same model in this form."""
        return f"{self.fingerprint};form={form}"


def model_facts(
    config: WorkerConfig,
    plan: MemoryPlan,
    spec: ModelSpec,
    model_dir: Path,
    key_centers: torch.Tensor | None,
) -> LoadedModel:
    """Returns the facts about a model in a directory. `key_centers` are needed where pages are converted."""
    facts = facts_of(
        config,
        plan,
        model=Path(config.model.model).name,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        revision=_revision_of(model_dir, spec),
    )
    return replace(
        facts,
        model_dir=str(model_dir),
        conversion=conversion_of(config, plan.shapes, plan.groups, key_centers),
        fingerprint=facts.fingerprint + GROUPS_APART * (len(plan.groups) > 1),
    )


def facts_of(
    config: WorkerConfig,
    plan: MemoryPlan,
    *,
    model: str,
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    revision: str,
) -> LoadedModel:
    block_size, dtype = config.cache.block_size, config.model.dtype
    first, *further = plan.layout.regions
    fingerprint = (
        f"model={model};revision={revision};block_size={block_size};hash={HASH_SCHEME};"
        f"dtype={dtype};weights={config.model.weights};code={cache_key('pages')}"
    )
    return LoadedModel(
        name=config.model.public_name,
        max_model_len=plan.longest,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        dtype=dtype,
        kv_form=_kv_form(config),
        block_size=block_size,
        page_bytes=first.page_bytes,
        pages=first.pages,
        further=tuple(further),
        page_groups=plan.groups,
        advice=plan.size.advice(plan.longest),
        fingerprint=fingerprint,
    )


def conversion_of(
    config: WorkerConfig,
    shapes: Sequence[PageShape],
    groups: tuple[PageGroup, ...],
    key_centers: torch.Tensor | None,
) -> Conversion | None:
    """Returns how pages of prefill workers are converted for decode workers. None where both have the same form."""
    prefill, decode = (kv_format_of(config.cache, config.model, role) for role in (Role.PREFILL, Role.DECODE))
    if prefill == decode:
        return None
    first, *further = (
        Conversion(
            KvForm(prefill),
            KvForm(decode, prefill),
            shape,
            has_pieces=False,
            key_centers=None if key_centers is None else key_centers[list(group.layers)].numpy(),
        )
        for shape, group in zip(shapes, groups, strict=True)
    )
    return replace(first, further=tuple(further))


def _kv_form(config: WorkerConfig) -> KvForm:
    own, peers = config.kv_format, config.peer_kv_format
    return KvForm(own, peers if config.role is Role.DECODE and own != peers else None)


def _revision_of(directory: Path, spec: ModelSpec) -> str:
    """Returns hashes of the config, of the attention that config and served length lead to, and of the tokenizer."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for trace in TRACES:
        config.pop(trace, None)
    # longrope has two sets of numbers: which of them is used depends on the served length
    attention = repr((spec.architecture, spec.ropes, spec.rules))
    return (
        f"{_hash(json.dumps(config, sort_keys=True).encode())};attention={_hash(attention.encode())};"
        f"{tokenizer_field(directory)}"
    )


def _hash(value: bytes) -> str:
    return hashlib.blake2b(value, digest_size=DIGEST_BYTES).hexdigest()
