"""OpenAI-compatible servers over HTTP: /v1/completions or /v1/chat/completions, streamed as SSE or whole."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from functools import partial
from typing import Any

import aiohttp

from tools.bench.client import AnswerRecorder, Client, Clock, ReportedUsage, Send
from tools.bench.load import PlannedRequest, Speller
from tools.bench.measure import Answer, Failure
from tools.bench.options import Target
from tools.clients.connect import connector
from twostroke.base.errors import ConfigError, PeerLost


class HttpClient(Client):
    def __init__(
        self, target: Target, speller: Speller, model: str, session: aiohttp.ClientSession, clock: Clock
    ) -> None:
        self._target = target
        self._speller = speller
        self._model = model
        self._session = session
        self._clock = clock

    @classmethod
    async def connect(cls, target: Target, speller: Speller, clock: Clock) -> HttpClient:
        """Asks for the model's name where none is given. Raises PeerLost or ConfigError."""
        # As a gRPC call's deadline goes along: ours computes nothing that would come too late.
        headers = {"Content-Type": "application/json", "x-request-timeout-s": str(target.timeout_s)}
        if target.api_key:
            headers["Authorization"] = f"Bearer {target.api_key}"
        session = aiohttp.ClientSession(
            connector=connector(target.tls), timeout=aiohttp.ClientTimeout(total=None), headers=headers
        )
        try:
            model = target.model or await _first_model(session, target)
        except BaseException:
            await session.close()
            raise
        return cls(target, speller, model, session, clock)

    async def close(self) -> None:
        await self._session.close()

    def prepare(self, planned: PlannedRequest) -> Send:
        return partial(self._send, json.dumps(self._body(planned), separators=(",", ":")).encode())

    def _body(self, planned: PlannedRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": planned.output_tokens,
            "temperature": self._target.temperature,
            "stream": self._target.stream,
        }
        if self._target.stream:
            body["stream_options"] = {"include_usage": True}
        if self._target.ignore_eos:
            body["ignore_eos"] = True
        if self._target.chat:
            body["messages"] = [{"role": "user", "content": self._speller.text(planned.prompt)}]
        elif self._target.text:
            body["prompt"] = self._speller.text(planned.prompt)
        else:
            body["prompt"] = self._speller.token_ids(planned.prompt)
        return body

    async def _send(self, body: bytes) -> Answer:
        recorder = AnswerRecorder(self._clock)
        try:
            async with (
                asyncio.timeout(self._target.timeout_s),
                self._session.post(self._target.name, data=body) as response,
            ):
                if response.status != 200:
                    return recorder.failed(f"http {response.status}", error_message(await response.read()))
                if self._target.stream:
                    return await self._read_stream(response, recorder)
                return _read_whole(await response.read(), recorder)
        except TimeoutError:
            return recorder.failed("timeout", f"no complete answer after {self._target.timeout_s:g} s")
        except aiohttp.ClientError as error:
            return recorder.failed("connection", str(error) or type(error).__name__)
        except (ValueError, AttributeError, TypeError, KeyError) as error:
            return recorder.failed("malformed answer", str(error))

    async def _read_stream(self, response: aiohttp.ClientResponse, recorder: AnswerRecorder) -> Answer:
        """Reads a stream to its end, to free the connection. What has arrived together gets one clock reading."""
        lines = SseLines()
        ended = False
        async for chunk in response.content.iter_any():
            at_s = self._clock()
            for payload in lines.feed(chunk):
                if payload == DONE:
                    ended = True
                    continue
                event = parse_event(payload)
                if event.error is not None:
                    return recorder.failed(f"stream {event.error.kind}", event.error.message)
                if event.carries_tokens:
                    recorder.token_event(at_s, event.id_count)
                if event.usage is not None:
                    recorder.usage = event.usage
                ended = ended or event.is_last
        if not ended:
            return recorder.failed("incomplete", "the stream ended without a finish reason")
        return recorder.completed()


def _read_whole(body: bytes, recorder: AnswerRecorder) -> Answer:
    event = parse_event(body)
    if event.error is not None:
        return recorder.failed(f"answer {event.error.kind}", event.error.message)
    if event.usage is not None:
        recorder.usage = event.usage
    return recorder.completed()


async def _first_model(session: aiohttp.ClientSession, target: Target) -> str:
    url = f"{target.base_url}/v1/models"
    try:
        async with session.get(url, timeout=aiohttp.ClientTimeout(total=10)) as response:
            body = await response.read()
    except (aiohttp.ClientError, TimeoutError) as error:
        raise PeerLost(f"no server at {target.base_url}: {str(error) or type(error).__name__}", field="url") from error
    if response.status != 200:
        raise ConfigError(
            f"{url} answered {response.status}: {error_message(body)}; name the model with --model", field="model"
        )
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{url} lists no model; name it with --model", field="model") from error


DONE = b"[DONE]"


@dataclass(frozen=True, slots=True)
class StreamEvent:
    carries_tokens: bool
    id_count: int | None
    """Tokens in it, where the server sends ids along."""
    is_last: bool
    """Whether it says why the answer ended."""
    usage: ReportedUsage | None
    error: Failure | None


class SseLines:
    """Cuts a byte stream into the payloads of its `data:` lines (OpenAI's servers put an event on one line)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def parse_event(payload: bytes) -> StreamEvent:
    """Raises ValueError for what is not an event of OpenAI's API."""
    event = json.loads(payload)
    if not isinstance(event, dict):
        raise ValueError(f"an event must be an object, got {type(event).__name__}")
    choices = event.get("choices") or ()
    choice: dict[str, Any] = choices[0] if choices else {}
    ids = choice.get("token_ids")
    is_last = choice.get("finish_reason") is not None
    return StreamEvent(
        carries_tokens=bool(ids) or _has_text(choice, is_last),
        id_count=len(ids) if ids else None,
        is_last=is_last,
        usage=_usage(event.get("usage")),
        error=_error(event.get("error")),
    )


def error_message(body: bytes) -> str:
    """Returns the message of an HTTP error's body, OpenAI's format or not."""
    try:
        event = json.loads(body)
    except ValueError:
        return body.decode(errors="replace").strip()[:200]
    found = _error(event.get("error") or event) if isinstance(event, dict) else None
    return found.message[:200] if found is not None else str(event)[:200]


def _has_text(choice: dict[str, Any], is_last: bool) -> bool:
    """Returns whether an event has tokens. Empty text is one, unless the event only opens or ends the answer."""
    delta = choice.get("delta")
    if isinstance(delta, dict):
        if delta.get("content") or delta.get("reasoning_content"):
            return True
        return "content" in delta and "role" not in delta and not is_last
    return bool(choice.get("text")) or ("text" in choice and not is_last)


def _usage(usage: Any) -> ReportedUsage | None:
    if not isinstance(usage, dict):
        return None
    details = usage.get("prompt_tokens_details") or {}
    return ReportedUsage(usage.get("prompt_tokens"), usage.get("completion_tokens"), details.get("cached_tokens"))


def _error(error: Any) -> Failure | None:
    if error is None:
        return None
    if isinstance(error, dict):
        kind = error.get("type") or error.get("code") or "error"
        return Failure(str(kind), str(error.get("message") or error.get("detail") or error))
    return Failure("error", str(error))
