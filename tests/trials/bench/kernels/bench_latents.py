"""Attention over pages of latents, in the shapes of DeepSeek V2-Lite and V3: layers of a decode or prefill step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Final

from tests.trials.bench.kernels.bench_attention import BLOCK, Span, all_layers
from tests.trials.bench.kernels.random_model import RandomModel, pages_of
from tests.trials.bench.kernels.setting import Setting
from tests.trials.bench.kernels.timing import Result, Work, timed, timed_by_turns
from twostroke.kernels.attention.rules import AttentionRule
from twostroke.kv_cache.form import page_form
from twostroke.models.spec import LatentSpec, ModelSpec, RopeSpec

LATENTS: Final = LatentSpec(
    latent_dim=512,
    plain_dim=128,
    rope_dim=64,
    value_dim=128,
    query_latent_dim=None,
    norm_epsilon=1e-6,
    is_interleaved=True,
)
LAYERS: Final = 4
HEADS: Final = {"V2-Lite": 16, "V3": 128}
"""Query heads of the models. Their pages are the same."""
SPANS: Final = (Span(1, 1, 1024), Span(16, 1, 1024), Span(4, 1, 4096), Span(1, 256, 1024))


PROMPTS: Final = (Span(1, 256, 256), Span(1, 256, 1024), Span(1, 1024, 1024), Span(1, 512, 4096))
"""Chunks that may be expanded."""
NARROW: Final = 64
"""The width of all but attention in steps that are timed for their attention: it takes some hundredths of them."""


def bench_latents(
    setting: Setting, spans: Sequence[Span] = SPANS, prompts: Sequence[Span] = PROMPTS
) -> Iterator[Result]:
    for name, heads in HEADS.items():
        spec = latent_model(setting.spec, heads)
        for span in spans:
            kind = "decode" if span.new == 1 else f"prefill of {span.new}"
            call = all_layers(replace(setting, spec=spec), span, setting.model.dtype)
            found = timed(call, setting.repeats)
            what = f"{name}, {kind}, {span.sequences} x {span.context} context"
            yield setting.result("latents", what, latent_work(spec, span, setting.model.dtype), found)
    if setting.kernels is not None and prompts:
        yield from _expanded_beside_absorbed(setting, prompts)


def _expanded_beside_absorbed(setting: Setting, prompts: Sequence[Span]) -> Iterator[Result]:
    """Times steps of V2-Lite's attention, its products with latents included; both ways take turns."""
    base = latent_model(setting.spec, HEADS["V2-Lite"])
    rope = RopeSpec(kind="default", inverse_frequencies=(0.1,) * (LATENTS.rope_dim // 2))
    spec = replace(
        base,
        architecture="DeepseekV2ForCausalLM",
        hidden_size=NARROW,
        intermediate_size=NARROW,
        vocab_size=NARROW,
        layers=1,
        layer_rules=base.rules[:1],
        ropes=(rope,),
        max_position_embeddings=max(span.context for span in prompts),
        qkv_bias=False,
        qk_norm=False,
        tie_word_embeddings=True,
    )
    narrow = replace(setting, spec=spec)
    absorbing, expanding = (
        RandomModel(narrow, pages_of(prompts), is_deterministic=is_deterministic) for is_deterministic in (True, False)
    )
    for span in prompts:
        found = timed_by_turns([absorbing.step_of(span), expanding.step_of(span)], setting.repeats)
        works = (_absorbed_work(spec, span), _expanded_work(spec, span))
        for way, work, times in zip(("absorbed", "expanded"), works, found, strict=True):
            yield setting.result("latents", f"V2-Lite, {way}, {span.new} at the end of {span.context}", work, times)


def _absorbed_work(spec: ModelSpec, span: Span) -> Work:
    """Counts attention, and the products of each new token with the weights of both ends."""
    attention = latent_work(spec, span, "bfloat16")
    ends = 2.0 * span.new * spec.heads * LATENTS.latent_dim * (LATENTS.plain_dim + LATENTS.value_dim)
    return replace(attention, operations=attention.operations + ends)


def _expanded_work(spec: ModelSpec, span: Span) -> Work:
    """Counts attention to keys and values, and what makes those of each token of the context."""
    attention = latent_work(spec, span, "bfloat16")
    by_pair = (LATENTS.query_dim + LATENTS.value_dim) / (LATENTS.key_dim + LATENTS.latent_dim)
    up = 2.0 * span.context * spec.heads * LATENTS.latent_dim * (LATENTS.plain_dim + LATENTS.value_dim)
    return replace(attention, operations=attention.operations * by_pair + up)


def latent_model(spec: ModelSpec, heads: int) -> ModelSpec:
    """Returns a model whose pages hold latents, with what attention does not see from another one."""
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
        operations=2.0 * spec.layers * pairs * spec.heads * (spec.latents.key_dim + spec.latents.latent_dim),
    )
