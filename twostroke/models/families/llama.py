"""Llama: the plain decoder that most others differ from."""

from __future__ import annotations

from typing import Final

from twostroke.models.families.common import attention_bias, read_like_llama
from twostroke.models.families.published import PublishedConfig
from twostroke.models.families.tensors import Family
from twostroke.models.spec import ModelSpec


def _read(published: PublishedConfig) -> ModelSpec:
    return read_like_llama(published, architecture=LLAMA.architecture, **attention_bias(published))


LLAMA: Final = Family(architecture="LlamaForCausalLM", model_type="llama", read=_read)
