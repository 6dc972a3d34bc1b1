"""Mistral: Llama. Early models have a window in all layers."""

from __future__ import annotations

from typing import Final

from twostroke.models.families.common import one_window, read_like_llama
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ModelSpec


def _read(published: PublishedConfig) -> ModelSpec:
    return read_like_llama(published, architecture=MISTRAL.architecture, layer_rules=one_window(published))


MISTRAL: Final = Family(architecture="MistralForCausalLM", model_type="mistral", read=_read)
