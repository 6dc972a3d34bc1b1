"""Finds a model's tensors in GGUF files by their Hugging Face names. No torch here.

`ARCHITECTURES` is the table: one line for each value of general.architecture that is served. The names in GGUF files
come from the `gguf` package, with which llama.cpp's converter writes them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT: Final = re.compile(r"(.+\.experts)\.(\d+)\.(.+)")
FIRST_LAYER: Final = "model.layers.0."


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufNames:
    """How GGUF files of one architecture differ from Hugging Face files."""

    is_paired: bool = False
    """Whether queries and keys are in interleaved rotary order. Hugging Face files have one half after the other."""
    has_ones_in_norms: bool = False
    """Whether the stored weights of norms include the 1 that the model adds to them (Gemma)."""


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """The place of a tensor of the model in a file: a whole tensor, or one expert of a tensor."""

    name: str
    expert: int | None = None
    """Index of the expert, where that tensor holds all experts of a layer. None: the whole tensor is meant."""


_GEMMA: Final = GgufNames(has_ones_in_norms=True)

ARCHITECTURES: Final[Mapping[str, GgufNames]] = {
    "llama": GgufNames(is_paired=True),
    "qwen2": GgufNames(),
    "qwen3": GgufNames(),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": GgufNames(),
    "qwen2moe": GgufNames(),
    "qwen3moe": GgufNames(),
    "gpt-oss": GgufNames(),
}
"""Values of general.architecture that are served."""


def gguf_place(architecture: str, name: str) -> GgufPlace:
    """Returns where a GGUF file holds the tensor with this Hugging Face name.

    Where the architecture has none, the result has `name` unchanged, which no GGUF file has.
    """
    layer = _LAYER.fullmatch(name)
    general = name if layer is None else f"{FIRST_LAYER}{layer[2]}"
    expert = _EXPERT.fullmatch(general)
    if expert is not None:
        general = f"{expert[1]}.{expert[3]}"
    # The name map has modules; `sinks` is a parameter that GGUF stores as a module's weight.
    stem, _, kind = (general, "", "weight") if general.endswith(".sinks") else general.rpartition(".")
    module = _names(architecture).get(stem)
    if module is None:
        return GgufPlace(name)
    if layer is not None:
        module = f"blk.{layer[1]}.{module.removeprefix('blk.0.')}"
    return GgufPlace(f"{module}.{kind}", None if expert is None else int(expert[2]))


@functools.cache
def _names(architecture: str) -> Mapping[str, str]:
    """Returns the GGUF names of modules by their Hugging Face names, for a model with one layer."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return {name: gguf_name for name, (_, gguf_name) in get_tensor_name_map(arch, 1).mapping.items()}


def is_paired(architecture: str, name: str) -> bool:
    """Returns whether the rows of this tensor are queries or keys in interleaved rotary order."""
    return ARCHITECTURES[architecture].is_paired and name.rpartition(".")[0].endswith(("q_proj", "k_proj"))


def has_one(architecture: str, name: str) -> bool:
    """Returns whether the stored numbers of this tensor include the 1 that the model adds."""
    return ARCHITECTURES[architecture].has_ones_in_norms and name.endswith("norm.weight")
