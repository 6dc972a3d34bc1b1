"""The console where clients have TLS and API keys."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.certificates import Authority
from tests.cluster.served import SMALL, Server, starting
from tests.console.browsing import watched


@pytest.fixture
def keyed(tmp_path: Path) -> Iterator[tuple[Server, Path]]:
    issued, keys = Authority(tmp_path).issue("router"), tmp_path / "keys.yaml"
    keys.write_text("keys: {}\n")
    tls = ["--tls-cert", str(issued.cert), "--tls-key", str(issued.key)]
    with starting(tmp_path, *SMALL, *tls, "--api-keys", str(keys)) as server:
        server.until_printed("Ctrl-C ends it")
        yield server, keys


@pytest.mark.slow
def test_keys_of_operators_open_it_and_those_of_clients_do_not(keyed: tuple[Server, Path], chromium: Browser) -> None:
    server, keys = keyed
    printed = server.command("console", "--tls").strip()
    url, _, own = printed.partition("/console#key=")
    assert url.startswith("https://")
    to_file = ("--file", str(keys))
    colleague = server.command("keys", "add", "--tenant", "ops", "--operator", *to_file).strip()
    client = server.command("keys", "add", "--tenant", "acme", *to_file).strip()
    with watched(chromium, url) as seen:
        page = seen.page
        page.get_by_label("Operator's key").fill(client)
        page.get_by_role("button", name="Sign in").click()
        expect(page.get_by_role("alert")).to_contain_text("not an operator's key")
        for key in (own, colleague):
            # A router reads the file of keys once a second.
            page.wait_for_timeout(1500)
            page.get_by_label("Operator's key").fill(key)
            page.get_by_role("button", name="Sign in").click()
            page.get_by_role("link", name="Fleet").click()
            expect(page.locator(".worker").first).to_be_visible()
            page.get_by_role("link", name="Playground").click()
            page.get_by_text("System message, parameters and tools").click()
            page.get_by_label("max_tokens").fill("4")
            page.get_by_label("Message", exact=True).fill("What is this?")
            page.get_by_role("button", name="Send").click()
            expect(page.locator(".message.assistant").last).to_contain_text("4 tokens in")
            page.get_by_role("button", name="Sign out").click()
        seen.check()
