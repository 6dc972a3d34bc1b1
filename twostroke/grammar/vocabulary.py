"""The tokens of a model as bytes, in the form that llguidance needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llguidance import LLTokenizer, TokenizerWrapper

from twostroke.base.errors import ConfigError, UnsupportedFeature
from twostroke.base.token_mask import WORD_BITS
from twostroke.base.tokenizer_file import read_tokenizer
from twostroke.grammar.digits import Digits, digits_of


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokenizer: LLTokenizer
    size: int
    """Ids of tokens are below this: the width of the model's logits."""
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
    """Returns the vocabulary of the model in `model_dir`; that of a paced model ("") is bytes.

    `size`: the width of the model's logits, which may be more than its tokenizer has. Raises UnsupportedFeature where
    no token ends an answer, and ConfigError where the tokenizer's file cannot be read, or is another one than
    `fingerprint` says.
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
    """A tokenizer with bytes as its ids below 256, as `TokenizerWrapper` wants it; the others show as <id>."""

    def __init__(self, size: int, end: int) -> None:
        self.tokens = [bytes([token]) if token < 256 else f"<{token}>".encode() for token in range(size)]
        self.eos_token_id = end
        self.bos_token_id = None
        self.special_token_ids: list[int] = []

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
