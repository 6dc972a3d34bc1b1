"""Mistral: Llama. Early models have sliding attention in all layers."""

from __future__ import annotations

from typing import Final

from twostroke.models.families.common import attention_rules, read_like_llama
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ModelSpec


def _read(published: PublishedConfig) -> ModelSpec:
    return read_like_llama(published, architecture=MISTRAL.architecture, layer_rules=attention_rules(published))


MISTRAL: Final = Family(architecture="MistralForCausalLM", model_type="mistral", read=_read)
