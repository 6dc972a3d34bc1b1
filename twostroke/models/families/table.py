"""The families that are served, by architecture."""

from __future__ import annotations

from typing import Final

from twostroke.kernels.layout import Layout
from twostroke.models.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3
from twostroke.models.families.gemma import GEMMA2, GEMMA3
from twostroke.models.families.gpt import GPT2, GPT_NEOX
from twostroke.models.families.gpt_oss import GPT_OSS
from twostroke.models.families.llama import LLAMA, MISTRAL, MIXTRAL
from twostroke.models.families.phi3 import PHI3
from twostroke.models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from twostroke.models.families.tensors import family_source
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.stored.model_files import LayoutOf
from twostroke.models.weights.tensors import WeightSource

FAMILIES: Final = {
    family.architecture: family
    for family in (
        LLAMA,
        MISTRAL,
        QWEN2,
        QWEN3,
        GEMMA2,
        GEMMA3,
        PHI3,
        GPT_NEOX,
        GPT2,
        MIXTRAL,
        QWEN2_MOE,
        QWEN3_MOE,
        GPT_OSS,
        DEEPSEEK_V2,
        DEEPSEEK_V3,
    )
}


def layouts_named(layout_of: LayoutOf | None, spec: ModelSpec) -> LayoutOf | None:
    """Returns the layouts of a model's matrices by the names that the rest of the program knows.

    Returns None for a model of plain numbers, and for one that transformers' code computes, which has no such names.
    """
    if layout_of is None or spec.generic is not None:
        return None
    family = FAMILIES[spec.architecture]

    def layout(name: str) -> Layout | None:
        module, _, kind = name.rpartition(".")
        is_expanded = family.is_transposed and module.startswith("model.layers.")
        return None if is_expanded else layout_of(f"{family.name_of(module)}.{kind}")

    return layout


def named(source: WeightSource, spec: ModelSpec) -> WeightSource:
    """Returns the source of a model's tensors under the names that the rest of the program knows."""
    return family_source(source, FAMILIES[spec.architecture], spec)
