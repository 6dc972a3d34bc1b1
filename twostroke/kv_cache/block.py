"""A block is content: `block_size` consecutive tokens, named by all tokens up to and including its own.

name(i) = keyed BLAKE2b-128 over (name(i-1) or the root, tokens of block i). A salt is folded into the parent of the
first block that is not public. Two prompts share a name exactly when they share every token up to that block's end and,
past what is public, the salt; so a name alone says what KV a page holds and who may reuse it.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence

from twostroke.ids import BlockName

NAME_BYTES = 16
"""128 bits: collisions stay out of reach for any fleet's number of blocks; workers compare all of them."""

HASH_SCHEME = "blake2b-128/tokens-u32le/v2"
"""Part of the fingerprint: workers with another scheme would never share a block."""

_KEY = b"twostroke.block.v1"
_ROOT, _SALTED, _OWNER = b"root", b"salted", b"owner"
"""Set roots, salted parents and salts apart from blocks: whoever may choose what goes into one of them must not be able
to spell out somebody else's block."""


def root_name() -> BlockName:
    """The parent of every first block."""
    return _name(_framed(b""), _ROOT)


def owner_salt(tenant: str, cache_salt: bytes) -> bytes:
    """What sets a tenant's blocks apart, and within it those of one `cache_salt`; empty for neither.

    Each part goes in with its length: no tenant can choose a `cache_salt` that makes another tenant's salt.
    """
    if not tenant and not cache_salt:
        return b""
    return _name(_framed(tenant.encode()) + _framed(cache_salt), _OWNER)


def name_block(parent: BlockName, tokens: Sequence[int]) -> BlockName:
    """The name of the block that holds `tokens` after `parent`."""
    packed = array("I", tokens)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return _name(parent + packed.tobytes())


def name_blocks(tokens: Sequence[int], block_size: int, salt: bytes = b"", public_blocks: int = 0) -> list[BlockName]:
    """The names of all full blocks of `tokens`, first to last; the rest of `tokens` has no name."""
    names: list[BlockName] = []
    extend_names(names, tokens, block_size, salt, public_blocks)
    return names


def extend_names(
    names: list[BlockName], tokens: Sequence[int], block_size: int, salt: bytes = b"", public_blocks: int = 0
) -> None:
    """Append the names of the blocks that `tokens` have filled since; the first `public_blocks` carry no salt."""
    for start in range(len(names) * block_size, len(tokens) - block_size + 1, block_size):
        parent = names[-1] if names else root_name()
        if salt and len(names) == public_blocks:
            parent = _name(parent + _framed(salt), _SALTED)
        names.append(name_block(parent, tokens[start : start + block_size]))


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(4, "little") + part


def _name(content: bytes, person: bytes = b"") -> BlockName:
    return BlockName(hashlib.blake2b(content, digest_size=NAME_BYTES, key=_KEY, person=person).digest())
