"""The memory bill of a page pool: pages, bytes and tokens, and how many requests fit. Plain numbers only.

`twostroke bill`, the checks at a worker's start and what they refuse all count with this module.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from twostroke.base.errors import ConfigError
from twostroke.config import MIN_PAGES
from twostroke.kv_cache.layout import SCRATCH_PAGES, generation_bytes


def host_pool_bytes(pages: int, page_bytes: int) -> int:
    """Returns what a pool in host memory takes: its pages, the scratch page and the generations."""
    return generation_bytes(pages) + (pages + SCRATCH_PAGES) * page_bytes


def enough_pages(memory_bytes: int, page_bytes: int, *, least: int = MIN_PAGES, flag: str = "--kv-cache-memory") -> int:
    """Returns how many pages the memory holds. Raises ConfigError, naming `flag`, where they are fewer than `least`."""
    pages = memory_bytes // page_bytes
    if pages < least:
        least_bytes = least * page_bytes
        raise ConfigError(
            f"{flag} {memory_bytes} holds {pages} pages of {page_bytes} bytes; at least {least} are needed: give "
            f"{least_bytes - memory_bytes} bytes more ({flag} {least_bytes})",
            field=_field_of(flag),
        )
    return pages


def refuse_more_than_free(
    pool_bytes: int,
    free_bytes: int,
    *,
    place: str = "this machine",
    workers: int = 1,
    flag: str = "--kv-cache-memory",
) -> None:
    """Raises ConfigError, naming `flag` and the bytes that are missing, where the pools of all workers do not fit."""
    wanted_bytes = workers * pool_bytes
    missing_bytes = wanted_bytes - free_bytes
    if missing_bytes <= 0:
        return
    pools = "a page pool needs" if workers == 1 else f"{workers} workers with {pool_bytes} bytes of pages each need"
    fewer = ", or start fewer workers" if workers > 1 else ""
    raise ConfigError(
        f"{flag}: {pools} {wanted_bytes} bytes, but {place} has {free_bytes} free: {missing_bytes} bytes "
        f"too many; give {-(-missing_bytes // workers)} bytes less{fewer}",
        field=_field_of(flag),
    )


def _field_of(flag: str) -> str:
    """Returns the setting of a flag, or of the first one of several."""
    return flag.partition(" ")[0].removeprefix("--").replace("-", "_")


@dataclass(frozen=True, slots=True)
class RequestPages:
    """The pages that one request of a known length holds at its end."""

    tokens: int
    """Prompt and answer together."""
    pages: int
    waste_tokens: int
    """Tokens for which the last page has room and that the request does not use."""


@dataclass(frozen=True, slots=True)
class LengthSpread:
    """Mean and deviation of the pages that requests of different lengths hold."""

    mean_pages: float
    deviation_pages: float
    """Standard deviation."""


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The pages of a page group beside the first one."""

    pages: int
    page_bytes: int
    seen_tokens: int
    """Tokens that a token sees in these layers."""
    request_pages: int
    """Most pages of this group that one request holds."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A worker's page pool."""

    pages: int
    page_bytes: int
    """Bytes of a page of the full group."""
    block_size: int
    further: tuple[GroupPages, ...] = ()
    """The groups beside the first one."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return self.page_bytes + sum(group.page_bytes for group in self.further)

    @property
    def pages_bytes(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.page_bytes + sum(group.pages * group.page_bytes for group in self.further)

    def request_bytes(self, tokens: int) -> int:
        """Returns the bytes that a request of this length, prompt and answer together, holds at its end."""
        pages = self.request(tokens).pages
        further = sum(min(pages, group.request_pages) * group.page_bytes for group in self.further)
        return pages * self.page_bytes + further

    def seen_bytes(self, tokens: int) -> float:
        """Returns the bytes of pages that a token reads with this many tokens before it."""
        further = sum(min(tokens, group.seen_tokens) * group.page_bytes for group in self.further)
        return (tokens * self.page_bytes + further) / self.block_size

    @property
    def tokens(self) -> int:
        """The longest request that fits, prompt and answer together."""
        return self.pages * self.block_size

    def request(self, tokens: int) -> RequestPages:
        """Returns what a request of this length, prompt and answer together, holds at its end."""
        pages = -(-tokens // self.block_size)
        return RequestPages(tokens, pages, pages * self.block_size - tokens)

    def concurrent(self, tokens: int, shared_tokens: int = 0) -> int:
        """Returns how many requests of this length fit at once; with one more, a worker begins to preempt.

        They share the full blocks of their first `shared_tokens`, which are held once.
        """
        shared = min(shared_tokens, tokens) // self.block_size
        own = max(1, self.request(tokens).pages - shared)
        fit = max(0, (self.pages - shared) // own)
        pages = self.request(tokens).pages
        return min([fit, *(group.pages // min(pages, group.request_pages) for group in self.further)])

    def concurrent_of(self, spread: LengthSpread, deviations: float = 0.0) -> int:
        """Returns how many requests with lengths drawn from a spread fit at once, all of them at their full length.

        `deviations`: standard deviations of the sum that are kept free; with 0 every second draw does not fit.
        """
        mean, margin = spread.mean_pages, deviations * spread.deviation_pages
        root = (math.sqrt(margin**2 + 4 * mean * self.pages) - margin) / (2 * mean)
        fit = int(root**2 + 1e-9)
        return min([fit, *(int(group.pages / min(mean, group.request_pages)) for group in self.further)])

    def check(self, max_model_len: int) -> None:
        """Refuses a `--max-model-len` if a request of that length does not fit into the pool. Raises ConfigError."""
        if max_model_len > self.tokens:
            raise ConfigError(
                f"--max-model-len {max_model_len} does not fit: {self._holds()}; "
                f"use {self._remedy(max_model_len)}, or --max-model-len {self.tokens} or less",
                field="max_model_len",
            )

    def advice(self, max_model_len: int) -> str:
        """Returns a warning if the model takes longer requests than fit, else an empty text."""
        if max_model_len <= self.tokens:
            return ""
        return (
            f"the model takes requests of {max_model_len} tokens, but {self._holds()}: longer ones are refused; "
            f"{self._remedy(max_model_len)} would fit them all"
        )

    def _holds(self) -> str:
        return (
            f"the page pool of {self.pages_bytes} bytes holds {self.tokens} tokens "
            f"({self.pages} pages of {self.block_size})"
        )

    def _remedy(self, tokens: int) -> str:
        wanted_bytes = -(-self.request(tokens).pages * self.pages_bytes // self.pages)
        return f"--kv-cache-memory {wanted_bytes} ({wanted_bytes / (1 << 20):.0f} MiB)"
