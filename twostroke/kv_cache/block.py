"""A block is content: `block_size` consecutive tokens, named by all tokens up to and including its own.

name(i) = keyed BLAKE2b-128 over (name(i-1) or the salt's root, tokens of block i). Two prompts share a name exactly
when they share every token up to that block's end and the salt, so a name alone says what KV a page holds.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from twostroke.ids import BlockName

NAME_BYTES = 16
"""128 bits: collisions stay out of reach for any fleet's number of blocks; workers compare all of them."""

HASH_SCHEME = "blake2b-128/tokens-u32le/v1"
"""Part of the fingerprint: workers with another scheme would never share a block."""

_KEY = b"twostroke.block.v1"
_ROOT = b"root"
"""Sets roots apart from blocks: whoever may choose a salt must not be able to spell out somebody else's block."""


def root_name(salt: bytes = b"") -> BlockName:
    """The parent of a first block. Different salts (tenants, adapters) never share a name."""
    framed = len(salt).to_bytes(4, "little") + salt
    return BlockName(hashlib.blake2b(framed, digest_size=NAME_BYTES, key=_KEY, person=_ROOT).digest())


def name_block(parent: BlockName, tokens: Sequence[int]) -> BlockName:
    """The name of the block that holds `tokens` after `parent`."""
    packed = array("I", tokens)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return BlockName(hashlib.blake2b(parent + packed.tobytes(), digest_size=NAME_BYTES, key=_KEY).digest())


def name_blocks(tokens: Sequence[int], block_size: int, salt: bytes = b"") -> list[BlockName]:
    """The names of all full blocks of `tokens`, first to last; the rest of `tokens` has no name."""
    names: list[BlockName] = []
    parent = root_name(salt)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        parent = name_block(parent, tokens[start : start + block_size])
        names.append(parent)
    return names
