"""Converts text to token ids and back, with only a model's tokenizer files: no torch, no transformers."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from router.json_body import checked_utf8
from router.text.chat_template import Guard, SpecialTexts, load_templates, unknown_template
from router.text.detokenize import ByteDecoder, Decoder, RecentTokensDecoder, is_whole
from router.text.known_text import NOTHING_KNOWN, KnownText
from router.text.output.parsing import OutputFormats
from router.text.prompts import ChatPrompt
from router.text.segments import Cutter, Piece, pieces_in_segments
from twostroke.base.errors import ConfigError, UnsupportedFeature
from twostroke.config.output import OutputConfig

CONTEXT_TOKENS = 4
"""Tokens of the prompt's tail with which an output is decoded, so that the space before its first word survives."""


class TokenizerText:
    """Reads tokenizer.json, tokenizer_config.json and files of chat templates, as published with a model."""

    def __init__(self, directory: Path, output: OutputConfig | None = None) -> None:
        """`output` are the flags for parsers of tool calls and reasoning. By default the chat template decides."""
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"{directory} has no tokenizer.json", field="model_dir")
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"{file} is not a tokenizer: {error}", field="model_dir") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._cutter = Cutter(self._tokenizer)
        self._ends = _ends_of_texts(self._tokenizer, self._cutter.may_begin)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token: entry.content for token, entry in added.items()}
        self._special = frozenset(token for token, entry in added.items() if entry.special)
        specials = [entry for entry in added.values() if entry.special]
        normalizer = self._tokenizer.normalizer if any(entry.normalized for entry in specials) else None
        texts = [entry.content for entry in specials if entry.content]
        self._special_texts = SpecialTexts(texts, *([] if normalizer is None else [normalizer.normalize_str]))
        vocabulary = self._tokenizer.get_vocab()
        self.longest_token_chars = max(map(len, vocabulary))
        """Most characters that one token stands for."""
        self.tokens_end = max(vocabulary.values()) + 1
        """One more than the highest token of a text."""
        self._decoders = _decoder_types(self._tokenizer)
        self._bytes_of: dict[int, bytes] = {}
        """Bytes of tokens that were decoded before, by token."""
        self._templates = load_templates(directory)
        shown = self._templates.source if self._templates else ""
        self.formats = OutputFormats.of(shown, output or OutputConfig())
        """How the model writes calls and reasoning."""

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        split_special_tokens: bool = False,
        known: KnownText = NOTHING_KNOWN,
    ) -> array[int]:
        """Returns the token ids of a text.

        `split_special_tokens`: special tokens written in `text` are ordinary text. `known` has the tokens of text that
        was tokenized before.
        """
        ends = self._ends
        if not known.may_know(text) or not self._cutter.cuts or split_special_tokens or ends is None:
            return array("I", self._encode(text, adds=add_special_tokens, splits=split_special_tokens))
        tokens = known.tokens(self._cutter.segments(text), b"text", str.encode, self._encode)
        return array("I", ends[0]) + tokens + array("I", ends[1]) if add_special_tokens else tokens

    def _encode(self, text: str, *, adds: bool = False, splits: bool = False) -> list[int]:
        self._tokenizer.encode_special_tokens = splits
        # The fast variant, which computes no offsets, only takes batches.
        (encoded,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=adds)
        ids: list[int] = encoded.ids
        return ids

    def encode_chat(
        self,
        chat: ChatPrompt,
        check: Callable[[str], None] = lambda rendered: None,
        known: KnownText = NOTHING_KNOWN,
    ) -> array[int]:
        """Returns the tokens of a chat. Special tokens that clients write are ordinary text; the template's are not.

        `check` may refuse the rendered text before it is tokenized. `known` has the tokens of text that was tokenized
        before.
        """
        guard = Guard(self._special_texts, chat)
        rendered = self.render_chat(guard.guarded if guard.is_needed else chat)
        check(rendered)
        if not guard.is_needed:
            return self.encode(rendered, add_special_tokens=False, known=known)
        pieces = list(guard.pieces(rendered))
        segments = pieces_in_segments(pieces) if known.may_know(rendered) else [pieces]
        return known.tokens(segments, b"pieces", _written, self._encode_pieces)

    def _encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        return [token for text, is_special in pieces for token in self._encode(text, splits=not is_special)]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """Returns the bytes that this token stands for; not always whole characters."""
        added = self._added.get(token)
        if added is not None and "ByteLevel" not in self._decoders:
            return added.encode()
        piece: str | None = added or self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if "ByteLevel" in self._decoders:
            return _bytes_of_entry(piece)
        if "ByteFallback" in self._decoders and len(piece) == 6 and piece.startswith("<0x"):
            return bytes.fromhex(piece[3:5])
        return piece.replace("▁", " ").encode()

    def _known_bytes(self, token: int) -> bytes:
        """Returns `token_bytes` of a token, and remembers it. No more tokens are remembered than the vocabulary has."""
        known = self._bytes_of.get(token)
        if known is None:
            known = self._bytes_of[token] = self.token_bytes(token)
        return known

    def entry(self, token: int) -> str:
        """Returns a token as the vocabulary writes it; "" for an id that it lacks."""
        written: str | None = self._tokenizer.id_to_token(token)
        return written or ""

    def added_token(self, text: str) -> int | None:
        """Returns the added token with this text. None: there is none."""
        return next((token for token, content in self._added.items() if content == text), None)

    def is_special(self, token: int) -> bool:
        """Returns whether the token is special, such as the end of a sequence, and not text of an answer."""
        return token in self._special

    def token_of(self, piece: str) -> int | None:
        """Returns the token of an entry of the vocabulary. None: there is no such entry."""
        token: int | None = self._tokenizer.token_to_id(piece)
        return token

    def decoder(
        self, prompt: Sequence[int], *, skip_special_tokens: bool = True, kept: frozenset[str] = frozenset()
    ) -> Decoder:
        """Returns a decoder for one output that follows `prompt`. `kept`: special tokens that stay in the text."""
        silent = self._special if skip_special_tokens else frozenset()
        if kept:
            silent = frozenset(token for token in silent if self._added[token] not in kept)
        context = [token for token in prompt[-CONTEXT_TOKENS:] if token not in silent]
        if self._decoders == {"ByteLevel"}:
            return ByteDecoder(self._known_bytes, silent, context)
        return RecentTokensDecoder(
            lambda ids: self.decode(ids, skip_special_tokens=False),
            silent,
            context,
            is_context_whole=is_whole(b"".join(map(self._known_bytes, context))),
        )

    def render_chat(self, chat: ChatPrompt) -> str:
        """Returns the prompt text of a chat, special tokens included."""
        if self._templates is None:
            raise UnsupportedFeature("this model has no chat template: use completions", field="messages")
        return checked_utf8(self._templates.render(chat), "messages")


class ByteText:
    """Text of a model without a tokenizer: ids below 256 are bytes, the others show as <id>."""

    def __init__(self, output: OutputConfig | None = None) -> None:
        self.formats = OutputFormats.of("", output or OutputConfig())

    longest_token_chars = 1
    tokens_end = 256

    def token_of(self, piece: str) -> int | None:
        return None

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        split_special_tokens: bool = False,
        known: KnownText = NOTHING_KNOWN,
    ) -> array[int]:
        return array("I", list(text.encode()))

    def encode_chat(
        self,
        chat: ChatPrompt,
        check: Callable[[str], None] = lambda rendered: None,
        known: KnownText = NOTHING_KNOWN,
    ) -> array[int]:
        rendered = self.render_chat(chat)
        check(rendered)
        return self.encode(rendered)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        decoder = self.decoder((), skip_special_tokens=skip_special_tokens)
        return "".join([*map(decoder.feed, ids), decoder.flush()])

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else f"<{token}>".encode()

    def entry(self, token: int) -> str:
        return token_text(self, token)

    def added_token(self, text: str) -> int | None:
        return None

    def is_special(self, token: int) -> bool:
        return token >= 256

    def decoder(
        self, prompt: Sequence[int], *, skip_special_tokens: bool = True, kept: frozenset[str] = frozenset()
    ) -> Decoder:
        return ByteDecoder(self.token_bytes)

    def render_chat(self, chat: ChatPrompt) -> str:
        if chat.template:
            raise unknown_template(chat.template, ())
        text = "\n".join(f"{message.get('role')}: {message.get('content') or ''}" for message in chat.messages)
        if chat.continue_final_message:
            return text
        return f"{text}\nassistant: " if chat.add_generation_prompt else f"{text}\n"


Text = TokenizerText | ByteText
"""Tokenizer, detokenizer and chat templates of a model."""


def load_text(model_dir: str, output: OutputConfig | None = None) -> Text:
    """Returns the text of the model in `model_dir`; that of a paced model ("") is bytes."""
    return TokenizerText(Path(model_dir), output) if model_dir else ByteText(output)


Ends = tuple[Sequence[int], Sequence[int]]
"""Tokens that are put before a text, and after it."""


def _ends_of_texts(tokenizer: Tokenizer, added: Iterable[str]) -> Ends | None:
    """Returns the tokens that the tokenizer puts before every text and after it. None: they are not known.

    They are found with texts that begin with one of the `added` tokens, since every tokenizer keeps these as one token.
    """
    for token in sorted(added):
        found = {_ends_of(tokenizer, token, probe) for probe in (token, f"{token}a", f"{token}b c")}
        if len(found) == 1 and (ends := found.pop()) is not None:
            return ends
    return None


def _ends_of(tokenizer: Tokenizer, token: str, probe: str) -> Ends | None:
    """Returns the tokens around `probe`, which begins with the added token `token`. None: that is not found once."""
    plain, whole = (tuple(tokenizer.encode(probe, add_special_tokens=adds).ids) for adds in (False, True))
    first = tokenizer.token_to_id(token)
    if plain[:1] != (first,) or plain.count(first) != 1 or whole.count(first) != 1:
        return None
    at = whole.index(first)
    end = at + len(plain)
    return (whole[:at], whole[end:]) if whole[at:end] == plain else None


def _written(pieces: Sequence[Piece]) -> bytes:
    """Returns an unambiguous encoding of pieces as bytes."""
    return b"".join(
        b"%d %d " % (is_special, len(data)) + data for text, is_special in pieces if (data := text.encode())
    )


def _decoder_types(tokenizer: Tokenizer) -> frozenset[str]:
    if tokenizer.decoder is None:
        return frozenset()
    state = json.loads(tokenizer.decoder.__getstate__())
    return frozenset(part["type"] for part in [state, *state.get("decoders", ())])


def _byte_alphabet() -> dict[str, bytes]:
    """Returns, by character of byte-level vocabularies, the byte that the character stands for."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): bytes([byte]) for byte in printable} | {
        chr(256 + index): bytes([byte]) for index, byte in enumerate(hidden)
    }


_BYTE_OF = _byte_alphabet()


def _bytes_of_entry(piece: str) -> bytes:
    """Returns the bytes of a byte-level entry. If one of its characters stands for no byte, the entry is plain text."""
    found = [_BYTE_OF.get(char) for char in piece]
    return piece.encode() if None in found else b"".join(each for each in found if each is not None)


def token_text(text: Text, token: int) -> str:
    """Returns a token as logprobs show it: readable, even in the middle of a character."""
    return text.token_bytes(token).decode("utf-8", "replace")
