"""Weights of one expert in files that have all experts of a layer in one tensor, as transformers 5 computes with them.

mlp.experts.gate_up_proj   [experts, gates then values, hidden]
mlp.experts.down_proj      [experts, hidden, width]

Such files call Mixtral's block of experts mlp, too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import torch

_EXPERT: Final = re.compile(r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
_ROUTER: Final = ".block_sparse_moe.gate.weight"
_PARTS: Final = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", None)),
}
"""The fused tensor of a projection, and which half of each expert's rows it is."""


@dataclass(frozen=True, slots=True)
class FusedExpert:
    """The place of one tensor in a file with fused experts."""

    name: str
    """The name of the tensor that holds it."""
    expert: int | None
    """None for a tensor of its own."""
    half: int | None
    """None where it is all rows of the expert."""

    @classmethod
    def of(cls, name: str) -> FusedExpert | None:
        """Return where the tensor of this name lies; None for one that has nothing to do with experts."""
        if name.endswith(_ROUTER):
            return cls(name.replace(_ROUTER, ".mlp.gate.weight"), None, None)
        found = _EXPERT.fullmatch(name)
        if found is None or found[3] not in _PARTS:
            return None
        fused, half = _PARTS[found[3]]
        return cls(f"{found[1]}.mlp.experts.{fused}", int(found[2]), half)

    def take(self, stored: Any) -> torch.Tensor:
        """Return the tensor from a lazy slice of a file. An expert that is not there has no rows."""
        if self.expert is None:
            whole: torch.Tensor = stored[:]
            return whole
        experts, rows = stored.get_shape()[:2]
        if self.expert >= experts:
            return torch.empty(0)
        first, end = (0, rows) if self.half is None else (rows // 2 * self.half, rows // 2 * (self.half + 1))
        part: torch.Tensor = stored[self.expert, first:end]
        return part
