"""How many pages a worker's page memory holds."""

from __future__ import annotations

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
