"""Qwen3: Llama with a norm on each head of q and k, and sliding layers where the config turns them on."""

from __future__ import annotations

from typing import Final

from twostroke.models.families.common import attention_bias, attention_rules, read_like_llama
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ModelSpec


def _read(published: PublishedConfig) -> ModelSpec:
    rules = attention_rules(published)
    return read_like_llama(
        published, architecture=QWEN3.architecture, qk_norm=True, layer_rules=rules, **attention_bias(published)
    )


QWEN3: Final = Family(architecture="Qwen3ForCausalLM", model_type="qwen3", read=_read)
