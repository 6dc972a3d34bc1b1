"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and sliding upper layers where the config asks for them."""

from __future__ import annotations

from typing import Final

from twostroke.models.families.common import attention_rules, read_like_llama
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ModelSpec


def _read(published: PublishedConfig) -> ModelSpec:
    return read_like_llama(
        published, architecture=QWEN2.architecture, qkv_bias=True, layer_rules=attention_rules(published)
    )


QWEN2: Final = Family(architecture="Qwen2ForCausalLM", model_type="qwen2", read=_read)
