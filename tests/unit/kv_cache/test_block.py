"""Names of blocks: stable, told by every token before them, and apart for every salt."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.kv_cache.block import NAME_BYTES, name_block, name_blocks, root_name

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)
salts = st.binary(max_size=8)


def test_names_never_change_from_one_release_to_the_next() -> None:
    assert root_name().hex() == "a90bfdbccdcbe76e2af4fc4e9a92c343"
    assert root_name(b"tenant").hex() == "0f7939a6205cc523a470fa22e90a1678"
    assert [name.hex() for name in name_blocks(range(40), 16)] == [
        "683d5e8b874006a1a47b3c335b269931",
        "dbef94081c4ec78fc8d8eaed69428b92",
    ]
    assert [name.hex() for name in name_blocks([2**32 - 1, 1, 2, 3], 2, b"tenant")] == [
        "caddaff21f60cb22f7c6f7fff6c3734a",
        "33a962d8b65600da00fbd3b9c481dc03",
    ]


def test_a_name_is_the_keyed_hash_of_its_parent_and_its_tokens_as_little_endian_words() -> None:
    packed = b"\x01\x00\x00\x00\xff\xff\x00\x00"
    expected = hashlib.blake2b(root_name() + packed, digest_size=16, key=b"twostroke.block.v1").digest()
    assert name_block(root_name(), [1, 0xFFFF]) == expected


@given(tokens, st.sampled_from([1, 2, 16]), salts)
def test_only_full_blocks_have_names(known: list[int], block_size: int, salt: bytes) -> None:
    names = name_blocks(known, block_size, salt)
    assert len(names) == len(known) // block_size
    assert all(len(name) == NAME_BYTES for name in names)


@given(tokens, tokens, st.sampled_from([1, 2, 16]))
def test_two_prompts_share_names_exactly_as_far_as_they_share_blocks(
    one: list[int], other: list[int], block_size: int
) -> None:
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    pairs = zip(name_blocks(one, block_size), name_blocks(other, block_size), strict=False)
    assert [a == b for a, b in pairs] == [
        block < shared // block_size for block in range(min(len(one), len(other)) // block_size)
    ]


@given(tokens, tokens)
def test_the_names_of_a_prefix_are_a_prefix_of_the_names(head: list[int], tail: list[int]) -> None:
    names = name_blocks(head, 4)
    assert name_blocks(head + tail, 4)[: len(names)] == names


@given(st.lists(st.integers(0, 99), min_size=4, max_size=40), salts, salts)
def test_salts_share_no_name(known: list[int], one: bytes, other: bytes) -> None:
    shared = set(name_blocks(known, 4, one)) & set(name_blocks(known, 4, other))
    assert bool(shared) == (one == other)


def test_a_salt_cannot_be_lengthened_into_another() -> None:
    assert len({root_name(salt) for salt in (b"", b"\0", b"\0\0", b"a", b"a\0", b"\1\0\0\0a")}) == 6


def test_a_salt_that_spells_out_a_block_does_not_get_its_name() -> None:
    parent = (76).to_bytes(4, "little") + bytes(12)  # a parent whose first bytes read as that salt's length
    spelled = parent[4:] + b"".join(token.to_bytes(4, "little") for token in range(16))
    assert len(spelled) == 76
    assert root_name(spelled) != name_block(parent, range(16))  # type: ignore[arg-type]  # forged


def test_a_block_in_another_place_has_another_name() -> None:
    names = name_blocks([7] * 64, 16)
    assert len(set(names)) == 4


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_no_32_bit_number_has_no_name(token: int) -> None:
    with pytest.raises(OverflowError):
        name_blocks([token] * 16, 16)
