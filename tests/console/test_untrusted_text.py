"""Markup in what clients and models write shows as text, wherever the page shows it."""

from __future__ import annotations

import json
from typing import Any

from playwright.sync_api import Browser, Route, expect

from tests.console.browsing import Watched, watched
from tests.console.conftest import Served

MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script><a href='javascript:alert(3)'>x</a>\"'&lt;"
FOREIGN = "main img, main script, main a[href^='javascript'], dialog img, dialog script, svg script, iframe, [onerror]"
"""Elements that the markup would make."""
KEPT = ("role", "status", "state", "order", "facts")
"""Fields whose values choose how something is drawn: those that the router itself sets."""


def with_markup(value: Any, name: str = "") -> Any:
    """Every text in an answer of the API, with the markup behind it."""
    if isinstance(value, dict):
        return {key: with_markup(each, key) for key, each in value.items()}
    if isinstance(value, list):
        return [with_markup(each, name) for each in value]
    return value + MARKUP if isinstance(value, str) and name not in KEPT else value


def add_markup(route: Route) -> None:
    answer = route.fetch()
    route.fulfill(response=answer, json=with_markup(answer.json()))


def check(seen: Watched) -> None:
    expect(seen.page.get_by_text("<img src=x").first).to_be_attached()
    assert seen.page.locator(FOREIGN).count() == 0
    seen.check()


def test_every_text_of_every_answer_may_be_markup(served: Served, chromium: Browser) -> None:
    served.load()
    served.server.command("pin", "add", "--text", "The quick brown fox jumps over the lazy dog. " * 4, "--wait", "30s")
    with watched(chromium, served.url, served.key) as seen:
        page = seen.page
        page.route("**/console/api/**", add_markup)
        page.reload()
        expect(page.locator(".worker").first).to_be_visible()
        check(seen)
        page.get_by_role("button", name="Drain").first.click()
        check(seen)
        page.keyboard.press("Escape")
        for view, there in (("requests", "tbody tr"), ("pins", "tbody tr")):
            seen.go(view)
            expect(page.locator(there).first).to_be_visible()
            check(seen)
        page.get_by_role("button", name="Remove").first.click()
        check(seen)
        page.keyboard.press("Escape")
        page.unroute("**/console/api/**")
        seen.go("requests")
        page.route("**/console/api/request?**", add_markup)
        page.locator("tbody button").first.click()
        expect(page.locator(".waterfall .span").first).to_be_visible()
        check(seen)
        page.route("**/console/api/blocks", add_markup)
        seen.go("blocks")
        page.get_by_label("Text").fill(f"The quick brown fox {MARKUP}")
        page.get_by_role("button", name="Find its blocks").click()
        expect(page.locator(".block").first).to_be_visible()
        check(seen)


def test_prompts_and_ids_of_real_requests_may_be_markup(served: Served, chromium: Browser) -> None:
    served.ask("<img/src=x/onerror=alert(4)>", MARKUP, 4)
    with watched(chromium, served.url, served.key) as seen:
        page = seen.page
        seen.go("requests")
        page.get_by_label("Order").select_option("latest")
        page.get_by_role("button", name="<img/src=x/onerror=alert(4)>").click()
        expect(page.get_by_role("heading", name="Waterfall")).to_be_visible()
        seen.go("requests/%3Cimg%20src%3Dx%20onerror%3Dalert(5)%3E")
        expect(page.get_by_role("alert")).to_contain_text("know no request '<img src=x onerror=alert(5)>'")
        check(seen)


def test_a_models_text_reasoning_and_tool_calls_may_be_markup(served: Served, chromium: Browser) -> None:
    call = {"index": 0, "id": MARKUP, "function": {"name": MARKUP, "arguments": MARKUP}}
    deltas = [{"reasoning_content": MARKUP}, {"content": MARKUP}, {"tool_calls": [call]}]
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": MARKUP}]})
    events.append({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    headers = {"content-type": "text/event-stream", "x-request-id": MARKUP}
    with watched(chromium, served.url, served.key) as seen:
        page = seen.page
        seen.go("playground")
        page.route("**/v1/chat/completions", lambda route: route.fulfill(headers=headers, body=body))
        page.get_by_label("Message", exact=True).fill(MARKUP)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".call pre")).to_have_text(MARKUP)
        expect(page.locator(".reasoning")).to_have_text(MARKUP)
        check(seen)
        page.get_by_label("Result of").fill(MARKUP)
        with page.expect_request("**/v1/chat/completions") as sent:
            page.get_by_role("button", name="Send results").click()
        *_, called, result = sent.value.post_data_json["messages"]
        assert called["tool_calls"][0]["function"] == {"name": MARKUP, "arguments": MARKUP}
        assert result == {"role": "tool", "tool_call_id": MARKUP, "content": MARKUP}
        expect(page.locator(".call pre")).to_have_count(2)
        check(seen)
