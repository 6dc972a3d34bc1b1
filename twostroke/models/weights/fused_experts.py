"""Weights of one expert in files that have all experts of a layer in one tensor, as transformers 5 computes with them.

No torch here: tensors come from lazy slices of files.

mlp.experts.gate_up_proj   [experts, gates then values, hidden]
mlp.experts.down_proj      [experts, hidden, width]

Such files call Mixtral's block of experts mlp, too. Experts with biases (gpt-oss) have inputs before outputs, and gates
and values by turns; their codes of 4 bits, which stand for a matrix, have outputs first.

mlp.experts.gate_up_proj          [experts, hidden, gate value gate value ..]
mlp.experts.gate_up_proj_bias     [experts, gate value gate value ..]
mlp.experts.gate_up_proj_blocks   [experts, gate value gate value .., hidden / 32, 16]
mlp.experts.gate_up_proj_scales   [experts, gate value gate value .., hidden / 32]
mlp.experts.down_proj, .._bias    [experts, width, hidden], [experts, hidden]
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Final

_EXPERT: Final = re.compile(r"(.+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.(weight|bias)")
_ROUTER: Final = ".block_sparse_moe.gate.weight"
_PARTS: Final = {
    **dict.fromkeys(("gate_proj", "w1"), ("gate_up_proj", 0)),
    **dict.fromkeys(("up_proj", "w3"), ("gate_up_proj", 1)),
    **dict.fromkeys(("down_proj", "w2"), ("down_proj", None)),
}
"""The fused tensor of a projection, and the half of each expert's outputs that it takes; None for all of them."""


@dataclass(frozen=True, slots=True)
class FusedExpert:
    """The place of one tensor in a file that may have fused experts."""

    name: str
    """The name of the file's tensor that contains it."""
    expert: int | None
    """The index of the expert in that tensor. None: the whole tensor is meant."""
    half: int | None = None
    """The half of the expert's outputs, 0 or 1; None for all of them."""
    is_by_turns: bool = False
    """Whether gates and values take turns; else all gates come first."""
    is_transposed: bool = False
    """Whether inputs come before outputs."""

    @classmethod
    def of(cls, name: str, names: Container[str]) -> FusedExpert | None:
        """Returns the place of the tensor of this name in a file with these tensors; None where it is not a tensor of
        experts.

        A quantised matrix is found under the common prefix of its tensors' names.
        """
        if name.endswith(_ROUTER):
            return cls(name.replace(_ROUTER, ".mlp.gate.weight"), None)
        found = _EXPERT.fullmatch(name)
        if found is None or found[3] not in _PARTS:
            return None
        part, half = _PARTS[found[3]]
        fused, expert = f"{found[1]}.mlp.experts.{part}", int(found[2])
        if f"{fused}_bias" not in names:
            return cls(fused, expert, half)
        if found[4] == "bias":
            return cls(f"{fused}_bias", expert, half, is_by_turns=True)
        return cls(fused, expert, half, is_by_turns=True, is_transposed=fused in names)

    def take(self, stored: Any) -> Any:
        """Returns the tensor from a lazy slice of a file; without rows for an expert that the file does not have."""
        if self.expert is None:
            return stored[:]
        experts, outputs = stored.get_shape()[:2]
        if self.expert >= experts:
            return stored[:0]
        if self.half is not None and not self.is_by_turns:
            return stored[self.expert, outputs // 2 * self.half : outputs // 2 * (self.half + 1)]
        tensor = stored[self.expert]
        if self.is_transposed:
            tensor = tensor.t()
        return (tensor if self.half is None else tensor[self.half :: 2]).contiguous()
