"""Steps of a model with experts beside those of a dense one of equal active size: random weights in the form of Qwen3.

What a step must read grows with the experts that its rows have between them: all are read in a prefill, and with 16
rows of a decode step nearly all, while a dense model of the same active size has a fraction of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Final

import torch

from tests.bench.kernels.bench_attention import BLOCK, Span, attention_work
from tests.bench.kernels.bench_step import step_batch
from tests.bench.kernels.setting import Setting
from tests.bench.kernels.timing import Result, Work, timed_by_turns
from twostroke.kernels.attention import RaggedBatch
from twostroke.kernels.choice import choose_attention, pool_over
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.linear import SERVED
from twostroke.kv_cache.form import page_form
from twostroke.models.memory_needs import plain_weights
from twostroke.models.native_transformer import NativeTransformer
from twostroke.models.rope import rope_tables
from twostroke.models.spec import DTYPE_BYTES, ExpertSpec, ModelSpec, RopeSpec
from twostroke.models.transformer import Model, Transformer
from twostroke.models.weights.products import take_products

SPANS: Final = (Span(1, 1, 128), Span(16, 1, 128), Span(1, 512, 512))
HEAD_DIM: Final = 64
QWEN3: Final = ModelSpec(
    architecture="Qwen3MoeForCausalLM",
    hidden_size=768,
    layers=16,
    heads=12,
    kv_heads=4,
    head_dim=HEAD_DIM,
    intermediate_size=1536,
    vocab_size=16_384,
    max_position_embeddings=2048,
    eos_token_ids=(),
    ropes=(RopeSpec(kind="default", inverse_frequencies=(0.1,) * (HEAD_DIM // 2)),),
    norm_epsilon=1e-6,
    tie_word_embeddings=True,
    qk_norm=True,
    experts=ExpertSpec(count=64, per_token=8, width=192, is_normalised=True),
)
"""490 million weights, of which a token has 94 million, as the dense model: eight experts are as wide as its MLP."""


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


def bench_experts(setting: Setting, spec: ModelSpec = QWEN3) -> Iterator[Result]:
    """Both take turns, so that they meet the same machine."""
    dense = replace(spec, experts=None)
    forms = {"dense": replace(setting, spec=dense), "experts": replace(setting, spec=spec)}
    models = {name: _RandomModel(each) for name, each in forms.items()}
    for span in SPANS:
        found = timed_by_turns([model.step_of(span) for model in models.values()], setting.repeats)
        for (name, each), times in zip(forms.items(), found, strict=True):
            kind = "decode" if span.new == 1 else f"prefill of {span.new}"
            work = _work(each, span)
            yield setting.result("experts", f"{name}, {kind}, {span.sequences} x {span.context} context", work, times)


def _work(setting: Setting, span: Span) -> Work:
    """Read are all experts that so many tokens have when routers choose evenly; each is multiplied with its own."""
    spec, tokens = setting.spec, span.sequences * span.new
    active = plain_weights(spec, "bfloat16").step / DTYPE_BYTES["bfloat16"]
    read = active + _expert_weights(spec) * (_share(spec, tokens) - _share(spec, 1))
    attention = attention_work(setting, span, setting.model.dtype)
    head = spec.vocab_size * spec.hidden_size
    return Work(
        bytes=read * setting.weight_bytes + attention.bytes,
        operations=2.0 * ((active - head) * tokens + head * span.sequences) + attention.operations,
    )


def _expert_weights(spec: ModelSpec) -> int:
    if spec.experts is None:
        return 0
    each = (1 + spec.activation.width) * spec.experts.width * spec.hidden_size
    return spec.expert_layers * spec.experts.count * each


def _share(spec: ModelSpec, tokens: int) -> float:
    """Return the share of a layer's experts that so many tokens have between them."""
    if spec.experts is None:
        return 1.0
    return 1 - (1 - spec.experts.per_token / spec.experts.count) ** tokens


class _RandomModel:
    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        spec, dtype = setting.spec, setting.dtype
        most = max(span.sequences * -(-span.context // BLOCK) for span in SPANS)
        shape, form = spec.page_shape(BLOCK), page_form(setting.model.dtype)
        pool = pool_over(torch.zeros(most, form.page_bytes(shape), dtype=torch.uint8), form, shape, dtype)
        backend = choose_attention(
            pool, heads=spec.heads, rules=spec.rules, kernels=setting.kernels, dtype=dtype, team=setting.team
        )
        source = RandomWeights(torch.Generator().manual_seed(0), dtype)
        weights = take_products(source, spec, with_head=True, linears=setting.linears())
        if setting.kernels is not None and isinstance(backend, NativeAttention) and dtype == SERVED:
            self._model: Model = NativeTransformer(spec, weights, backend, setting.kernels)
        else:
            self._model = Transformer(spec, weights, backend)
        self._angles = rope_tables(spec.ropes, spec.max_position_embeddings)

    def step_of(self, span: Span) -> Callable[[], object]:
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
