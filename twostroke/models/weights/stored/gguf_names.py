"""The places of a model's tensors in GGUF files, by the names that the model's own files have for them. No torch here.

`ARCHITECTURES` is the table: one line for each value of general.architecture that is served. Names are those of
llama.cpp's gguf-py/gguf/tensor_mapping.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

_OF_MODEL: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_OF_LAYER: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER: Final = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT: Final = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufNames:
    """How files of one architecture differ from those of Llama."""

    layer: Mapping[str, str] = field(default_factory=dict)
    """Names of modules of a layer, * for the number of an expert: all experts of a layer are one tensor."""
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


def _experts(block: str, gate: str, up: str, down: str) -> dict[str, str]:
    parts = {"gate": gate, "up": up, "down": down}
    return {f"{block}.experts.*.{theirs}": f"ffn_{ours}_exps" for ours, theirs in parts.items()}


_GEMMA: Final = GgufNames(
    layer={
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
    has_ones_in_norms=True,
)
_QWEN_EXPERTS: Final = {"mlp.gate": "ffn_gate_inp"} | _experts("mlp", "gate_proj", "up_proj", "down_proj")

ARCHITECTURES: Final[Mapping[str, GgufNames]] = {
    "llama": GgufNames(
        layer={"block_sparse_moe.gate": "ffn_gate_inp"} | _experts("block_sparse_moe", "w1", "w3", "w2"), is_paired=True
    ),
    "qwen2": GgufNames(),
    "qwen3": GgufNames(),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "phi3": GgufNames(layer={"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}),
    "qwen2moe": GgufNames(
        layer=_QWEN_EXPERTS
        | {f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}
        | {"mlp.shared_expert_gate": "ffn_gate_inp_shexp"}
    ),
    "qwen3moe": GgufNames(layer=_QWEN_EXPERTS),
    "gpt-oss": GgufNames(
        layer={
            "post_attention_layernorm": "post_attention_norm",
            "mlp.router": "ffn_gate_inp",
            **_experts("mlp", "gate_proj", "up_proj", "down_proj"),
        }
    ),
}
"""Values of general.architecture whose files are read."""


def gguf_place(architecture: str, name: str) -> GgufPlace:
    """Return where a file of an architecture has what the model's own file calls `name`; that name if nowhere."""
    stem, _, kind = name.rpartition(".")
    if stem in _OF_MODEL:
        return GgufPlace(f"{_OF_MODEL[stem]}.{kind}")
    found = _LAYER.fullmatch(stem)
    if found is None:
        return GgufPlace(name)
    if kind == "sinks":
        return GgufPlace(f"blk.{found[1]}.attn_sinks.weight")
    names, expert = ARCHITECTURES[architecture].layer, _EXPERT.fullmatch(found[2])
    part = found[2] if expert is None else f"{expert[1]}.*.{expert[3]}"
    part = names.get(part) or _OF_LAYER.get(part, "")
    return GgufPlace(f"blk.{found[1]}.{part}.{kind}" if part else name, None if expert is None else int(expert[2]))


def is_paired(architecture: str, name: str) -> bool:
    """Whether the rows of this tensor are queries or keys in pairs of neighbours."""
    return ARCHITECTURES[architecture].is_paired and name.rpartition(".")[0].endswith(("q_proj", "k_proj"))


def has_one(architecture: str, name: str) -> bool:
    """Whether a 1 that the model adds is in the numbers of this tensor."""
    return ARCHITECTURES[architecture].has_ones_in_norms and name.endswith("norm.weight")
