"""axe-core finds no fault in any view, on a desktop or a phone, in light or dark."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.console.browsing import DESKTOP, PHONE, Scheme, axe_script, watched
from tests.console.conftest import SLOW, SYSTEM, Served

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
        (DESKTOP, "light"),
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
