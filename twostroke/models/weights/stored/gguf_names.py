"""The names of tensors in GGUF files, and of the same tensors in the model's own files. No torch here."""

from __future__ import annotations

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

FAMILIES: Final = ("llama", "qwen2", "qwen3")
"""Values of general.architecture whose tensors have these names."""
PAIRED_ROWS: Final = frozenset({"llama"})
"""Families whose files have the two halves of each head's queries and keys as pairs of neighbours."""


def gguf_name(name: str) -> str:
    """Return the name in a GGUF file of a tensor that the model calls `name`; itself where there is none."""
    stem, _, part = name.rpartition(".")
    if stem in _OF_MODEL:
        return f"{_OF_MODEL[stem]}.{part}"
    layer, _, rest = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_OF_LAYER[rest]}.{part}" if rest in _OF_LAYER else name


def is_paired(architecture: str, name: str) -> bool:
    """Whether the rows of this tensor are queries or keys in pairs of neighbours."""
    return architecture in PAIRED_ROWS and name.rpartition(".")[0].endswith(("q_proj", "k_proj"))
