"""The console of one server: operating it, with a mouse and with a keyboard, its accessibility, and untrusted text.

axe-core finds no fault in any view. Markup in what clients and models write shows as text, wherever the page shows it.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from tests.console.browsing import DESKTOP, PHONE, Scheme, Watched, axe_script, watched
from tests.console.conftest import SLOW, SYSTEM, Served

VIEWS = ("fleet", "requests", "blocks", "pins", "playground")


def test_the_slowest_request_of_the_last_minute_says_why_it_was_slow(served: Served, chromium: Browser) -> None:
    served.load()
    with watched(chromium, served.url, served.key, PHONE, "dark") as seen:
        page = seen.page
        page.get_by_role("link", name="Requests").click()
        first = page.locator("tbody tr").first
        expect(first).to_contain_text(SLOW)
        first.get_by_role("button").press("Enter")
        expect(page.locator("#main")).to_be_focused()
        parts = page.locator(".parts li")
        expect(parts.first).to_contain_text("for 150 tokens of output")
        expect(page.get_by_role("heading", name="Why it ran there")).to_be_visible()
        expect(page.locator("tr.chosen")).to_contain_text("ms")
        assert page.locator("tbody tr").count() > 1, "candidates that were not taken are there, too"
        names = page.locator(".span .name").all_text_contents()
        assert any(name.startswith("request router-") for name in names)
        assert any(name.startswith("decode decode-") for name in names)
        assert seen.is_as_wide_as_its_window()
        seen.check()


def test_a_worker_is_drained_after_a_dialog_has_said_what_will_happen(served: Served, chromium: Browser) -> None:
    with watched(chromium, served.url, served.key) as seen:
        page = seen.page
        before = served.server.epochs()["decode-1"]
        page.get_by_role("button", name="Drain decode-1").click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("Drain decode-1?")
        expect(dialog).to_contain_text("It takes no new requests.")
        page.keyboard.press("Escape")
        expect(dialog).to_be_hidden()
        assert served.server.epochs()["decode-1"] == before
        page.get_by_role("button", name="Drain decode-1").click()
        dialog.get_by_role("button", name="Drain").click()
        expect(dialog.get_by_role("status")).to_contain_text("It is being drained")
        dialog.get_by_role("button", name="Close").click()
        expect(page.get_by_role("status").filter(has_text="decode-1 serves again")).to_be_visible()
        assert served.server.epochs()["decode-1"] != before
        seen.check()


@pytest.mark.slow
def test_the_last_worker_of_a_role_is_not_drained_by_mistake(served: Served, chromium: Browser) -> None:
    with watched(chromium, served.url, served.key) as seen:
        page = seen.page
        page.get_by_role("button", name="Drain prefill-0").click()
        dialog = page.get_by_role("dialog")
        dialog.get_by_label("Start it again afterwards").uncheck()
        dialog.get_by_role("button", name="Drain").click()
        expect(dialog.get_by_role("alert")).to_contain_text("prefill-0")
        assert "prefill-0" in served.server.epochs()
        seen.check()


@pytest.mark.slow
def test_a_role_is_switched_and_switched_back(served: Served, chromium: Browser) -> None:
    with watched(chromium, served.url, served.key) as seen:
        page = seen.page
        worker = page.get_by_role("group", name="decode-0")
        for old, new in (("decode", "prefill"), ("prefill", "decode")):
            expect(worker).to_contain_text(f"{old} · serving")
            page.get_by_role("button", name="Change the role of decode-0").click()
            dialog = page.get_by_role("dialog")
            expect(dialog).to_contain_text(f"twostroke role decode-0 {new}")
            dialog.get_by_role("button", name=f"Switch to {new}").click()
            expect(worker).to_contain_text(f"{new} · serving")
        seen.check()


@pytest.mark.slow
def test_a_prefix_is_pinned_found_and_removed(served: Served, chromium: Browser) -> None:
    with watched(chromium, served.url, served.key) as seen:
        page = seen.page
        page.get_by_role("link", name="Pins").click()
        page.get_by_label("Text").fill(SYSTEM)
        page.get_by_role("button", name="Pin …").click()
        page.get_by_role("dialog").get_by_role("button", name="Pin").click()
        expect(page.get_by_role("status").filter(has_text="tokens are pinned")).to_be_visible()
        expect(page.locator("tbody tr")).to_contain_text("3 ready")
        page.get_by_role("link", name="Blocks").click()
        page.get_by_label("System message").fill(SYSTEM)
        page.get_by_label("Text").fill("Where is it?")
        page.get_by_role("button", name="Find its blocks").click()
        expect(page.locator(".block.on-device").first).to_contain_text("system")
        page.get_by_role("link", name="Pins").click()
        page.get_by_role("button", name=re.compile("Remove pin")).click()
        page.get_by_role("dialog").get_by_role("button", name="Remove").click()
        expect(page.get_by_text("No prefix is pinned.")).to_be_visible()
        seen.check()


def test_a_chat_streams_is_stopped_and_marks_what_was_reused(served: Served, chromium: Browser) -> None:
    with watched(chromium, served.url, served.key) as seen:
        page = seen.page
        page.get_by_role("link", name="Playground").click()
        page.get_by_text("System message, parameters and tools").click()
        page.get_by_label("System message").fill(SYSTEM)
        page.get_by_label("max_tokens").fill("8")
        for question in ("What is this?", "And this?"):
            page.get_by_label("Message", exact=True).fill(question)
            page.keyboard.press("Control+Enter")
            expect(page.locator(".message.assistant").last).to_contain_text("8 tokens in")
        reused = page.locator(".message.user").last
        expect(reused).to_contain_text(re.compile(r"[1-9]\d* of \d+ prompt tokens reused"))
        reused.get_by_text("The prompt, with its reused part marked").click()
        expect(reused.locator("mark")).to_contain_text("You are the voice")
        page.get_by_label("max_tokens").fill("600")
        page.get_by_label("Message", exact=True).fill("Go on and on")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".message.assistant").last.locator(".content")).not_to_be_empty()
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".message.assistant").last).to_contain_text("stopped")
        page.locator(".message.assistant").first.get_by_role("link").click()
        expect(page.get_by_role("heading", name="Waterfall")).to_be_visible()
        seen.check()


@pytest.mark.slow
def test_every_view_is_reached_by_keyboard_and_fits_a_phone(served: Served, chromium: Browser) -> None:
    with watched(chromium, served.url, served.key, PHONE) as seen:
        page = seen.page
        expect(page.locator(".worker").first).to_be_visible()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.textContent") == "Skip to content"
        for view in VIEWS:
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.hash") == f"#{view}"
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline == "solid", "where the focus is must be seen"
            page.keyboard.press("Enter")
            expect(page.locator("nav a[aria-current]")).to_have_attribute("href", f"#{view}")
            page.wait_for_load_state("networkidle") if view == "blocks" else page.wait_for_timeout(300)
            assert seen.is_as_wide_as_its_window(), view
        seen.check()


def test_a_key_is_asked_for_kept_in_the_tab_and_not_in_the_address(served: Served, chromium: Browser) -> None:
    with watched(chromium, served.url, size=DESKTOP) as seen:
        page = seen.page
        key = page.get_by_label("Operator's key")
        expect(key).to_be_focused()
        key.fill("tso-wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_contain_text("not an operator's key")
        page.get_by_label("Operator's key").fill(served.key)
        page.get_by_role("button", name="Sign in").click()
        expect(page.locator(".worker")).to_have_count(3)
        page.reload()
        expect(page.locator(".worker")).to_have_count(3)
        page.get_by_role("button", name="Sign out").click()
        expect(page.get_by_label("Operator's key")).to_be_visible()
        page.goto(f"{served.url}/console?x#key={served.key}")
        expect(page.locator(".worker")).to_have_count(3)
        assert served.key not in page.url
        assert page.evaluate("document.cookie + JSON.stringify(localStorage)") == "{}"
        seen.check()


@pytest.mark.slow
def test_what_is_remarked_on_a_request_fits_a_phone(served: Served, chromium: Browser) -> None:
    remark = "its first token came after 23.38 s; the router had foreseen 7.08 s, and that is a long line"
    served.load()
    with watched(chromium, served.url, served.key, PHONE) as seen:

        def add_remark(route: Route) -> None:
            answer = route.fetch()
            route.fulfill(response=answer, json={**answer.json(), "remarks": [remark]})

        seen.page.route("**/console/api/request?**", add_remark)
        seen.go(f"requests/{SLOW}")
        expect(seen.page.get_by_text(remark)).to_be_visible()
        assert seen.is_as_wide_as_its_window()
        seen.check()


RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def faults(page: Page) -> list[str]:
    """What is wrong with what the page shows now, and where."""
    page.evaluate(axe_script())
    found = page.evaluate("rules => axe.run(document, {runOnly: rules})", RULES)
    return [
        f"{fault['id']}: {node['html'][:160]} {node['failureSummary']}"
        for fault in found["violations"]
        for node in fault["nodes"]
    ]


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        pytest.param(DESKTOP, "light", marks=pytest.mark.slow),
        pytest.param(DESKTOP, "dark", marks=pytest.mark.slow),
        pytest.param(PHONE, "light", marks=pytest.mark.slow),
        (PHONE, "dark"),
    ],
)
def test_no_view_has_a_fault(served: Served, chromium: Browser, size: tuple[int, int], scheme: Scheme) -> None:
    axe_script()
    served.load()
    with watched(chromium, served.url, size=size, scheme=scheme) as seen:
        page = seen.page
        expect(page.get_by_label("Operator's key")).to_be_visible()
        found = {"sign in": faults(page)}
        page.get_by_label("Operator's key").fill(served.key)
        page.keyboard.press("Enter")
        expect(page.locator(".worker").first).to_be_visible()
        found["fleet"] = faults(page)
        page.get_by_role("button", name="Drain").first.click()
        found["dialog"] = faults(page)
        page.keyboard.press("Escape")
        seen.go("requests")
        expect(page.locator("tbody tr").first).to_be_visible()
        found["requests"] = faults(page)
        seen.go(f"requests/{SLOW}")
        expect(page.locator(".waterfall .span").first).to_be_visible()
        found["request"] = faults(page)
        seen.go("blocks")
        page.get_by_label("System message").fill(SYSTEM)
        page.get_by_label("Text").fill("Where is it?")
        page.get_by_role("button", name="Find its blocks").click()
        expect(page.locator(".block").first).to_be_visible()
        found["blocks"] = faults(page)
        seen.go("pins")
        expect(page.get_by_text("No prefix is pinned.")).to_be_visible()
        found["pins"] = faults(page)
        seen.go("playground")
        page.get_by_text("System message, parameters and tools").click()
        page.get_by_label("max_tokens").fill("8")
        page.get_by_label("Message", exact=True).fill("What is this?")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".message.assistant").last).to_contain_text("8 tokens in")
        found["playground"] = faults(page)
        assert {view: said for view, said in found.items() if said} == {}
        seen.check()


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


@pytest.mark.slow
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
