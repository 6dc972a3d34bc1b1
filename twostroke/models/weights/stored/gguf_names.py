"""The places of a model's tensors in GGUF files, by the names that the model's own files have for them. No torch here.

`ARCHITECTURES` is the table: one line for each value of general.architecture that is served. Names are those
of the `gguf` package, with which llama.cpp's converter writes them.
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
    """How files of one architecture differ from those of Llama."""

    is_paired: bool = False
    """Whether the two halves of each head's queries and keys lie as pairs of neighbours."""
    has_ones_in_norms: bool = False
    """Whether weights of norms have the 1 in them that the model adds."""


@dataclass(frozen=True, slots=True)
class GgufPlace:
    """The tensor that holds one of the model's."""

    name: str
    expert: int | None = None
    """Which of the experts in it; None for all of the tensor."""


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
    """Returns where a file of an architecture has what the model's own file calls `name`; that name if nowhere."""
    layer = _LAYER.fullmatch(name)
    general = name if layer is None else f"{FIRST_LAYER}{layer[2]}"
    expert = _EXPERT.fullmatch(general)
    if expert is not None:
        general = f"{expert[1]}.{expert[3]}"
    stem, _, kind = (general, "", "weight") if general.endswith(".sinks") else general.rpartition(".")
    place = _names(architecture).get(stem)
    if place is None:
        return GgufPlace(name)
    if layer is not None:
        place = f"blk.{layer[1]}.{place.removeprefix('blk.0.')}"
    return GgufPlace(f"{place}.{kind}", None if expert is None else int(expert[2]))


@functools.cache
def _names(architecture: str) -> Mapping[str, str]:
    """Returns the names of modules in GGUF files by those that other files have, of a model with one layer."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == architecture)
    return {name: place for name, (_, place) in get_tensor_name_map(arch, 1).mapping.items()}


def is_paired(architecture: str, name: str) -> bool:
    """Returns whether the rows of this tensor are queries or keys in pairs of neighbours."""
    return ARCHITECTURES[architecture].is_paired and name.rpartition(".")[0].endswith(("q_proj", "k_proj"))


def has_one(architecture: str, name: str) -> bool:
    """Returns whether a 1 that the model adds is in the numbers of this tensor."""
    return ARCHITECTURES[architecture].has_ones_in_norms and name.endswith("norm.weight")
