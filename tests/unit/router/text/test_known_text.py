"""What is prepared once equals what is prepared anew, for every kind of tokenizer, and nobody finds another's text."""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from router.text import known_text, segments
from router.text.known_text import KnownText, owner_root
from router.text.prompts import ChatPrompt
from router.text.segments import AddedTexts, Cutter
from router.text.tokenizer import TokenizerText
from tests.prepared_once import DictSegments, compare

LEARNED = ["the ship of the fleet and the naïve ﬁ 你好 世界 <| 42 ' s…"] * 3
ADDED = [
    AddedToken("<|im_start|>", special=True, normalized=False),
    AddedToken("<|im_end|>", special=True, normalized=False),
    AddedToken("<|im", special=True, normalized=False),
    AddedToken("<tool>", special=False, normalized=False),
    AddedToken("<left>", special=True, normalized=False, lstrip=True),
    AddedToken("<right>", special=True, normalized=False, rstrip=True),
    AddedToken("Ship<", special=False, normalized=True),
    AddedToken("  ", special=False, normalized=False),
    AddedToken(" <|im_end|>", special=False, normalized=False),
]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_level(*, spaced: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(LEARNED, trainer)
    return tokenizer


def split_by_pattern() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    pattern = Regex(
        r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(pattern, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(LEARNED, trainer)
    return tokenizer


def prepending() -> Tokenizer:
    """It writes a space before each text, as Llama 2's does."""
    tokenizer = metaspace("never")
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(LEARNED, trainers.WordPieceTrainer(vocab_size=200, special_tokens=specials))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), *((each, -2.0) for each in "▁theship"), ("▁the", -3.0)], 0))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase(), normalizers.Strip()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="first")]
    )
    return tokenizer


def beginning(made: Tokenizer) -> Tokenizer:
    """It puts a token before each text, and one behind it."""
    specials = [("<|im_start|>", made.get_vocab_size()), ("<|im_end|>", made.get_vocab_size() + 1)]
    made.add_tokens(ADDED[:2])
    made.post_processor = processors.TemplateProcessing(single="<|im_start|> $A <|im_end|>", special_tokens=specials)
    return made


MADE: dict[str, Callable[[], Tokenizer]] = {
    "bytes": byte_level,
    "bytes after a space": lambda: byte_level(spaced=True),
    "a pattern": split_by_pattern,
    "a space at the beginning": lambda: metaspace("first"),
    "a space always": lambda: metaspace("always"),
    "a space before each text": prepending,
    "words": word_piece,
    "probabilities": unigram,
    "ends": lambda: beginning(byte_level()),
}


def text_of(tokenizer: Tokenizer, folder: Path, added: list[AddedToken]) -> TokenizerText:
    for token in added:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return TokenizerText(folder)


@pytest.fixture
def cut_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "LEAST_CHARS", 1)
    monkeypatch.setattr(known_text, "LEAST_KNOWN_CHARS", 0)


@pytest.mark.usefixtures("cut_everywhere")
@pytest.mark.parametrize("kind", MADE)
def test_prepared_once_is_prepared_anew(kind: str, tmp_path: Path) -> None:
    text = text_of(MADE[kind](), tmp_path, ADDED)
    assert compare(text, [each.content for each in ADDED], cases=300, seed=1) > 300


@pytest.mark.slow
@pytest.mark.usefixtures("cut_everywhere")
@pytest.mark.parametrize("kind", MADE)
def test_many_chats_prepared_once_are_prepared_anew(kind: str, tmp_path: Path) -> None:
    text = text_of(MADE[kind](), tmp_path, ADDED)
    assert compare(text, [each.content for each in ADDED], cases=20_000, seed=2) > 20_000


@pytest.mark.usefixtures("cut_everywhere")
def test_the_default_models_chats_prepared_once_are_prepared_anew(smollm2_dir: Path) -> None:
    added = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<jupyter_code>"]
    assert compare(TokenizerText(smollm2_dir), added, cases=300, seed=1) > 300


@pytest.mark.parametrize(
    ("change", "cuts"),
    [
        (lambda tokenizer: None, True),
        (lambda tokenizer: tokenizer.add_tokens([AddedToken("word", single_word=True, normalized=False)]), False),
        (lambda tokenizer: setattr(tokenizer.model, "dropout", 0.5), False),
    ],
)
def test_a_tokenizer_whose_parts_may_depend_on_one_another_is_never_cut(
    change: Callable[[Tokenizer], object], cuts: bool
) -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(ADDED[:2])
    change(tokenizer)
    assert Cutter(tokenizer).cuts is cuts


def test_text_is_not_cut_before_tokens_that_take_what_stands_beside_them() -> None:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([token for token in ADDED if token.lstrip or token.rstrip or token.normalized])
    tokenizer.add_tokens([AddedToken("  ", normalized=False)])
    assert not Cutter(tokenizer).cuts


LONG = ChatPrompt(messages=tuple({"role": "user", "content": "the ship of the fleet " * 90} for _ in range(5)))


def test_a_chats_next_turn_tokenizes_what_is_new_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, known = text_of(byte_level(), tmp_path, ADDED[:2]), DictSegments()
    first = text.encode_chat(LONG, known=KnownText(b"a", known))
    tokenized: list[str] = []
    encode = text._encode
    monkeypatch.setattr(text, "_encode", lambda said, **options: tokenized.append(said) or encode(said, **options))
    longer = ChatPrompt(messages=(*LONG.messages, {"role": "assistant", "content": "yes"}, LONG.messages[0]))
    again = text.encode_chat(longer, known=KnownText(b"a", known))
    assert sum(map(len, tokenized)) < 2 * len(LONG.messages[0]["content"])
    assert again[: len(first) - 20] == first[:-20]
    assert again == text.encode_chat(longer)


def test_nobody_finds_text_of_another_tenant_client_or_salt(tmp_path: Path) -> None:
    text = text_of(byte_level(), tmp_path, ADDED[:2])
    owners = [(key, owner, salt) for key in (b"a", b"b") for owner in (b"", b"x") for salt in (b"", b"s", b"x")]
    roots = [owner_root(*each) for each in owners]
    assert len(set(roots)) == len(owners)
    known = DictSegments()
    for root in roots:
        assert text.encode_chat(LONG, known=KnownText(root, known)) == text.encode_chat(LONG)
        assert known.found == 0
    text.encode_chat(LONG, known=KnownText(roots[0], known))
    assert known.found == 5


def test_a_text_of_one_kind_is_never_found_as_one_of_another() -> None:
    known = DictSegments()
    for kind in (b"text", b"pieces"):
        KnownText(b"a", known).tokens(["one", "two"], kind, str.encode, lambda said: list(said.encode()))
    assert known.found == 0


def test_a_very_long_text_has_some_hundreds_of_segments(tmp_path: Path) -> None:
    cutter = Cutter(text_of(byte_level(), tmp_path, ADDED[:2])._tokenizer)
    turns = ("<|im_start|>user\n" + "a" * 1500 + "<|im_end|>\n") * 5000
    found = cutter.segments(turns)
    assert "".join(found) == turns
    assert 300 < len(found) < 1300
    shorter = cutter.segments(turns[: len(turns) // 2])
    assert found[: len(shorter) - 1] == shorter[:-1]


def test_a_segment_is_found_only_behind_what_was_before_it() -> None:
    known = DictSegments()
    for first in ("a", "b"):
        KnownText(b"a", known).tokens([first, "two", "end"], b"text", str.encode, lambda said: list(said.encode()))
    assert known.found == 0
    assert len(known.kept) == 4


def steps_of(texts: AddedTexts, text: str) -> int:
    """Returns how many functions of the interpreter are called to find all places."""
    calls = 0

    def count(frame: FrameType, event: str, called: object) -> None:
        nonlocal calls
        calls += event == "c_call"

    sys.setprofile(count)
    try:
        for _ in texts.places(text):
            pass
    finally:
        sys.setprofile(None)
    return calls


def test_thousands_of_added_tokens_cost_no_more_steps_than_one_with_as_long_a_beginning() -> None:
    few = ["<unused1>", "<a>"]
    many = [*few, *(f"<unused{number}>" for number in range(6000)), *(chr(0x4E00 + place) for place in range(3000))]
    for text in ("<a" * 500, "<unused" * 500, "<p>The ship <b>of</b> the fleet</p>\n" * 100, "no token " * 500):
        steps = steps_of(AddedTexts(many), text)
        assert steps == steps_of(AddedTexts(few), text)
        assert steps <= 3 * len(text)


@pytest.mark.parametrize("seed", range(3))
def test_added_tokens_are_found_leftmost_and_longest(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(500):
        texts = ["".join(draw.choices("ab]^-\\\n", k=draw.randrange(1, 6))) for _ in range(draw.randrange(1, 8))]
        text = "".join(draw.choices("ab]^-\\\n", k=40))
        pattern = re.compile("|".join(map(re.escape, sorted(texts, key=len, reverse=True))))
        assert list(AddedTexts(texts).places(text)) == [match.span() for match in pattern.finditer(text)]


@pytest.mark.parametrize("single", ["<bos> $A <eos>", "<eos> $A", "<end> $A <end>", "$A $A"])
def test_texts_are_whole_where_the_vocabulary_has_few_characters(single: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE({char: place for place, char in enumerate("你好世界")}, []))
    specials = ["<bos>", "<eos>", "<end>"]
    tokenizer.add_special_tokens([AddedToken(each, normalized=False) for each in specials])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=[(each, tokenizer.token_to_id(each)) for each in specials]
    )
    text, said = text_of(tokenizer, tmp_path, []), ("你好世界" * 400 + "<end>") * 5
    for adds in (False, True):
        made = text.encode(said, add_special_tokens=adds, known=KnownText(b"a", DictSegments()))
        assert made == text.encode(said, add_special_tokens=adds)
