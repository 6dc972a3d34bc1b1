"""Opens the console in a headless Chromium, and watches what the page asks for and complains about."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, Request, expect, sync_playwright

from tests.console.fetch_browser import AXE, BROWSER, INSTALLED, TREE

Scheme = Literal["dark", "light"]
PHONE, DESKTOP = (360, 740), (1280, 800)
"""Widths and heights. No phone that is sold today is narrower."""
PATIENCE_MS = 30_000


def axe_script() -> str:
    if not AXE.exists():
        pytest.skip("NOT CHECKED: axe-core is missing; get it with `make .tools`")
    return AXE.read_text()


@contextmanager
def browser() -> Iterator[Browser]:
    """The browser, or the test is skipped with what to do."""
    found = BROWSER if BROWSER.exists() else next((Path(path) for path in map(shutil.which, INSTALLED) if path), None)
    if found is None:
        pytest.skip("NOT CHECKED: Chromium is missing; get it with `make .tools`, or Debian's package chromium")
    libraries = [path for path in (TREE / "usr/lib").glob("*-linux-gnu*") if path.is_dir()]
    folders = [*libraries, *(path / "pulseaudio" for path in libraries)]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, folders))}
    expect.set_options(timeout=PATIENCE_MS)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=found, env=environment, args=["--no-sandbox"])
        try:
            yield launched
        finally:
            launched.close()


@dataclass
class Watched:
    """What a page did beside showing itself."""

    page: Page
    url: str
    elsewhere: list[str] = field(default_factory=list)
    """Requests to other hosts."""
    complaints: list[str] = field(default_factory=list)
    """Errors of scripts, and what the page's policy refused."""
    dialogs: list[str] = field(default_factory=list)
    """Dialogs that a script opened (alert)."""

    def go(self, view: str) -> None:
        """Shows a view of the console."""
        self.page.goto(f"{self.url}/console#{view}")

    def check(self) -> None:
        """Raises AssertionError where the page did what it must not."""
        assert self.elsewhere == []
        assert self.complaints == []
        assert self.dialogs == []

    def is_as_wide_as_its_window(self) -> bool:
        return bool(self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"))


@contextmanager
def watched(
    browser: Browser, url: str, key: str = "", size: tuple[int, int] = DESKTOP, scheme: Scheme = "light"
) -> Iterator[Watched]:
    """A page of its own at the console, signed in where there is a key."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        ignore_https_errors=True,
        reduced_motion="reduce",
    )
    page = context.new_page()
    page.set_default_timeout(PATIENCE_MS)
    seen = Watched(page, url)

    def note_request(request: Request) -> None:
        if not request.url.startswith(f"{url}/"):
            seen.elsewhere.append(request.url)

    def note_message(message: ConsoleMessage) -> None:
        # What the API refuses is told by the page; the browser tells it, too.
        if message.type == "error" and "Failed to load resource" not in message.text:
            seen.complaints.append(message.text)

    def note_dialog(dialog: Dialog) -> None:
        seen.dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("request", note_request)
    page.on("console", note_message)
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("dialog", note_dialog)
    try:
        page.goto(f"{url}/console" + (f"#key={key}" if key else ""))
        yield seen
    finally:
        context.close()
