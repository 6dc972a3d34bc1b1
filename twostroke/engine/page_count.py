"""How many pages a worker's page memory holds, and which requests fit into them."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.config import MIN_PAGES
from twostroke.errors import ConfigError


def enough_pages(memory_bytes: int, page_bytes: int) -> int:
    """Raises ConfigError where they are too few for any sequence."""
    pages = memory_bytes // page_bytes
    if pages < MIN_PAGES:
        raise ConfigError(
            f"--kv-cache-memory {memory_bytes} holds {pages} pages of {page_bytes} bytes; "
            f"at least {MIN_PAGES} are needed",
            field="kv_cache_memory",
        )
    return pages


@dataclass(frozen=True, slots=True)
class PoolSize:
    pages: int
    page_bytes: int
    block_size: int

    @property
    def tokens(self) -> int:
        """The longest request that fits, prompt and answer together."""
        return self.pages * self.block_size

    def check(self, max_model_len: int) -> None:
        """Raises ConfigError where a length that was asked for by name does not fit."""
        if max_model_len > self.tokens:
            raise ConfigError(
                f"--max-model-len {max_model_len} does not fit: {self._holds()}; "
                f"use {self._remedy(max_model_len)}, or --max-model-len {self.tokens} or less",
                field="max_model_len",
            )

    def advice(self, max_model_len: int) -> str:
        """What to know where the model takes longer requests than fit; empty where all fit."""
        if max_model_len <= self.tokens:
            return ""
        return (
            f"the model takes requests of {max_model_len} tokens, but {self._holds()}: longer ones are refused; "
            f"{self._remedy(max_model_len)} would fit them all"
        )

    def _holds(self) -> str:
        return (
            f"the page pool of {self.pages * self.page_bytes} bytes holds {self.tokens} tokens "
            f"({self.pages} pages of {self.block_size})"
        )

    def _remedy(self, tokens: int) -> str:
        wanted_bytes = -(-tokens // self.block_size) * self.page_bytes
        return f"--kv-cache-memory {wanted_bytes} ({wanted_bytes / (1 << 20):.0f} MiB)"
