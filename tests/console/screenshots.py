"""Takes the pictures of docs/console.md: `python -m tests.console.screenshots docs/console` writes them."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.console.browsing import DESKTOP, PHONE, Scheme, browser, watched
from tests.console.conftest import SLOW, SYSTEM, Served, serving

SHOTS: tuple[tuple[str, tuple[int, int], Scheme], ...] = (
    ("fleet", DESKTOP, "light"),
    ("fleet", PHONE, "dark"),
    ("request", DESKTOP, "dark"),
    ("request", PHONE, "light"),
    ("drain", DESKTOP, "light"),
    ("blocks", DESKTOP, "light"),
    ("playground", PHONE, "dark"),
)
"""View, size and scheme of each picture."""
MOST_BYTES = 150_000


def name_of(view: str, size: tuple[int, int], scheme: Scheme) -> str:
    return f"{view}-{'phone' if size == PHONE else 'desktop'}-{scheme}.png"


def take(served: Served, chromium: Browser, folder: Path) -> list[str]:
    """Takes all pictures, and returns their names."""
    served.load()
    for view, size, scheme in SHOTS:
        with watched(chromium, served.url, served.key, size, scheme) as seen:
            expect(seen.page.locator(".worker").first).to_be_visible()
            _SHOWN[view](served, seen.page)
            seen.page.screenshot(path=folder / name_of(view, size, scheme))
            seen.check()
    return [name_of(*shot) for shot in SHOTS]


def _fleet(served: Served, page: Page) -> None:
    served.load()
    page.wait_for_timeout(1500)


def _request(served: Served, page: Page) -> None:
    page.evaluate("id => { location.hash = `#requests/${id}`; }", SLOW)
    expect(page.locator(".waterfall .span").first).to_be_visible()


def _drain(served: Served, page: Page) -> None:
    page.get_by_role("button", name="Drain decode-0").click()
    expect(page.get_by_role("dialog")).to_be_visible()


def _blocks(served: Served, page: Page) -> None:
    page.get_by_role("link", name="Blocks").click()
    page.get_by_label("System message").fill(SYSTEM)
    page.get_by_label("Text").fill("Question 1?")
    page.get_by_role("button", name="Find its blocks").click()
    expect(page.locator(".block").first).to_be_visible()
    page.locator(".blocks").scroll_into_view_if_needed()


def _playground(served: Served, page: Page) -> None:
    page.get_by_role("link", name="Playground").click()
    page.get_by_text("System message, parameters and tools").click()
    page.get_by_label("System message").fill(SYSTEM)
    page.get_by_label("max_tokens").fill("24")
    page.get_by_text("System message, parameters and tools").click()
    for question in ("Where is the ship?", "And when does it come?"):
        page.get_by_label("Message", exact=True).fill(question)
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".message.assistant").last).to_contain_text("24 tokens in")
    page.locator("nav").scroll_into_view_if_needed()


_SHOWN = {"fleet": _fleet, "request": _request, "drain": _drain, "blocks": _blocks, "playground": _playground}


def main() -> int:
    folder = Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place, serving(Path(place)) as served, browser() as chromium:
        for name in take(served, chromium, folder):
            print(f"{folder / name}: {(folder / name).stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
