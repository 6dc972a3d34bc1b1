"""Attention over pages of latents, in the shapes of DeepSeek V2-Lite and V3: layers of a decode or prefill step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from tests.bench.kernels.bench_attention import BLOCK, Span, all_layers
from tests.bench.kernels.setting import Setting
from tests.bench.kernels.timing import Result, Work, timed
from twostroke.kernels.attention_rules import AttentionRule
from twostroke.kv_cache.form import page_form
from twostroke.models.spec import LatentSpec, ModelSpec

LATENTS: Final = LatentSpec(
    rank=512, plain_dim=128, rope_dim=64, value_dim=128, query_rank=None, norm_epsilon=1e-6, is_interleaved=True
)
LAYERS: Final = 4
HEADS: Final = {"V2-Lite": 16, "V3": 128}
"""Query heads of the models. Their pages are the same."""
SPANS: Final = (Span(1, 1, 1024), Span(16, 1, 1024), Span(4, 1, 4096), Span(1, 256, 1024))


def bench_latents(setting: Setting, spans: Sequence[Span] = SPANS) -> Iterator[Result]:
    for name, heads in HEADS.items():
        spec = latent_model(setting.spec, heads)
        for span in spans:
            kind = "decode" if span.new == 1 else f"prefill of {span.new}"
            call = all_layers(replace(setting, spec=spec), span, setting.model.dtype)
            found = timed(call, setting.repeats)
            what = f"{name}, {kind}, {span.sequences} x {span.context} context"
            yield setting.result("latents", what, latent_work(spec, span, setting.model.dtype), found)


def latent_model(spec: ModelSpec, heads: int) -> ModelSpec:
    """Return a model whose pages hold latents, with what attention does not see from another one."""
    rule = AttentionRule(scale=LATENTS.query_dim**-0.5)
    return replace(
        spec,
        latents=LATENTS,
        heads=heads,
        kv_heads=1,
        head_dim=LATENTS.key_dim,
        layers=LAYERS,
        layer_rules=(rule,) * LAYERS,
    )


def latent_work(spec: ModelSpec, span: Span, form: str) -> Work:
    """Work of all layers: every latent is read once; of each head the whole key is multiplied, and then the latent."""
    assert spec.latents is not None
    token_bytes = page_form(form).page_bytes(spec.page_shape(BLOCK)) / BLOCK
    pairs = span.sequences * sum(range(span.context - span.new + 1, span.context + 1))
    return Work(
        bytes=span.sequences * span.context * token_bytes,
        operations=2.0 * spec.layers * pairs * spec.heads * (spec.latents.key_dim + spec.latents.rank),
    )
