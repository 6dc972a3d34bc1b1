"""The memory bill of a model: its weights, the working memory of its steps, and the pages that fit beside them.

Plain numbers of a ModelSpec: no torch and no transformers here. `twostroke bill` and the checks at a worker's start
count with this module.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from twostroke.base.errors import ConfigError
from twostroke.config import MIN_PAGES, CacheConfig
from twostroke.kernels.cpu.weights.packing import (
    BFLOAT16_BYTES,
    LARGE_PAGE_BYTES,
    copied_bytes,
    matrix_bytes,
    padded,
    stored_bytes,
)
from twostroke.kernels.layout import EXPANDED_BYTES, device_matrix_bytes
from twostroke.kv_cache.form import FORMS, AnyForm
from twostroke.kv_cache.layout import SCRATCH_PAGES
from twostroke.kv_cache.pool_size import enough_pages
from twostroke.models.shares.share import layouts_of_share
from twostroke.models.spec import DTYPE_BYTES, ModelSpec
from twostroke.models.weights.stored.model_files import LayoutOf
from twostroke.page_forms.page_form import PageShape

CONTEXT_BYTES: Final = 1 << 30
"""Bytes of a device for what we do not count: the driver's context, libraries' workspaces, recorded graphs,
fragmentation."""
DRAW_BYTES: Final = 40
"""Bytes for each logit of a row that is drawn on the device: float32 values and int64 counters, and what is computed
from them."""
HOST_PROCESS_BYTES: Final = 430 << 20
"""Bytes of a worker's process on a CPU without weights, pages and activations, as measured: Python, torch, libraries.
"""
KEPT_BYTES: Final = 4
"""Bytes for each logit of a recorded row, at most. Every recording keeps its own logits."""


@dataclass(frozen=True, slots=True)
class WeightBytes:
    """Bytes of a worker's weights: all of them, and those that a step reads."""

    total: int
    step: int
    """Bytes that one step reads at least: all matrices that its rows are multiplied with."""


def packed_weights(spec: ModelSpec, *, is_int8: bool, with_head: bool = True) -> WeightBytes:
    """Returns the bytes of weights in the native CPU kernels' format: one file for all workers of a host.

    The file contains a head even where it is tied to the embedding, or where `with_head` is false. `with_head` only
    says whether a step reads it. Norms and biases, some kilobytes, are not in the file.
    """
    layer = matrix_bytes(sum(spec.attention_inputs.values()), spec.hidden_size, is_int8=is_int8)
    layer += matrix_bytes(spec.hidden_size, spec.attended_width, is_int8=is_int8)
    layer += _head_bytes(spec, is_int8=is_int8)
    for rows, inputs in spec.query_matrices.values():
        layer += matrix_bytes(rows, inputs, is_int8=is_int8)
    if spec.experts is not None:
        router = spec.expert_layers * matrix_bytes(spec.experts.router_outputs, spec.hidden_size, is_int8=False)
    else:
        router = 0
    layers = spec.layers * layer + router
    head = matrix_bytes(len(spec.vocabulary), spec.hidden_size, is_int8=is_int8)
    embedding = copied_bytes(spec.table_bytes("bfloat16")) + copied_bytes(spec.position_bytes("bfloat16"))
    whole, read = (layers + _mlp_bytes(spec, is_int8=is_int8, of_one_token=one) for one in (False, True))
    whole += spec.layers * _expansion_bytes(spec, is_int8=is_int8)
    return WeightBytes(padded(embedding + whole + head, LARGE_PAGE_BYTES), read + head * with_head)


def _head_bytes(spec: ModelSpec, *, is_int8: bool) -> int:
    """Returns the bytes of the matrices that one layer has for each head: from queries to latents, and from latents to
    values."""
    latents = spec.latents
    if latents is None:
        return 0
    to = matrix_bytes(latents.latent_dim, latents.plain_dim, is_int8=is_int8)
    return spec.heads * (to + matrix_bytes(latents.value_dim, latents.latent_dim, is_int8=is_int8))


def _expansion_bytes(spec: ModelSpec, *, is_int8: bool) -> int:
    """Returns the bytes of the matrix that makes keys and values from one layer's latents. Only long chunks need it."""
    latents = spec.latents
    if latents is None:
        return 0
    return matrix_bytes(spec.heads * (latents.plain_dim + latents.value_dim), latents.latent_dim, is_int8=is_int8)


def _mlp_bytes(spec: ModelSpec, *, is_int8: bool, of_one_token: bool) -> int:
    """Returns the bytes of all MLPs, or only of those that compute one token."""
    return sum(
        count
        * (
            matrix_bytes(width, spec.hidden_size, is_int8=is_int8, is_gated=spec.activation.is_gated)
            + matrix_bytes(spec.hidden_size, width, is_int8=is_int8)
        )
        for width, count in spec.mlp_widths(of_one_token=of_one_token).items()
    )


def stored_weights(spec: ModelSpec, layout_of: LayoutOf, *, with_head: bool = True) -> WeightBytes:
    """Returns the bytes of a quantised file's weights in the native CPU kernels' format: one file for all workers of a
    host.

    `layout_of` has the matrices of the whole model by the names that the program has for them. A quantised table that
    is tied to the head is stored once. Only a share also stores the rows of its part of the head.
    """
    hidden, layout_of = spec.hidden_size, layouts_of_share(layout_of, spec)
    layers = read = 0
    for layer in range(spec.layers):
        attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        common = _product_bytes(
            [(f"{attention}.{part}", rows) for part, rows in spec.attention_inputs.items()], hidden, layout_of
        )
        common += _product_bytes([(f"{attention}.o_proj", hidden)], spec.attended_width, layout_of)
        common += _head_bytes(spec, is_int8=False)
        for name, (rows, inputs) in spec.query_matrices.items():
            common += _product_bytes([(f"{attention}.{name}", rows)], inputs, layout_of)
        experts = spec.experts_of(layer)
        if experts is None:
            common += _stored_mlp(spec, mlp, spec.intermediate_size, layout_of)
        else:
            common += matrix_bytes(experts.router_outputs, hidden, is_int8=False)
            common += _stored_mlp(spec, f"{mlp}.shared_expert", experts.shared_width, layout_of)
            names = (f"{mlp}.experts.{expert}" for expert in spec.held_experts)
            mlps = sorted(_stored_mlp(spec, name, experts.width, layout_of) for name in names)
            layers += sum(mlps)
            read += sum(mlps[: experts.per_token])
        layers += common + _expansion_bytes(spec, is_int8=False)
        read += common
    is_coded = layout_of("model.embed_tokens.weight") is not None
    table = copied_bytes(spec.vocab_size * hidden * BFLOAT16_BYTES)
    if is_coded:
        table = _product_bytes([("model.embed_tokens", spec.vocab_size)], hidden, layout_of)
    name = "model.embed_tokens" if spec.tie_word_embeddings else "lm_head"
    head = _product_bytes([(name, len(spec.vocabulary))], hidden, layout_of)
    own = 0 if is_coded and spec.tie_word_embeddings and spec.share is None else head
    positions = copied_bytes(spec.position_bytes("bfloat16"))
    return WeightBytes(padded(table + positions + layers + own, LARGE_PAGE_BYTES), read + head * with_head)


def _stored_mlp(spec: ModelSpec, name: str, width: int, layout_of: LayoutOf) -> int:
    """Returns the bytes of one MLP; 0 where it has no width."""
    if not width:
        return 0
    is_gated = spec.activation.is_gated
    firsts = [(f"{name}.{part}_proj", width) for part in (("gate", "up") if is_gated else ("up",))]
    first_bytes = _product_bytes(firsts, spec.hidden_size, layout_of, is_gated=is_gated)
    return first_bytes + _product_bytes([(f"{name}.down_proj", spec.hidden_size)], width, layout_of)


def _product_bytes(parts: list[tuple[str, int]], inputs: int, layout_of: LayoutOf, *, is_gated: bool = False) -> int:
    """Returns the bytes of stacked matrices. Neighbours with the same layout are one matrix."""
    layouts = [(layout_of(f"{name}.weight"), rows) for name, rows in parts]
    if is_gated and layouts[0][0] != layouts[1][0]:
        return matrix_bytes(layouts[0][1], inputs, is_int8=False, is_gated=True)
    total = 0
    for layout, neighbours in itertools.groupby(layouts, key=lambda each: each[0]):
        rows = sum(rows for _, rows in neighbours)
        if layout is not None:
            total += stored_bytes(rows, inputs, layout, is_gated=is_gated)
        else:
            total += matrix_bytes(rows // 2 if is_gated else rows, inputs, is_int8=False, is_gated=is_gated)
    return total


def plain_weights(spec: ModelSpec, dtype: str, *, with_head: bool = True) -> WeightBytes:
    """Returns the bytes of weights in the format of torch and devices."""
    total = spec.weight_bytes(dtype, with_head=with_head)
    headless = spec.weight_bytes(dtype, with_head=False, of_one_token=True)
    embedding = spec.table_bytes(dtype)
    unread = embedding + spec.position_bytes(dtype)
    return WeightBytes(total, headless - unread + embedding * with_head)


def weights_on_cpu(
    spec: ModelSpec, dtype: str, layouts: LayoutOf | None, *, is_int8: bool, with_head: bool = True
) -> tuple[WeightBytes, str]:
    """Returns the bytes of weights on CPUs, and the name of their format.

    Native kernels pack bfloat16 and int8 weights of our families; torch holds all others. `layouts` are those of the
    files.
    """
    if dtype != "bfloat16" or spec.generic is not None:
        return plain_weights(spec, dtype, with_head=with_head), dtype
    if layouts is not None:
        from twostroke.models.families.table import layouts_named  # loads torch

        named = layouts_named(layouts, spec)
        assert named is not None, "a model of our families has names"
        return stored_weights(spec, named, with_head=with_head), "packed as in the file"
    return packed_weights(spec, is_int8=is_int8, with_head=with_head), f"packed {'int8' if is_int8 else dtype}"


def device_weights(spec: ModelSpec, dtype: str, layout_of: LayoutOf | None, *, with_head: bool = True) -> WeightBytes:
    """Returns the bytes of weights on a device. Quantised matrices stay quantised, except for experts and the
    embedding.

    `layout_of` has matrices by the names that the program has for them. It is None where all are plain numbers.
    """
    plain, saved = plain_weights(spec, dtype, with_head=with_head), 0
    if layout_of is None:
        return plain
    for name, rows, inputs in _dense_matrices(spec, with_head=with_head):
        layout = layout_of(f"{name}.weight")
        if layout is not None:
            saved += rows * inputs * DTYPE_BYTES[dtype] - device_matrix_bytes(layout, rows, inputs)
    return WeightBytes(plain.total - saved, plain.step - saved)


def _dense_matrices(spec: ModelSpec, *, with_head: bool) -> Iterator[tuple[str, int, int]]:
    """Yields (name, rows, inputs) of every matrix that all rows of a step are multiplied with, except those of
    latents."""
    hidden = spec.hidden_size
    for layer in range(spec.layers):
        prefix = f"model.layers.{layer}"
        for part, rows in spec.attention_inputs.items():
            yield f"{prefix}.self_attn.{part}", rows, hidden
        yield f"{prefix}.self_attn.o_proj", hidden, spec.attended_width
        experts = spec.experts_of(layer)
        mlp, width = (f"{prefix}.mlp", spec.intermediate_size)
        if experts is not None:
            mlp, width = f"{prefix}.mlp.shared_expert", experts.shared_width
        if width:
            for part in ("gate", "up") if spec.activation.is_gated else ("up",):
                yield f"{mlp}.{part}_proj", width, hidden
            yield f"{mlp}.down_proj", hidden, width
    if with_head and not spec.tie_word_embeddings:
        yield "lm_head", spec.vocab_size, hidden


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The free memory and the whole memory of one device, read at one time."""

    device: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceNeeds:
    """The memory that a worker needs on its device, and the size of a page."""

    weight_bytes: int
    working_bytes: int
    """Bytes for one step's activations and logits, and for libraries."""
    page_bytes: int


def step_bytes(spec: ModelSpec, tokens: int) -> int:
    """Returns a generous size, in bytes, of a step's activations in its widest layer, inputs and outputs together."""
    return tokens * (8 * spec.hidden_size + 6 * spec.widest_mlp) * 4


def working_bytes(spec: ModelSpec, *, tokens: int, samples: int, recorded: int, has_codes: bool) -> int:
    """Returns a generous size, in bytes, of what a device holds besides weights and pages: activations, and draws from
    all logits.

    `recorded`: rows of all recordings together. `has_codes`: whether quantised matrices are expanded for long chunks.
    """
    logits = spec.vocab_size * (samples * DRAW_BYTES + recorded * KEPT_BYTES)
    return CONTEXT_BYTES + step_bytes(spec, tokens) + logits + has_codes * EXPANDED_BYTES


def exact_blocks(form: AnyForm, block_size: int, *, tokens: int, sequences: int) -> int:
    """Returns how many blocks a device keeps unrounded at once: an unfinished one of each sequence, and a step's own.

    n tokens in a row touch at most n / block_size blocks and two halves. Forms by token need no unrounded blocks.
    """
    return 2 * sequences + tokens // block_size if form.spans_block else 0


def exact_bytes(blocks: int, form: AnyForm, shape: PageShape, dtype: str) -> int:
    """Returns the bytes of this many unrounded pages, and of their scratch page if there are any.

    They hold the layers that pages of the form do not store in `dtype`.
    """
    exact = FORMS[dtype]
    page_bytes = sum(exact.page_bytes(part.shape) for part in form.parts(shape) if part.form.spans_block)
    return (blocks + SCRATCH_PAGES) * page_bytes if blocks else 0


def device_pages(memory: MemoryReading, needs: DeviceNeeds, cache: CacheConfig) -> int:
    """Returns how many pages a worker keeps on the device.

    Raises ConfigError where the device is too small for weights, working memory and pages. The error has the number of
    missing bytes.
    """
    fixed_bytes = needs.weight_bytes + needs.working_bytes
    least_bytes = cache.kv_cache_memory_bytes or MIN_PAGES * needs.page_bytes
    scratch_bytes = SCRATCH_PAGES * needs.page_bytes
    wanted_bytes = fixed_bytes + least_bytes + scratch_bytes
    if wanted_bytes > memory.free_bytes:
        missing_bytes = wanted_bytes - memory.free_bytes
        raise ConfigError(
            f"--device {memory.device} is {missing_bytes} bytes too small: weights take {needs.weight_bytes}, "
            f"working memory {needs.working_bytes}, pages {least_bytes + scratch_bytes}, but only {memory.free_bytes} "
            f"of its {memory.total_bytes} bytes are free; {_remedy(missing_bytes, needs, cache)}",
            field="kv_cache_memory" if cache.kv_cache_memory_bytes else "device",
        )
    if cache.kv_cache_memory_bytes is not None:
        return enough_pages(cache.kv_cache_memory_bytes, needs.page_bytes)
    share_bytes = min(int(memory.total_bytes * cache.device_share), memory.free_bytes)
    pages = (share_bytes - fixed_bytes) // needs.page_bytes - SCRATCH_PAGES
    if pages < MIN_PAGES:
        raise ConfigError(
            f"--device {memory.device}: this worker's share of its memory is {share_bytes} bytes, "
            f"{wanted_bytes - share_bytes} too few for weights ({needs.weight_bytes}), working memory "
            f"({needs.working_bytes}) and {MIN_PAGES} pages; give --kv-cache-memory, or start fewer workers on it",
            field="kv_cache_memory",
        )
    return pages


def _remedy(missing_bytes: int, needs: DeviceNeeds, cache: CacheConfig) -> str:
    """Returns what to change so that the worker fits."""
    asked = cache.kv_cache_memory_bytes
    if asked is not None and (smaller := asked - missing_bytes) >= MIN_PAGES * needs.page_bytes:
        return f"use --kv-cache-memory {smaller} or less, or free {missing_bytes} bytes"
    return f"free {missing_bytes} bytes, or take a larger device"
