"""The tokens of a model as bytes, in the form that llguidance needs, and the runs of digits that they make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLTokenizer, TokenizerWrapper

from twostroke.base.errors import ConfigError, UnsupportedFeature
from twostroke.base.token_mask import WORD_BITS, Mask
from twostroke.base.tokenizer_file import read_tokenizer

MOST_DIGITS: Final = 32
"""Most digits in a row in a JSON number: twice those of a double or an int64, and as many as an indent may have blanks.
"""
DIGITS: Final = b"0123456789"
LETTERS: Final = frozenset(bytes([letter]) for letter in b"abcdfghijklmnopqrstuvwxyz")
"""Letters that are in no number; `e` begins an exponent."""


@dataclass(frozen=True, slots=True)
class Digits:
    """The digits that tokens of a vocabulary begin and end with."""

    at_end: npt.NDArray[np.int16]
    """Number of digits that each token ends with."""
    is_whole: npt.NDArray[np.bool_]
    """Whether each token has only digits."""
    at_start: Mask
    """The tokens that begin with a digit."""
    single: tuple[int, ...]
    """The tokens that are one digit."""
    letters: Mask
    """The tokens that are a single letter: where one may come, the text is not a number."""

    def run_after(self, run: int, token: int) -> int:
        """Returns how many digits the text ends with when a token has come after `run` digits."""
        at_end = int(self.at_end[token])
        return run + at_end if self.is_whole[token] else at_end

    def without_more(self, mask: Mask, may_end_with: Callable[[int], bool]) -> Mask:
        """Returns the mask without tokens that begin with a digit, unless the text is not a number.

        Where only digits may come, it returns those with which the number may end, if any: a number that must not be
        zero cannot end with one more zero. `may_end_with` says whether anything but a digit may come after a token.
        """
        if (mask & self.letters).any():
            return mask
        left = mask & ~self.at_start
        if left.any():
            return left
        ending = [token for token in self.single if _has(mask, token) and may_end_with(token)]
        return _mask_of(ending, WORD_BITS * len(mask)) if ending else mask

    def are_all(self, mask: Mask) -> bool:
        """Returns whether nothing but tokens that begin with a digit may come."""
        return not (mask & ~self.at_start).any()


def digits_of(texts: Sequence[bytes], size: int) -> Digits:
    """Returns the digits of a vocabulary of `size` tokens, of which the first ones have these texts."""
    at_end, is_whole = np.zeros(size, np.int16), np.zeros(size, np.bool_)
    at_end[: len(texts)] = [len(text) - len(text.rstrip(DIGITS)) for text in texts]
    is_whole[: len(texts)] = [text.isdigit() for text in texts]
    at_start = [token for token, text in enumerate(texts) if text[:1].isdigit()]
    letters = [token for token, text in enumerate(texts) if text in LETTERS]
    single = tuple(token for token in at_start if len(texts[token]) == 1)
    return Digits(at_end, is_whole, _mask_of(at_start, size), single, _mask_of(letters, size))


def _has(mask: Mask, token: int) -> bool:
    word, bit = divmod(token, WORD_BITS)
    return bool(mask[word] >> bit & 1)


def _mask_of(tokens: Sequence[int], size: int) -> Mask:
    mask = np.zeros(-(-size // WORD_BITS), np.uint32)
    ids = np.array(tokens, np.int64)
    np.bitwise_or.at(mask, ids // WORD_BITS, np.uint32(1) << (ids % WORD_BITS).astype(np.uint32))
    return mask


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokenizer: LLTokenizer
    size: int
    """Width of the model's logits. All token ids are below it."""
    ends: tuple[int, ...]
    """The tokens that end an answer. The first one ends it where its grammar permits nothing more."""
    digits: Digits

    @property
    def end(self) -> int:
        return self.ends[0]

    @property
    def mask_words(self) -> int:
        return -(-self.size // WORD_BITS)


def load_vocabulary(model_dir: str, size: int, end_tokens: tuple[int, ...], fingerprint: str = "") -> Vocabulary:
    """Returns the vocabulary of the model in `model_dir`. That of a paced model ("") is bytes.

    `size` is the width of the model's logits, which may be more than its tokenizer has. Raises UnsupportedFeature where
    no token ends an answer, and ConfigError where the tokenizer's file cannot be read, or does not match `fingerprint`.
    """
    if not end_tokens:
        raise UnsupportedFeature("grammars need a model with an end token, and this one has none")
    if not model_dir:
        tokenizer = LLTokenizer(TokenizerWrapper(_ByteTokens(size, end_tokens[0])), eos_token=list(end_tokens))
        return _vocabulary(tokenizer, size, end_tokens)
    content = read_tokenizer(Path(model_dir), fingerprint)
    try:
        tokenizer = LLTokenizer(content, n_vocab=size, eos_token=list(end_tokens))
    except Exception as error:  # llguidance raises bare exceptions of several kinds
        raise ConfigError(
            f"the tokenizer in {model_dir} cannot be read for grammars: {error}", field="model_dir"
        ) from error
    return _vocabulary(tokenizer, size, end_tokens)


def _vocabulary(tokenizer: LLTokenizer, size: int, end_tokens: tuple[int, ...]) -> Vocabulary:
    texts = [tokenizer.decode_bytes([token]) for token in range(min(size, tokenizer.vocab_size))]
    return Vocabulary(tokenizer, size, end_tokens, digits_of(texts, size))


class _ByteTokens:
    """A tokenizer in the form that `TokenizerWrapper` takes. Ids below 256 are bytes, and the text of another id is
    <id>."""

    def __init__(self, size: int, end: int) -> None:
        self.tokens = [bytes([token]) if token < 256 else f"<{token}>".encode() for token in range(size)]
        self.eos_token_id = end
        self.bos_token_id = None
        self.special_token_ids: list[int] = []

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
