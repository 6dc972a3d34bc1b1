"""What the decode workers of a fleet say about the model that they serve."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.kv_cache.form import KvForm


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingFacts:
    """What the decode workers say about the model they serve; they all say the same."""

    model: str
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    block_size: int
    pool_tokens: int
    """Tokens that fit into one decode worker's pool."""
    pool_pages: int
    page_bytes: int
    dtype: str
    kv_form: KvForm
    """The form of their pages."""
    fingerprint: str
    tail_blocks: int = 0
    """Last blocks of a prefix whose pages in the further group are needed to go on; 0 where there is one group."""
    further_page_bytes: int = 0
    """Bytes of a page in the further group."""

    @property
    def context_tokens(self) -> int:
        """Tokens that prompt and answer of one choice may have together: the model's, or what a whole pool fits."""
        return min(self.max_model_len, self.pool_tokens)
