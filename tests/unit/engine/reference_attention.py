"""Attention that can be recorded, in plain torch: what a device's backend does, from the same tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from twostroke.engine.backends.cuda.plan import DeviceKernels
from twostroke.kernels import reference
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.attention.rules import AnyRules, rule_of
from twostroke.kernels.attention.spans import Spans, TokenSlots, span_fields, spans_of
from twostroke.kernels.choice import device_linears
from twostroke.kernels.page_forms.nibble_attention import NibbleAttention, NibbleAttentionStep
from twostroke.kernels.page_forms.nibble_pool import NibblePool
from twostroke.kernels.pools.page_pool import PagePool
from twostroke.kernels.pools.parted_pool import (
    AnyPool,
    PartedDeviceAttention,
    PartedPool,
    RecordedAttention,
    UniformPool,
    rules_of_parts,
)
from twostroke.kernels.products.elementwise import TorchElementwise
from twostroke.kernels.products.grouped import TorchGrouped
from twostroke.models.spec import ModelSpec


def reference_kernels(pool: AnyPool, spec: ModelSpec, dtype: torch.dtype) -> DeviceKernels:
    attention = reference_attention(pool, spec.heads, spec.rules)
    return DeviceKernels(attention, TorchElementwise(), TorchGrouped(), device_linears(torch.device("cpu")))


def reference_attention(pool: AnyPool, heads: int, rules: AnyRules) -> RecordedAttention:
    if isinstance(pool, PartedPool):
        of_parts = zip(pool.parts, rules_of_parts(pool, rules), strict=True)
        return PartedDeviceAttention(pool, [_attention(part, heads, some) for part, some in of_parts])
    return _attention(pool, heads, rules)


def _attention(pool: UniformPool, heads: int, rules: AnyRules) -> RecordedAttention:
    if isinstance(pool, NibblePool):
        return ReferenceNibbleAttention(NibbleAttention(pool, heads, rules))
    return ReferenceAttention(pool, rules)


@dataclass(frozen=True)
class ReferenceNibbleAttention:
    """Pages of 4-bit numbers; where tokens lie exact is said by the step."""

    backend: NibbleAttention

    def begin(self, batch: RaggedBatch) -> NibbleAttentionStep:
        assert batch.exact_slots is not None
        return self.backend.begin(batch)

    def begin_decode(self, spans: Spans, placement: TokenSlots) -> NibbleAttentionStep:
        contexts = spans.fields[:, 3]
        return self.begin(
            RaggedBatch(
                positions=contexts - 1,
                query_starts=tuple(range(len(contexts) + 1)),
                context_lens=tuple(contexts.tolist()),
                block_tables=spans.block_tables,
                write_slots=placement.write_slots,
                cosines=placement.cosines,
                sines=placement.sines,
                exact_slots=placement.exact_slots,
            )
        )


@dataclass(frozen=True)
class ReferenceAttention:
    pool: PagePool
    rules: AnyRules

    def begin(self, batch: RaggedBatch) -> ReferenceStep:
        spans = spans_of(batch)
        fields = span_fields(spans, self.pool.device)
        whole = Spans(fields, batch.block_tables, max(span[2] for span in spans), max(span[3] for span in spans))
        return ReferenceStep(self, whole, TokenSlots(batch.write_slots, batch.cosines, batch.sines))

    def begin_decode(self, spans: Spans, placement: TokenSlots) -> ReferenceStep:
        assert spans.most_rows == 1
        return ReferenceStep(self, spans, placement)


@dataclass(frozen=True)
class ReferenceStep:
    backend: ReferenceAttention
    spans: Spans
    placement: TokenSlots

    def store(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        rope = rule_of(self.backend.rules, layer).rope
        return reference.rotate_and_store(q, k, v, self.backend.pool, layer, self.placement, rope)

    def attend(self, layer: int, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        out = torch.empty_like(q)
        reference.span_attention(q, self.backend.pool, layer, self.spans, self.backend.rules, out, sinks=sinks)
        return out.flatten(1)
