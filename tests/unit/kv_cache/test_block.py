"""Names of blocks: stable, told by every token before them, and apart for every salt."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.kv_cache.block import HASH_BYTES, block_hashes_of, extend_hashes, hash_block, owner_salt, root_hash

tokens = st.lists(st.integers(0, 2**32 - 1), max_size=70)
salts = st.binary(max_size=8)


def test_names_never_change_from_one_release_to_the_next() -> None:
    assert root_hash().hex() == "a90bfdbccdcbe76e2af4fc4e9a92c343"
    assert [block_hash.hex() for block_hash in block_hashes_of(range(40), 16)] == [
        "683d5e8b874006a1a47b3c335b269931",
        "dbef94081c4ec78fc8d8eaed69428b92",
    ]
    assert owner_salt("tenant", b"salt").hex() == "32615d888dfa586f82100492bcaef1c0"
    assert [block_hash.hex() for block_hash in block_hashes_of([2**32 - 1, 1, 2, 3], 2, b"salt", 1)] == [
        "5afb95f0f3177428b8678880095a8910",
        "0e741a5b31caca5d20659e3e3e9eb96d",
    ]


def test_a_name_is_the_keyed_hash_of_its_parent_and_its_tokens_as_little_endian_words() -> None:
    packed = b"\x01\x00\x00\x00\xff\xff\x00\x00"
    expected = hashlib.blake2b(root_hash() + packed, digest_size=16, key=b"twostroke.block.v1").digest()
    assert hash_block(root_hash(), [1, 0xFFFF]) == expected


@given(tokens, st.sampled_from([1, 2, 16]), salts)
def test_only_full_blocks_have_names(known: list[int], block_size: int, salt: bytes) -> None:
    hashes = block_hashes_of(known, block_size, salt)
    assert len(hashes) == len(known) // block_size
    assert all(len(block_hash) == HASH_BYTES for block_hash in hashes)


@given(tokens, tokens, st.sampled_from([1, 2, 16]))
def test_two_prompts_share_names_exactly_as_far_as_they_share_blocks(
    one: list[int], other: list[int], block_size: int
) -> None:
    shared = 0
    while shared < min(len(one), len(other)) and one[shared] == other[shared]:
        shared += 1
    pairs = zip(block_hashes_of(one, block_size), block_hashes_of(other, block_size), strict=False)
    assert [a == b for a, b in pairs] == [
        block < shared // block_size for block in range(min(len(one), len(other)) // block_size)
    ]


@given(tokens, tokens)
def test_the_names_of_a_prefix_are_a_prefix_of_the_names(head: list[int], tail: list[int]) -> None:
    hashes = block_hashes_of(head, 4)
    assert block_hashes_of(head + tail, 4)[: len(hashes)] == hashes


@given(st.lists(st.integers(0, 99), min_size=4, max_size=40), salts, salts)
def test_salts_share_no_name(known: list[int], one: bytes, other: bytes) -> None:
    shared = set(block_hashes_of(known, 4, one)) & set(block_hashes_of(known, 4, other))
    assert bool(shared) == (one == other)


def test_a_salt_cannot_be_lengthened_into_another() -> None:
    salts = (b"", b"\0", b"\0\0", b"a", b"a\0", b"\1\0\0\0a")
    assert len({block_hashes_of([1], 1, salt)[0] for salt in salts}) == len(salts)


owners = st.tuples(st.text(max_size=3), st.binary(max_size=6))


@given(owners, owners)
def test_no_choice_of_a_cache_salt_makes_another_tenants_salt(one: tuple[str, bytes], other: tuple[str, bytes]) -> None:
    assert (owner_salt(*one) == owner_salt(*other)) == (one == other)


def test_what_one_tenant_appends_to_its_name_is_not_what_another_brings_as_its_salt() -> None:
    pairs = [("ab", b"c"), ("a", b"bc"), ("abc", b""), ("", b"abc"), ("a", b"\1\0\0\0b"), ("a\1\0\0\0b", b"")]
    assert len({owner_salt(*pair) for pair in pairs}) == len(pairs)
    assert owner_salt("", b"") == b""


@given(st.lists(st.integers(0, 9), min_size=12, max_size=40), st.integers(0, 3), st.integers(0, 40))
def test_public_blocks_are_everybodys_and_all_others_their_tenants(known: list[int], public: int, first: int) -> None:
    """Also where the answer fills the first block that is not public: naming may stop and go on anywhere."""
    everybodys = block_hashes_of(known, 4)
    mine, yours = (block_hashes_of(known, 4, owner_salt(tenant, b""), public) for tenant in ("me", "you"))
    assert mine[:public] == yours[:public] == everybodys[:public]
    assert len({*mine[public:], *yours[public:], *everybodys[public:]}) == 3 * len(mine[public:])
    grown = block_hashes_of(known[:first], 4, owner_salt("me", b""), public)
    extend_hashes(grown, known, 4, owner_salt("me", b""), public)
    assert grown == mine


def test_a_salt_that_spells_out_tokens_does_not_get_a_blocks_name() -> None:
    """Salted parents are set apart from blocks: nobody's salt makes the parent of somebody else's third block."""
    first = block_hashes_of([1], 1)[0]
    framed = (12).to_bytes(4, "little")  # as the salt's length goes in, and so would this token
    spelled = b"".join(token.to_bytes(4, "little") for token in (7, 8, 9))
    theirs = hash_block(first, [int.from_bytes(framed, "little"), 7, 8, 9])
    assert block_hashes_of([1, 5], 1, spelled, 1)[1] != hash_block(theirs, [5])


def test_a_block_in_another_place_has_another_name() -> None:
    hashes = block_hashes_of([7] * 64, 16)
    assert len(set(hashes)) == 4


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_that_is_no_32_bit_number_has_no_name(token: int) -> None:
    with pytest.raises(OverflowError):
        block_hashes_of([token] * 16, 16)
