"""Whole pages to and from a contiguous buffer: what staging for a transport needs. One launch for any number of pages.

The buffer lies on the device, or in page-locked host memory, which the device then reads or writes across the bus.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

CHUNK_WORDS: Final = 4096
"""16 KiB per program: eight 16-byte accesses in flight per thread."""


def gather_pages(pool: torch.Tensor, pages: torch.Tensor, buffer: torch.Tensor) -> None:
    """Copies buffer[i] = pool[pages[i]], bytes as they are. pages: int64 [n], buffer: [n, *page]."""
    _launch(pool, pages, buffer, gather=True)


def scatter_pages(buffer: torch.Tensor, pages: torch.Tensor, pool: torch.Tensor) -> None:
    """Copies pool[pages[i]] = buffer[i]. Pages must differ."""
    _launch(pool, pages, buffer, gather=False)


def _launch(pool: torch.Tensor, pages: torch.Tensor, buffer: torch.Tensor, *, gather: bool) -> None:
    assert buffer.shape == (len(pages), *pool.shape[1:]), f"{tuple(buffer.shape)} is not {len(pages)} pages"
    assert buffer.dtype == pool.dtype, f"the buffer must be in the pool's {pool.dtype}, got {buffer.dtype}"
    assert buffer.is_contiguous(), "the buffer must be contiguous"
    assert pages.dtype == torch.int64, f"pages must be int64, got {pages.dtype}"
    assert pages.is_contiguous(), "pages must be contiguous"
    assert pages.device == pool.device, f"pages must lie on {pool.device}, got {pages.device}"
    assert buffer.device == pool.device or buffer.is_pinned(), "a buffer on the host must be page-locked"
    assert pool[:1].is_contiguous(), "a page must be contiguous"
    if not len(pages):
        return
    pool_words, buffer_words = pool.flatten(1).view(torch.int32), buffer.flatten(1).view(torch.int32)
    words = pool_words.shape[1]
    copy_kernel[(len(pages), triton.cdiv(words, CHUNK_WORDS))](
        pool_words, buffer_words, pages, pool_words.stride(0), words,
        GATHER=gather, CHUNK=CHUNK_WORDS, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


@triton.jit
def copy_kernel(pool, buffer, pages, page_stride, words, GATHER: tl.constexpr, CHUNK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    inside = word < words
    # pool: page, word
    pool_at = pool + tl.load(pages + index) * page_stride + word
    # buffer: index, word
    buffer_at = buffer + index * words + word
    if GATHER:
        tl.store(buffer_at, tl.load(pool_at, mask=inside), mask=inside)
    else:
        tl.store(pool_at, tl.load(buffer_at, mask=inside), mask=inside)
