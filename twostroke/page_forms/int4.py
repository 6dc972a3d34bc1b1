"""The form of 4-bit numbers: keys scaled per channel over a block, values per token and group of channels."""

from __future__ import annotations

from typing import Final

from twostroke.base.errors import ConfigError
from twostroke.page_forms.page_form import PageForm, PageShape

BLOCK: Final = 16
"""Tokens of a block. The scales of keys span all of them."""
PER_WORD: Final = 8
"""4-bit numbers in a word of 32 bits."""
LARGEST_DIM: Final = 256
"""Most values of a head that the native kernel has room for."""
PAIR_BYTES: Final = 4
"""Bytes of the float16 scale and the float16 center of a group of 4-bit numbers."""
VALUE_GROUP: Final = 32
"""Number of values of one token that share a scale."""


def check_shape(shape: PageShape) -> None:
    """Raises ConfigError for blocks and heads that 4-bit pages do not take."""
    if shape.block != BLOCK:
        raise ConfigError(f"--kv-format int4 needs --block-size {BLOCK}, not {shape.block}", field="kv_format")
    if shape.head_dim % PER_WORD or shape.head_dim > LARGEST_DIM:
        raise ConfigError(
            f"--kv-format int4 needs heads of a multiple of {PER_WORD} values, at most {LARGEST_DIM}; "
            f"this model's have {shape.head_dim}",
            field="kv_format",
        )


def _key_bytes(shape: PageShape) -> int:
    """Returns the bytes of 4-bit keys with one scale per channel over the block."""
    return shape.head_dim * (shape.block // 2 + PAIR_BYTES)


def _value_bytes(shape: PageShape) -> int:
    """Returns the bytes of 4-bit values with one scale per token and group of channels."""
    groups = -(-shape.head_dim // VALUE_GROUP)
    return shape.block * (shape.head_dim // 2 + groups * PAIR_BYTES)


INT4 = PageForm(
    "int4",
    _key_bytes,
    _value_bytes,
    "4-bit integers: keys scaled per channel, values per token and group",
    kernels="twostroke.kernels.page_forms.int4",
    largest_distance=0.7,
    check_shape=check_shape,
    spans_block=True,
    may_have_exact_layers=True,
)
