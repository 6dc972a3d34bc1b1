"""Block hashes: a block of `block_size` consecutive tokens is identified by all tokens up to and including its own.

hash(i) = keyed BLAKE2b-128 over (hash(i-1) or the root, tokens of block i). A salt is folded into the parent of the
first block that is not public. Two prompts share a hash exactly when they share every token up to that block's end and,
past what is public, the salt. So a hash alone says what KV a page holds and who may reuse it.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from array import array
from collections.abc import Sequence

from twostroke.base.ids import BlockHash

HASH_BYTES = 16
"""Bytes of a block hash, all of which are compared. With 128 bits the blocks of a fleet do not collide in practice."""

HASH_SCHEME = "blake2b-128/tokens-u32le/v2"
"""Hash function and version. It is part of the fingerprint: workers with different schemes can share no block."""

_KEY = b"twostroke.block.v1"
_ROOT, _SALTED, _OWNER, _EXACT = b"root", b"salted", b"owner", b"exact"
"""Domain separators keep roots, salted parents and salts apart from blocks: a client that chooses the content of one
must not be able to produce the hash of another client's block."""


@functools.cache
def root_hash() -> BlockHash:
    """Returns the parent of every first block."""
    return _hash(_framed(b""), _ROOT)


def owner_salt(tenant: str, cache_salt: bytes) -> bytes:
    """Returns the salt of the blocks of a tenant with this `cache_salt`; empty if both are empty.

    Each part is hashed with its length, so that no `cache_salt` of a tenant yields another tenant's salt.
    """
    if not tenant and not cache_salt:
        return b""
    return _hash(_framed(tenant.encode()) + _framed(cache_salt), _OWNER)


def derived_salt(salt: bytes, kind: bytes, content: bytes) -> bytes:
    """Returns the salt of blocks that depend on `content`, too. `kind` is the feature's own domain separator."""
    return _hash(_framed(salt) + _framed(content), kind)


def exact_salt(salt: bytes) -> bytes:
    """Returns a separate salt for blocks whose pages must not be converted from another form."""
    return _hash(_framed(salt), _EXACT)


def hash_block(parent: BlockHash, tokens: Sequence[int]) -> BlockHash:
    """Returns the hash of the block that holds `tokens` after `parent`."""
    return _hash(parent + packed_tokens(tokens))


def packed_tokens(tokens: Sequence[int]) -> bytes:
    """Returns tokens as they are hashed: four bytes each, the lowest first."""
    packed = array("I", tokens)
    assert packed.itemsize == 4
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def block_hashes_of(
    tokens: Sequence[int], block_size: int, salt: bytes = b"", public_blocks: int = 0
) -> list[BlockHash]:
    """Returns the hashes of all full blocks of `tokens`, first to last."""
    hashes: list[BlockHash] = []
    extend_hashes(hashes, tokens, block_size, salt, public_blocks)
    return hashes


def extend_hashes(
    hashes: list[BlockHash],
    tokens: Sequence[int],
    block_size: int,
    salt: bytes = b"",
    public_blocks: int = 0,
    *,
    end: int | None = None,
) -> None:
    """Appends the hashes of further full blocks among the first `end` tokens; None: among all tokens.

    The first `public_blocks` carry no salt.
    """
    first = len(hashes) * block_size
    blocks = ((len(tokens) if end is None else min(end, len(tokens))) - first) // block_size
    if blocks > 0:
        packed = packed_tokens(tokens[first : first + blocks * block_size])
        extend_packed_hashes(hashes, packed, block_size, salt, public_blocks)


def extend_packed_hashes(
    hashes: list[BlockHash], packed: bytes | memoryview, block_size: int, salt: bytes = b"", public_blocks: int = 0
) -> None:
    """Appends the hashes of whole blocks that follow those of `hashes`, given as `packed_tokens`."""
    block_bytes = 4 * block_size
    parent, begin = hashes[-1] if hashes else root_hash(), _keyed().copy
    for start in range(0, len(packed), block_bytes):
        if salt and len(hashes) == public_blocks:
            parent = _hash(parent + _framed(salt), _SALTED)
        state = begin()
        state.update(parent)
        state.update(packed[start : start + block_bytes])
        parent = BlockHash(state.digest())
        hashes.append(parent)


@functools.cache
def _keyed() -> hashlib.blake2b:
    """Returns the initial hash state of every block: a copy of it costs half as much as a new one."""
    return hashlib.blake2b(digest_size=HASH_BYTES, key=_KEY)


def _framed(part: bytes) -> bytes:
    return len(part).to_bytes(4, "little") + part


def _hash(content: bytes, person: bytes = b"") -> BlockHash:
    return BlockHash(hashlib.blake2b(content, digest_size=HASH_BYTES, key=_KEY, person=person).digest())
