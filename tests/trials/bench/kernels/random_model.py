"""A model with random weights that computes whole steps as a worker does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tests.trials.bench.kernels.bench_attention import BLOCK, Span
from tests.trials.bench.kernels.bench_step import step_batch
from tests.trials.bench.kernels.setting import Setting
from tests.unit.kernels.pools.whole_pool import pool_over
from twostroke.kernels.attention.interface import RaggedBatch
from twostroke.kernels.choice import choose_attention
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.linear import SERVED
from twostroke.kv_cache.form import page_form
from twostroke.models.decoders.native_transformer import NativeTransformer
from twostroke.models.decoders.transformer import Model, Transformer
from twostroke.models.rope import rope_tables
from twostroke.models.weights.products import take_products


@dataclass(frozen=True, slots=True)
class RandomWeights:
    """Rounded to bfloat16, like the weights that are served."""

    draw: torch.Generator
    dtype: torch.dtype

    def take(self, name: str, *shape: int) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self.dtype)
        return (0.02 * torch.randn(shape, generator=self.draw)).to(self.dtype)

    def take_matrix(self, name: str, rows: int, inputs: int) -> torch.Tensor:
        return self.take(name, rows, inputs)


def pages_of(spans: Sequence[Span]) -> int:
    """Returns the pages that the largest of some steps needs."""
    return max(span.sequences * -(-span.context // BLOCK) for span in spans)


class RandomModel:
    """The setting's model as a worker computes it, over `pages` pages. Long chunks of latents may be expanded."""

    def __init__(self, setting: Setting, pages: int, *, is_deterministic: bool = False) -> None:
        self._setting = setting
        spec, dtype = setting.spec, setting.dtype
        shape, form = spec.page_shape(BLOCK), page_form(setting.model.dtype)
        pool = pool_over(torch.zeros(pages, form.page_bytes(shape), dtype=torch.uint8), form, shape, dtype)
        backend = choose_attention(
            pool, heads=spec.heads, rules=spec.rules, kernels=setting.kernels, dtype=dtype, team=setting.team
        )
        source = RandomWeights(torch.Generator().manual_seed(0), dtype)
        weights = take_products(source, spec, with_head=True, linears=setting.linears(), may_expand=True)
        if setting.kernels is not None and isinstance(backend, NativeAttention) and dtype == SERVED:
            self._model: Model = NativeTransformer(
                spec, weights, backend, setting.kernels, is_deterministic=is_deterministic
            )
        else:
            self._model = Transformer(spec, weights, backend)
        self._angles = rope_tables(spec.ropes, spec.max_position_embeddings)

    def step_of(self, span: Span) -> Callable[[], object]:
        """Returns one step; pages hold zeros where no step has written."""
        batch = step_batch(span, self._setting.spec.vocab_size)
        positions = torch.from_numpy(batch.positions)
        ragged = RaggedBatch(
            positions=positions,
            query_starts=tuple(batch.query_starts.tolist()),
            context_lens=tuple(batch.context_lens.tolist()),
            block_tables=torch.from_numpy(batch.block_tables).contiguous(),
            write_slots=torch.from_numpy(batch.write_slots),
            cosines=self._angles[0][positions],
            sines=self._angles[1][positions],
        )
        tokens, sampled = torch.from_numpy(batch.tokens), torch.tensor(ragged.query_starts[1:]) - 1

        def step() -> None:
            with self._setting.step():
                self._model.forward(tokens, ragged, sampled)

        return step
