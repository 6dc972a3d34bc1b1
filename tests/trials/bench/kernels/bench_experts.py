"""Steps of a model with experts beside those of a dense one of equal active size: random weights in the form of Qwen3.

What a step must read grows with the experts that its rows have between them: all are read in a prefill, and with 16
rows of a decode step nearly all, while a dense model of the same active size has a fraction of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from tests.trials.bench.kernels.bench_attention import Span, attention_work
from tests.trials.bench.kernels.random_model import RandomModel, pages_of
from tests.trials.bench.kernels.setting import Setting
from tests.trials.bench.kernels.timing import Result, Work, timed_by_turns
from twostroke.models.memory_needs import plain_weights
from twostroke.models.spec import DTYPE_BYTES, ExpertSpec, ModelSpec, RopeSpec

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


def bench_experts(setting: Setting, spec: ModelSpec = QWEN3) -> Iterator[Result]:
    """Both take turns, so that they meet the same machine."""
    dense = replace(spec, experts=None)
    forms = {"dense": replace(setting, spec=dense), "experts": replace(setting, spec=spec)}
    models = {name: RandomModel(each, pages_of(SPANS)) for name, each in forms.items()}
    for span in SPANS:
        found = timed_by_turns([model.step_of(span) for model in models.values()], setting.repeats)
        for (name, each), times in zip(forms.items(), found, strict=True):
            kind = "decode" if span.new == 1 else f"prefill of {span.new}"
            work = _work(each, span)
            yield setting.result("experts", f"{name}, {kind}, {span.sequences} x {span.context} context", work, times)


def _work(setting: Setting, span: Span) -> Work:
    """Reads are all experts that so many tokens have when routers choose evenly; each is multiplied with its own."""
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
    """Returns the share of a layer's experts that so many tokens have between them."""
    if spec.experts is None:
        return 1.0
    return 1 - (1 - spec.experts.per_token / spec.experts.count) ** tokens
