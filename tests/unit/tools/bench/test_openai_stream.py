"""SSE bytes to events, as different servers write them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tools.bench.client import ReportedUsage
from tools.bench.http_client import SseLines, error_message, parse_event

STREAM = b'data: {"a": 1}\n\n: a comment\nevent: x\ndata:{"b": 2}\r\n\r\ndata: [DONE]\n\n'


def event(**fields: Any) -> Any:
    return parse_event(json.dumps(fields).encode())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_payloads_are_cut_out_whatever_the_chunks(size: int) -> None:
    lines = SseLines()
    chunks = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert [each for chunk in chunks for each in lines.feed(chunk)] == [b'{"a": 1}', b'{"b": 2}', b"[DONE]"]


@pytest.mark.parametrize(
    ("choice", "carries"),
    [
        ({"text": "hi", "finish_reason": None}, True),
        ({"text": "", "finish_reason": None}, True),  # in the middle of a character
        ({"text": "hi", "finish_reason": "length"}, True),
        ({"text": "", "finish_reason": "stop"}, False),
        ({"text": "", "finish_reason": "length", "token_ids": [5]}, True),
        ({"delta": {"content": "hi"}, "finish_reason": None}, True),
        ({"delta": {"content": ""}, "finish_reason": None}, True),
        ({"delta": {"reasoning_content": "hm"}, "finish_reason": None}, True),
        ({"delta": {"role": "assistant", "content": ""}, "finish_reason": None}, False),
        ({"delta": {"role": "assistant", "content": "hi"}, "finish_reason": None}, True),
        ({"delta": {}, "finish_reason": "stop"}, False),
    ],
)
def test_an_event_carries_tokens_or_only_opens_or_ends_the_answer(choice: dict[str, Any], carries: bool) -> None:
    assert event(choices=[choice]).carries_tokens is carries


def test_ids_tell_how_many_tokens_an_event_holds() -> None:
    assert event(choices=[{"text": "hi", "token_ids": [1, 2, 3]}]).id_count == 3
    assert event(choices=[{"text": "hi"}]).id_count is None


def test_usage_is_read_with_and_without_cached_tokens() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4}
    assert event(choices=[], usage=usage).usage == ReportedUsage(9, 4, None)
    assert event(choices=[], usage=usage | {"prompt_tokens_details": None}).usage == ReportedUsage(9, 4, None)
    assert event(usage=usage | {"prompt_tokens_details": {"cached_tokens": 8}}).usage == ReportedUsage(9, 4, 8)
    assert event(choices=[], usage=None).usage is None


def test_an_error_event_has_its_kind_and_message() -> None:
    error = event(error={"message": "gone", "type": "server_error"}).error
    assert (error.kind, error.message) == ("server_error", "gone")
    assert event(error="gone").error.message == "gone"


@pytest.mark.parametrize("payload", [b"nonsense", b"[1]", b"3", b"\xff"])
def test_what_is_no_event_is_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_event(payload)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "queue full", "type": "x"}}', "queue full"),
        (b'{"message": "flat", "code": 400}', "flat"),
        (b'{"detail": "fastapi"}', "fastapi"),
        (b"plain text\n", "plain text"),
        (b"[1]", "[1]"),
    ],
)
def test_the_message_of_an_http_error_is_found_in_any_format(body: bytes, message: str) -> None:
    assert error_message(body) == message
