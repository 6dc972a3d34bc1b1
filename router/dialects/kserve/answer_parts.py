"""What a response of KServe's protocol holds besides text: outputs that clients ask for, and tensors as raw bytes.

In raw bytes numbers are little endian, a text stands after its length in four bytes, and a boolean is one byte
(https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Sequence

from router.dialects.kserve.schema import FINISH_REASON, KServeRequest
from router.dialects.reply import LONG_BODY, finite
from router.text.output.events import TextEvent
from router.text.tokenizer import Text, token_text
from twostroke.base.errors import InvalidRequest
from twostroke.request import FinishReason, SampledToken

Values = Sequence[str] | Sequence[int] | Sequence[float]


class ChoiceParts:
    """The output of one choice since the last response."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens: list[SampledToken] = []
        self.finish: FinishReason | None = None
        self.logprob = 0.0
        """Sum of the logprobs of all tokens of the choice so far, earlier responses included."""

    def add(self, event: TextEvent) -> None:
        self.texts.append(event.text)
        if event.token is not None:
            self.tokens.append(event.token)
            self.logprob += finite(event.token.logprob)
        self.finish = event.finish or self.finish

    @property
    def says_nothing_yet(self) -> bool:
        """Whether a response would say nothing: its text is held back until more of it is known, and it has not
        ended."""
        return self.finish is None and not any(self.texts)


class Outputs:
    """Makes the outputs of one request's responses from its events."""

    def __init__(self, request: KServeRequest, choices: int, text: Text) -> None:
        self._request = request
        self._text = text
        self.choices = [ChoiceParts() for _ in range(choices)]
        self._prompt_tokens = 0

    def add(self, event: TextEvent) -> None:
        self.choices[event.choice].add(event)
        self._prompt_tokens = event.prompt_tokens

    @property
    def is_long(self) -> bool:
        """Whether a response with all tokens so far takes more than some milliseconds to make."""
        tokens = sum(len(choice.tokens) for choice in self.choices)
        return tokens * (1 + self._request.options.shown_logprobs) > LONG_BODY

    def by_name(self) -> list[tuple[str, Values]]:
        """Returns the outputs of a response, each with its values. All but `num_input_tokens` have one per choice."""
        return [(name, self._values(name, self.choices)) for name in self._request.outputs]

    def begin_next(self) -> None:
        """Drops the text and tokens of the last response."""
        for choice in self.choices:
            choice.texts.clear()
            choice.tokens.clear()

    def _values(self, name: str, choices: Sequence[ChoiceParts]) -> Values:
        match name:
            case "num_input_tokens":
                return [self._prompt_tokens]
            case "num_output_tokens":
                return [len(choice.tokens) for choice in choices]
            case "cumulative_logprob":
                return [choice.logprob for choice in choices]
            case "logprobs":
                return [json.dumps([self._logprobs(token) for token in choice.tokens]) for choice in choices]
            case _ if name == FINISH_REASON:
                return [choice.finish.value if choice.finish else self._request.unfinished for choice in choices]
            case _:
                return [self._request.before + "".join(choice.texts) for choice in choices]

    def _logprobs(self, token: SampledToken) -> dict[int, dict[str, object]]:
        """Returns the logprobs of a token and its alternatives, as Triton's vLLM backend writes them.

        Positions are known for the likeliest tokens only, and for none if the client has named the alternatives.
        """
        is_named = bool(self._request.options.logprob_token_ids)
        likeliest: dict[int, tuple[int | None, float]] = {
            other: (None if is_named else position, logprob) for position, (other, logprob) in enumerate(token.top, 1)
        }
        position = likeliest.get(token.token, (None, 0.0))[0]
        entries = {token.token: (position, token.logprob), **likeliest}
        return {
            other: {"logprob": finite(logprob), "rank": position, "decoded_token": token_text(self._text, other)}
            for other, (position, logprob) in entries.items()
        }


_LENGTH = struct.Struct("<I")


def raw_bool(name: str, raw: bytes) -> bool:
    """Reads the value of a boolean input. Raises InvalidRequest that names the input."""
    if raw not in (b"\x00", b"\x01"):
        raise InvalidRequest(f"input {name} must be one BOOL: a byte, 0 or 1", field=name)
    return raw == b"\x01"


def raw_text(name: str, raw: bytes) -> str:
    """Reads the value of a text input. Raises InvalidRequest that names the input."""
    if len(raw) < _LENGTH.size or _LENGTH.unpack_from(raw)[0] != len(raw) - _LENGTH.size:
        needed = "must be one string after its length in four bytes, little endian"
        raise InvalidRequest(f"input {name} {needed}", field=name)
    return decoded_text(name, raw[_LENGTH.size :])


def decoded_text(name: str, text: bytes) -> str:
    """Decodes the value of a text input. Raises InvalidRequest that names the input, if it is not UTF-8."""
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        what = f"{error.reason} at byte {error.start}"
        raise InvalidRequest(f"input {name} is not valid UTF-8: {what}", field=name) from error


def raw_output(datatype: str, values: Values) -> bytes:
    if datatype == "BYTES":
        return b"".join(_LENGTH.pack(len(text)) + text for text in encoded_texts(values))
    return struct.pack(f"<{len(values)}{'f' if datatype == 'FP32' else 'I'}", *values)


def encoded_texts(values: Values) -> Iterable[bytes]:
    return (str(value).encode(errors="replace") for value in values)
