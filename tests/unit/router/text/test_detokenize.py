"""Streamed text is the whole text, however tokens split characters and stop strings."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from router.text.detokenize import ByteDecoder, OutputText, RecentTokensDecoder
from router.text.stop_strings import StopScanner, StopStrings
from router.text.tokenizer import TokenizerText

PIECES = st.text(alphabet="ab€😀é\n", max_size=24)
STOPS = st.lists(st.text(alphabet="ab€😀é", min_size=1, max_size=4), max_size=3)


def cut(text: str, stops: list[str], *, include: bool) -> str:
    """The slow oracle: read character by character until one stop string is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[:end] if include else text[: end - max(map(len, complete))]
    return text


def streamed(answer: OutputText, tokens: list[int]) -> list[str]:
    texts = []
    for token in tokens:
        texts.append(answer.feed(token))
        if answer.is_stopped:
            return texts
    texts.append(answer.flush())
    return texts


@st.composite
def splits(draw) -> tuple[str, list[bytes]]:
    """A text and one way to split its bytes into tokens."""
    data = draw(PIECES).encode()
    ends = sorted({*draw(st.lists(st.integers(0, len(data)), max_size=12)), 0, len(data)})
    return data.decode(), [data[start:end] for start, end in itertools.pairwise(ends)]


@settings(max_examples=400, deadline=None)
@given(splits(), STOPS, st.booleans())
def test_any_split_with_any_stop_strings_equals_decode_all_then_cut(case, stops, include):
    text, parts = case
    scanner = StopScanner(StopStrings(stops), include_stop=include) if stops else None
    answer = OutputText(ByteDecoder(parts.__getitem__), scanner)
    texts = streamed(answer, list(range(len(parts))))
    assert "".join(texts) == cut(text, stops, include=include)
    assert not any("\ufffd" in part for part in texts)


def byte_level(pieces: list[str]) -> Tokenizer:
    """Tokens are strings of the byte alphabet of byte-level tokenizers."""
    tokenizer = Tokenizer(models.WordLevel({piece: rank for rank, piece in enumerate(pieces)}, unk_token=pieces[0]))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_fallback() -> Tokenizer:
    """Words with ▁ for the space before them, and single bytes for what is not in the vocabulary."""
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁a", "▁b", "a", "▁", "€"]
    tokenizer = Tokenizer(models.WordLevel({piece: rank for rank, piece in enumerate(pieces)}, unk_token="a"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([*b"a\xff\x80\x9f\x98\xf0\xe2\xc3"]), max_size=300))
def test_any_bytes_of_a_byte_level_tokenizer_stream_as_they_decode_at_once(data):
    alphabet = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in alphabet]
    char_of = {byte: chr(byte) for byte in alphabet} | {byte: chr(256 + rank) for rank, byte in enumerate(hidden)}
    tokenizer = byte_level([char_of[byte] for byte in range(256)])
    decoder = RecentTokensDecoder(lambda ids: tokenizer.decode(list(ids)), frozenset(), [])
    assert "".join([*map(decoder.feed, data), decoder.flush()]) == bytes(data).decode("utf-8", "replace")


SILENT = 300


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from([*"aé€😀".encode(), 0xFF, SILENT]), max_size=60), st.sampled_from([b"", b"x", b"\xe2\x82"])
)
def test_a_decoder_of_bytes_says_what_the_whole_output_decodes_to_behind_its_prompt(data, prompt):
    decoder = ByteDecoder(lambda token: bytes([token]), frozenset({SILENT}), prompt)
    shown = bytes(token for token in data if token != SILENT)
    begun = b"" if prompt.isascii() else prompt
    expected = (begun + shown).decode("utf-8", "replace")
    assert "".join([*map(decoder.feed, data), decoder.flush()]) == expected


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.sampled_from([[256], [257], [258], [259], [260], [261], list("€".encode()), list("😀".encode())]),
        max_size=20,
    )
)
def test_words_and_byte_fallbacks_stream_as_they_decode_at_once(parts):
    tokenizer, ids = byte_fallback(), [token for part in parts for token in part]
    decoder = RecentTokensDecoder(lambda ids: tokenizer.decode(list(ids)), frozenset({261}), [])
    texts = [decoder.feed(token) for token in ids]
    assert "".join([*texts, decoder.flush()]) == tokenizer.decode(ids)
    assert not any("\ufffd" in text for text in texts)


def test_the_space_before_the_first_word_survives_where_a_prompt_goes_before():
    tokenizer = byte_fallback()
    decoder = RecentTokensDecoder(lambda ids: tokenizer.decode(list(ids)), frozenset(), [256])
    assert decoder.feed(257) == " b"


def test_a_character_that_the_prompt_began_is_completed():
    tokenizer = byte_level(["â", "Ĥ", "¬"])
    decoder = RecentTokensDecoder(lambda ids: tokenizer.decode(list(ids)), frozenset(), [0, 1])
    assert decoder.feed(2) == "€"


@pytest.mark.parametrize("prompt", ["a", "a\ufffd", "a\ufffd\ufffd", "a€"])
def test_a_character_of_the_prompt_is_no_part_of_its_answer(prompt: str, tmp_path: Path) -> None:
    """Also the one that stands for broken text: a prompt may end with it."""
    byte_fallback().save(str(tmp_path / "tokenizer.json"))
    text = TokenizerText(tmp_path)
    context = [256, *prompt[1:].encode()]
    assert text.decode(context, skip_special_tokens=False) == prompt
    decoder = text.decoder(context)
    assert decoder.feed(257) + decoder.flush() == " b"
    decoder = text.decoder([256, *"€".encode()[:2]])
    assert decoder.feed("€".encode()[2]) == "€"


@pytest.mark.parametrize(("include", "expected"), [(False, ["x", "", ""]), (True, ["x", "", "ab"])])
def test_text_is_held_back_only_while_it_could_begin_a_stop_string(include, expected):
    scanner = StopScanner(StopStrings(["ab"]), include_stop=include)
    assert [scanner.feed(part) for part in ("x", "a", "bz")] == expected
    scanner = StopScanner(StopStrings(["ab"]), include_stop=include)
    assert [scanner.feed(part) for part in ("a", "c")] == ["", "ac"]


def test_the_stop_string_that_is_complete_first_wins_however_tokens_fall():
    for parts in (["abc"], ["a", "b", "c"], ["ab", "c"]):
        scanner = StopScanner(StopStrings(["abc", "b"]), include_stop=False)
        texts = []
        for part in parts:
            texts.append(scanner.feed(part))
            if scanner.is_stopped:
                break
        assert "".join(texts) == "a"


def test_a_stop_string_counts_from_the_first_token_behind_min_tokens_on() -> None:
    text = OutputText(
        ByteDecoder(lambda token: bytes([token])), StopScanner(StopStrings(["b"]), include_stop=False), min_tokens=2
    )
    assert [text.feed(token) for token in b"ab"] == ["a", "b"]
    assert not text.is_stopped
    assert text.feed(ord("b")) == ""
    assert text.is_stopped


def test_an_entry_that_mixes_alphabets_is_text_in_a_stream_as_in_a_whole_answer(tmp_path: Path) -> None:
    entries = ["é\uff5c", "Ġé b", "<|x y|>", "你", "café x", "naïve", "Ġ▁"]
    vocabulary = {entry: place for place, entry in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), *entries])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    added = ["café", "<é x>", "Ġz", "├"]
    tokenizer.add_tokens([AddedToken(each, normalized=False) for each in added])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = TokenizerText(tmp_path)
    for entry in (*entries, *added):
        token, decoder = tokenizer.token_to_id(entry), text.decoder([])
        assert decoder.feed(token) + decoder.flush() == text.decode([token]), entry
