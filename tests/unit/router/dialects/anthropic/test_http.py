"""/v1/messages over HTTP: bodies, streams and errors in the form of Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.unit.router.conftest import Frontend
from tests.unit.router.dialects.anthropic.test_content_blocks import events_of
from twostroke.base.errors import Draining, InternalError, Overloaded, PeerLost, RateLimitExceeded
from twostroke.request import FinishReason, SampledToken

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASK: dict[str, Any] = {"model": "toy", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
LONG = {**ASK, "messages": [{"role": "user", "content": "hi" * 600}]}


@pytest.fixture
async def http(frontend: Frontend) -> AsyncIterator[httpx.AsyncClient]:
    """A client that takes events with types; that of `frontend` reads like clients of OpenAI's API."""
    async with httpx.AsyncClient(base_url=frontend.url, timeout=60) as client:
        yield client


async def test_an_answer_is_a_message(frontend, http):
    answer = (await http.post(MESSAGES, json=ASK)).json()
    prompt_tokens = len(frontend.dispatcher.requests[0].prompt)
    assert answer.pop("id").startswith("msg_")
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "toy",
        "content": [{"type": "text", "text": "hell"}],
        "stop_reason": "max_tokens",
        "stop_sequence": None,
        "usage": {
            "input_tokens": prompt_tokens - 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 3,
            "output_tokens": 4,
        },
    }


@pytest.mark.parametrize("further", [{}, {"min_tokens": 3, "is_prompt_only": False}])
async def test_no_tokens_are_asked_for_where_the_prompt_is_only_to_be_cached(frontend, http, further):
    body = {**ASK, "max_tokens": 0, **further}
    message = (await http.post(MESSAGES, json=body)).json()
    assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], "max_tokens", 0)
    asked = frontend.dispatcher.requests[0]
    assert (asked.sampling.max_tokens, asked.sampling.min_tokens) == (1, 0)
    assert message["usage"]["input_tokens"] + message["usage"]["cache_read_input_tokens"] == len(asked.prompt)
    events = events_of((await http.post(MESSAGES, json=body | {"stream": True})).text)
    assert [event["type"] for event in events] == ["message_start", "ping", "message_delta", "message_stop"]
    assert events[2]["delta"]["stop_reason"] == "max_tokens"
    assert events[2]["usage"]["output_tokens"] == 0


async def test_a_stream_has_the_events_of_anthropics_api(frontend, http):
    answer = await http.post(MESSAGES, json={**ASK, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.text)
    prompt_tokens = len(frontend.dispatcher.requests[0].prompt)
    assert [event["type"] for event in events] == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 4,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert events[0]["message"]["content"] == []
    usage = events[0]["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (prompt_tokens - 3, 3)
    assert [event["delta"]["text"] for event in events[3:7]] == list("hell")
    assert events[8]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[8]["usage"] == {
        "input_tokens": prompt_tokens - 3,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 3,
        "output_tokens": 4,
    }


async def test_a_limit_above_the_window_is_as_much_as_fits(frontend, http):
    frontend.dispatcher.script = lambda request, index: [*map(SampledToken, b"x" * 400)]
    answer = (await http.post(MESSAGES, json={**ASK, "max_tokens": 64_000})).json()
    prompt_tokens = len(frontend.dispatcher.requests[0].prompt)
    assert answer["usage"]["output_tokens"] == 256 - prompt_tokens
    assert answer["stop_reason"] == "model_context_window_exceeded"


async def test_an_answer_that_ends_by_itself_ends_its_turn(frontend, http):
    frontend.dispatcher.reason = FinishReason.STOP
    assert (await http.post(MESSAGES, json=ASK)).json()["stop_reason"] == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_says_which_stop_sequence_has_ended_it(http, stream):
    asked = {**ASK, "max_tokens": 9, "stop_sequences": ["zz", "lo", "llo!"], "stream": stream}
    answer = await http.post(MESSAGES, json=asked)
    ended = events_of(answer.text)[-2]["delta"] if stream else answer.json()
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", "lo")


async def test_tokens_up_to_a_hint_that_were_not_cached_were_written_to_the_cache(frontend, http):
    system = [{"type": "text", "text": "Be brief. " * 5, "cache_control": {"type": "ephemeral"}}]
    usage = (await http.post(MESSAGES, json={**ASK, "system": system})).json()["usage"]
    (request,) = frontend.dispatcher.requests
    assert usage["cache_read_input_tokens"] == 3
    assert len("Be brief. " * 5) < usage["cache_creation_input_tokens"] + 3 < len(request.prompt)
    parts = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert sum(usage[part] for part in parts) == len(request.prompt)
    assert request.hints[0].seconds == 300.0


async def test_tokens_are_counted_without_an_answer(frontend, http):
    body = {"model": "toy", "system": "Be brief.", "messages": ASK["messages"]}
    counted = (await http.post(COUNT, json=body)).json()
    assert not frontend.dispatcher.requests
    await http.post(MESSAGES, json={**ASK, **body})
    assert counted == {"input_tokens": len(frontend.dispatcher.requests[0].prompt)}


async def test_two_requests_with_other_billing_headers_have_all_blocks_in_common(frontend, http):
    for nonce in ("a1b2c", "d3e4f"):
        header = f"x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch={nonce};"
        system = [{"type": "text", "text": header}, {"type": "text", "text": "You are Claude Code."}]
        await http.post(MESSAGES, json={**ASK, "system": system})
    first, second = frontend.dispatcher.requests
    assert first.prompt == second.prompt
    await http.post(MESSAGES, json={**ASK, "system": "You are Claude Code.", "had_billing_header": True})
    labels = {"role": "router", "part": "billing_header"}
    assert frontend.metrics.registry.get_sample_value("twostroke_removed_prompt_parts_total", labels) == 2


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "words"),
    [
        (MESSAGES, {}, 400, "invalid_request_error", "messages"),
        (MESSAGES, {**ASK, "max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        (MESSAGES, {**ASK, "max_tokens": -1}, 400, "invalid_request_error", "max_tokens must be from 1"),
        (MESSAGES, {**ASK, "model": "other"}, 404, "not_found_error", "other"),
        (MESSAGES, LONG, 400, "invalid_request_error", "prompt is too long: 1218 tokens > 256 maximum"),
        (MESSAGES, {**ASK, "system": "x" * (1 << 17)}, 413, "request_too_large", "larger"),
        (COUNT, {**ASK, "messages": 5}, 400, "invalid_request_error", "messages"),
        (f"{MESSAGES}/batches", ASK, 404, "not_found_error", "nothing"),
    ],
)
async def test_every_refusal_has_the_form_of_anthropics_api(http, path, body, status, kind, words):
    refused = await http.post(path, json=body)
    said = refused.json()
    assert refused.status_code == status
    assert (said["type"], said["error"]["type"]) == ("error", kind)
    assert words in said["error"]["message"]
    assert said["request_id"] == refused.headers["request-id"] == refused.headers["x-request-id"]


async def test_a_wrong_method_is_refused_in_that_form_too(http):
    refused = await http.get(MESSAGES)
    assert refused.status_code == 405
    assert refused.json()["error"]["type"] == "invalid_request_error"


FAILURES = [
    (Overloaded("the queue is full", retry_after_s=7.0), 529, "overloaded_error", "7"),
    (RateLimitExceeded("too many", retry_after_s=9.0), 429, "rate_limit_error", "9"),
    (Draining("it ends"), 503, "overloaded_error", "1"),
    (PeerLost("a worker died"), 503, "overloaded_error", "1"),
    (InternalError("our bug"), 500, "api_error", None),
]


@pytest.mark.parametrize(("failure", "status", "kind", "retry_after"), FAILURES)
async def test_a_failure_before_the_first_token_has_its_status(frontend, http, failure, status, kind, retry_after):
    frontend.dispatcher.failure = failure
    failed = await http.post(MESSAGES, json={**ASK, "stream": True})
    assert failed.status_code == status
    assert failed.headers.get("retry-after") == retry_after
    expected = {"type": kind, "message": failure.message}
    assert failed.json() == {"type": "error", "error": expected, "request_id": failed.headers["request-id"]}


@pytest.mark.parametrize(("failure", "status", "kind", "retry_after"), FAILURES)
async def test_a_failure_in_the_middle_is_the_streams_last_event(frontend, http, failure, status, kind, retry_after):
    frontend.dispatcher.failure, frontend.dispatcher.failure_after = failure, 2
    failed = await http.post(MESSAGES, json={**ASK, "stream": True})
    assert failed.status_code == 200
    *_, delta, last = events_of(failed.text)
    assert delta["type"] == "content_block_delta"
    expected = {"type": kind, "message": failure.message}
    assert last == {"type": "error", "error": expected, "request_id": failed.headers["request-id"]}


async def test_streams_cannot_be_resumed(http):
    refused = await http.post(MESSAGES, json={**ASK, "stream": True}, headers={"last-event-id": "x"})
    assert refused.status_code == 400
    assert refused.json()["type"] == "error"
