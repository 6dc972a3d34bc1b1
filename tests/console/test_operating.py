"""What an operator does at the console, as a new one would, with a mouse and with a keyboard."""

from __future__ import annotations

import re

from playwright.sync_api import Browser, Route, expect

from tests.console.browsing import DESKTOP, PHONE, watched
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
