"""The pages of a worker as tensors for kernels: numbers, and scales where the form has any, in one memory.

`quantised` gives the same bits as native kernels and Triton: each step is one rounding of float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch

from twostroke.base.errors import ConfigError
from twostroke.kv_cache.form import FORMS
from twostroke.page_forms.page_form import PageForm, PageShape
from twostroke.page_forms.scaled import SCALE_BYTES

PLAIN: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Forms that store plain numbers."""
BYTES: Final = {"int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
"""Forms that store numbers with a scale for each token and head."""
LARGEST: Final = {"int8": 127.0, "fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
"""The number to which the largest one of a row is scaled."""
SMALLEST_PEAK: Final = 1e-30
"""Rows below it are zero: the inverse of their scale would overflow."""


@dataclass(frozen=True, slots=True, eq=False)
class PagePool:
    """Views of the same pages. Native kernels keep their own order within a head's numbers of a block."""

    form: PageForm
    numbers: torch.Tensor
    """[pages, layers, 2, kv_heads, block, head_dim]; uint8 in forms of one byte. With latents [pages, layers, 1, 1,
    block, head_dim]"""
    scales: torch.Tensor | None = None
    """float32 [pages, layers, 2, kv_heads, block]"""
    key_centers: torch.Tensor | None = None
    """float32 [layers, kv_heads, head_dim], contiguous: subtracted from keys with scales before they are stored. All
    scores of a query change by the same number, so attention does not change."""
    latent_dim: int | None = None
    """Numbers of a latent, with which keys begin and which are the values; None where values lie beside keys."""

    @classmethod
    def over(
        cls, data: torch.Tensor, form: PageForm, shape: PageShape, key_centers: torch.Tensor | None = None
    ) -> PagePool:
        """Returns a pool of views of `data`, uint8 [pages, page_bytes], whose rows may be parts of longer ones.

        A form without scales stores keys without subtracting centers. Raises ConfigError where scales cannot be
        aligned.
        """
        if form.name in PLAIN:
            plain = data.view(PLAIN[form.name]).view(len(data), *shape.dims)
            return cls(form, plain, latent_dim=shape.latent_dim)
        layers, kv_heads, block, dim = shape.layers, shape.kv_heads, shape.block, shape.head_dim
        numbers = block * dim
        if numbers % SCALE_BYTES:
            raise ConfigError(
                f"--kv-format {form.name} needs blocks of a multiple of {SCALE_BYTES // math.gcd(dim, SCALE_BYTES)} "
                f"tokens for heads of {dim} values",
                field="kv_format",
            )
        part = numbers + block * SCALE_BYTES
        strides = (data.stride(0), kv_heads * 2 * part, part, 2 * part)
        sizes = (len(data), layers, 2, kv_heads)
        words = data.view(torch.float32)
        return cls(
            form,
            data.as_strided((*sizes, block, dim), (*strides, dim, 1)),
            words.as_strided(
                (*sizes, block),
                (*(each // SCALE_BYTES for each in strides), 1),
                words.storage_offset() + numbers // SCALE_BYTES,
            ),
            None if key_centers is None else key_centers.to(data.device),
        )

    @classmethod
    def empty(cls, pages: int, form: str, shape: PageShape, device: torch.device | None = None) -> PagePool:
        """Returns a pool of zeros in its own memory."""
        data = torch.zeros(pages, FORMS[form].page_bytes(shape), dtype=torch.uint8, device=device)
        return cls.over(data, FORMS[form], shape)

    @classmethod
    def plain(cls, numbers: torch.Tensor) -> PagePool:
        """Returns the pool of numbers [pages, layers, 2, kv_heads, block, head_dim] of a dtype of `PLAIN`."""
        return cls(FORMS[str(numbers.dtype).removeprefix("torch.")], numbers)

    @property
    def layers(self) -> int:
        return self.numbers.shape[1]

    @property
    def kv_heads(self) -> int:
        return self.numbers.shape[3]

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.numbers.shape[4]

    @property
    def head_dim(self) -> int:
        return self.numbers.shape[5]

    @property
    def value_dim(self) -> int:
        """Numbers of a value."""
        return self.head_dim if self.latent_dim is None else self.latent_dim

    @property
    def rope_dim(self) -> int:
        """Numbers of a query and a key, the last ones, that are rotated."""
        return self.head_dim if self.latent_dim is None else self.head_dim - self.latent_dim

    @property
    def device(self) -> torch.device:
        return self.numbers.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the numbers, and by default that of queries."""
        return self.numbers.dtype

    @property
    def exact(self) -> None:
        """None, since each token is stored on its own and none is kept exact outside the pages."""
        return None

    @property
    def byte_strides(self) -> tuple[int, int, int, int]:
        """Returns the bytes from page to page, layer to layer, keys to values and head to head."""
        page, layer, value, head, *_ = (each * self.numbers.element_size() for each in self.numbers.stride())
        return page, layer, value, head

    def write(self, k: torch.Tensor, v: torch.Tensor, layer: int, write_slots: torch.Tensor) -> None:
        """Puts k, v [T, kv_heads, D] of any dtype into slots page * block + offset. Pages of latents take only k."""
        pages, offsets = write_slots // self.block, write_slots % self.block
        if self.key_centers is not None:
            k = k.float() - self.key_centers[layer]
        for which, rows in enumerate((k, v) if self.latent_dim is None else (k,)):
            if self.scales is None:
                self.numbers[pages, layer, which, :, offsets] = rows.to(self.numbers.dtype)
            else:
                numbers, scales = quantised(rows, self.form.name)
                self.numbers[pages, layer, which, :, offsets] = numbers
                self.scales[pages, layer, which, :, offsets] = scales

    def read(self, pages: torch.Tensor, layer: int) -> torch.Tensor:
        """Returns what the pages [n] store, [n, 2, kv_heads, block, D]: in the form's dtype, or float32 with scales.

        Keys lack their centers. With latents it is [n, 1, 1, block, D].
        """
        numbers = self.numbers[pages, layer]
        if self.scales is None:
            return numbers
        return numbers.view(BYTES[self.form.name]).float() * self.scales[pages, layer][..., None]


def quantised(rows: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns numbers, uint8 like rows [..., D], and their scales, float32 [...]."""
    wide = rows.float()
    peak = wide.abs().amax(dim=-1)
    largest = torch.full_like(peak, LARGEST[form])  # by a scalar, torch would multiply with the inverse
    is_zero = peak < SMALLEST_PEAK
    inverse = torch.where(is_zero, 0.0, largest / peak)
    scaled = wide * inverse[..., None]
    numbers = scaled.round().to(torch.int8) if form == "int8" else scaled.to(BYTES[form])
    return numbers.view(torch.uint8), torch.where(is_zero, 0.0, peak / largest)
