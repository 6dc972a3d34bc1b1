"""What a response of KServe's protocol holds besides text: outputs that clients ask for, by name."""

from __future__ import annotations

import json
from collections.abc import Sequence

from router.dialects.kserve.schema import FINISH_REASON, KServeRequest
from router.dialects.reply import finite
from router.text.output.events import TextEvent
from router.text.tokenizer import Text, token_text
from twostroke.request import FinishReason, SampledToken

Values = Sequence[str] | Sequence[int] | Sequence[float]


class ChoiceParts:
    """What one choice has got since the last response."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens: list[SampledToken] = []
        self.finish: FinishReason | None = None
        self.logprob = 0.0
        """Sum over all tokens of the choice so far."""

    def add(self, event: TextEvent) -> None:
        self.texts.append(event.text)
        if event.token is not None:
            self.tokens.append(event.token)
            self.logprob += finite(event.token.logprob)
        self.finish = event.finish or self.finish

    @property
    def is_waited_for(self) -> bool:
        """Its text is held back until more of it is known, and it has not ended: a response would say nothing."""
        return self.finish is None and not any(self.texts)


class Outputs:
    """Makes the outputs of one request's responses."""

    def __init__(self, request: KServeRequest, text: Text) -> None:
        self._request = request
        self._text = text

    def of(self, choices: Sequence[ChoiceParts], prompt_tokens: int) -> list[tuple[str, Values]]:
        """Returns names and values of a response's outputs; a value for each choice."""
        return [(name, self._values(name, choices, prompt_tokens)) for name in self._request.outputs]

    def _values(self, name: str, choices: Sequence[ChoiceParts], prompt_tokens: int) -> Values:
        match name:
            case "num_input_tokens":
                return [prompt_tokens]
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
        """Returns a token's logprobs and those of the others that are wanted, as the vLLM backend writes them.

        The rank of a token that is not among the likeliest is not known, nor are those of tokens that the client names.
        """
        is_named = bool(self._request.options.logprob_token_ids)
        likeliest: dict[int, tuple[int | None, float]] = {
            other: (None if is_named else rank, logprob) for rank, (other, logprob) in enumerate(token.top, 1)
        }
        rank = likeliest.get(token.token, (None, 0.0))[0]
        entries = {token.token: (rank, token.logprob), **likeliest}
        return {
            other: {"logprob": finite(logprob), "rank": rank, "decoded_token": token_text(self._text, other)}
            for other, (rank, logprob) in entries.items()
        }
