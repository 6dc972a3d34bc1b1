"""What the engine must know of a model, as plain numbers: no torch and no transformers here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from twostroke.kv_cache.form import PageShape, page_form

SUPPORTED_ARCHITECTURES: Final = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary positions, with any scaling already worked into the numbers."""

    kind: str
    """"default", "linear", "llama3" or "yarn"; for people, the arithmetic needs only the numbers."""
    inverse_frequencies: tuple[float, ...]
    """One per pair of dimensions, float32 values."""
    attention_scaling: float = 1.0
    """Factor on cosine and sine (yarn)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    architecture: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    """Tokens that the model was made for, rope scaling included."""
    eos_token_ids: tuple[int, ...]
    rope: RopeSpec
    rms_norm_eps: float
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Each head of q and k is normalised before it is rotated (Qwen3)."""

    @property
    def has_key_bias(self) -> bool:
        """Whether rope rotates keys that have a bias, which no norm changed."""
        return self.qkv_bias and not self.qk_norm

    def page_shape(self, block_size: int) -> PageShape:
        """Return the dimensions of a page."""
        return PageShape(self.layers, self.kv_heads, block_size, self.head_dim)

    def page_bytes(self, block_size: int, form: str) -> int:
        """Return the bytes of K and V of all layers of one block in a form that `page_form` takes."""
        return page_form(form).page_bytes(self.page_shape(block_size))

    def weight_bytes(self, dtype: str, *, with_head: bool) -> int:
        """Bytes of all weights as a worker holds them; a head that is tied to the embedding takes none of its own."""
        q_rows, kv_rows = self.heads * self.head_dim, self.kv_heads * self.head_dim
        linears = [
            (q_rows + 2 * kv_rows, self.hidden_size, self.qkv_bias),
            (self.hidden_size, q_rows, self.attention_output_bias),
            (2 * self.intermediate_size, self.hidden_size, self.mlp_bias),
            (self.hidden_size, self.intermediate_size, self.mlp_bias),
        ]
        layer = sum(rows * (columns + has_bias) for rows, columns, has_bias in linears) + 2 * self.hidden_size
        layer += 2 * self.head_dim * self.qk_norm
        tables = 2 if with_head and not self.tie_word_embeddings else 1
        return (self.layers * layer + self.hidden_size) * DTYPE_BYTES[dtype] + tables * self.table_bytes(dtype)

    def table_bytes(self, dtype: str) -> int:
        """Return the bytes of the embedding, which are as many as those of a head."""
        return self.vocab_size * self.hidden_size * DTYPE_BYTES[dtype]
