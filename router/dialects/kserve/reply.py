"""Responses of `generate` and `generate_stream`: text and other outputs in JSON."""

from __future__ import annotations

from router.dialects.kserve.answer_parts import ChoiceParts, Outputs
from router.dialects.kserve.schema import VERSION, KServeRequest
from router.dialects.reply import ErrorForm, Json, encoded, finite, sse
from router.requests.resume import Progress, StreamPoint
from router.text.output.events import TextEvent, Usage
from router.text.tokenizer import Text, token_text
from twostroke.base.errors import ServeError
from twostroke.request import FinishReason, SampledToken


class GenerateReply:
    def __init__(self, request: KServeRequest, point: StreamPoint, model: str, text: Text, progress: Progress) -> None:
        del progress
        self._request = request
        self._text = text
        self._outputs = Outputs(request, len(point.sent), text)
        self._head: Json = {
            **({"id": request.id} if request.id else {}),
            "model_name": model,
            "model_version": VERSION,
        }
        self._last: SampledToken | None = None
        self._usage: Usage | None = None

    def add(self, event: TextEvent) -> None:
        self._outputs.add(event)
        self._last = event.token or self._last
        self._usage = event.usage or self._usage

    @property
    def is_long(self) -> bool:
        return self._outputs.is_long

    def body(self) -> Json:
        if not self._request.details:
            return {**self._head, **self._outputs_json()}
        (choice,) = self._outputs.choices
        logprobs = [self._token(token) for token in choice.tokens]
        return {**self._head, **self._outputs_json(), "details": {**self._end(choice), "logprobs": logprobs}}

    def messages(self, event: TextEvent) -> str:
        """Returns one message, or "" while the text is held back.

        With `details`, every token has a message, and the last one says how the answer ended.
        """
        self.add(event)
        choice = self._outputs.choices[event.choice]
        if choice.says_nothing_yet and not self._request.details:
            return ""
        message = {**self._head, **self._outputs_json()}
        if self._request.details and event.token is not None:
            message["token"] = self._token(event.token)
        if self._request.details and event.finish is not None and self._last is not None:
            message["details"] = {**self._end(choice), "token": self._token(self._last)}
        self._outputs.begin_next()
        return sse(encoded(message))

    def end(self) -> str:
        return ""

    def failure(self, error: ServeError) -> str:
        return sse(encoded(error_body(error)))

    def beat(self) -> str:
        return ": going on\n\n"

    def _outputs_json(self) -> Json:
        """Returns the outputs by name, as Triton writes them: a list only if an output has several values."""
        return {name: values[0] if len(values) == 1 else list(values) for name, values in self._outputs.by_name()}

    def _end(self, choice: ChoiceParts) -> Json:
        """Returns how an answer ended, and the tokens that it took."""
        assert self._usage is not None
        return {
            "finish_reason": self._reason(choice),
            "prompt_tokens": self._usage.prompt_tokens,
            "completion_tokens": self._usage.completion_tokens,
            "cached_tokens": self._usage.cached_tokens,
        }

    def _reason(self, choice: ChoiceParts) -> str:
        """Returns the protocol's name of the finish reason. A stop token that the client named is a stop sequence."""
        if choice.finish is not FinishReason.STOP:
            return "length"
        last = None if self._last is None else self._last.token
        is_own = last is not None and self._text.is_special(last) and last not in self._request.options.stop_token_ids
        return "eos_token" if is_own else "stop_sequence"

    def _token(self, token: SampledToken) -> Json:
        return {
            "id": token.token,
            "text": token_text(self._text, token.token),
            "logprob": finite(token.logprob),
            "special": self._text.is_special(token.token),
        }


def error_body(error: ServeError) -> Json:
    return {"error": error.message}


ERRORS = ErrorForm(error_body)
