"""A cluster of paced workers with a console, a browser, and requests that were slow."""

from __future__ import annotations

import concurrent.futures
import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.cluster.served import Server, starting
from tests.console import browsing

MODEL = "paced:step_ms=10,max_model_len=1024"
SYSTEM = "You are the voice of a shipping company. You answer in short sentences and never tell where a ship is. " * 2
SLOW, QUICK = "a-slow-one", "a-quick-one"
"""Ids of requests that `load` makes."""


@dataclass
class Served:
    server: Server
    url: str
    key: str

    def ask(self, request_id: str, question: str, tokens: int) -> None:
        """Has one chat answered."""
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        body = {"messages": messages, "max_tokens": tokens, "ignore_eos": True}
        headers = {"content-type": "application/json", "x-request-id": request_id}
        request = urllib.request.Request(f"{self.url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200

    def load(self) -> None:
        """Makes requests of which one is the slowest, and a pin."""
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            others = [pool.submit(self.ask, f"{QUICK}-{number}", f"Question {number % 4}?", 12) for number in range(16)]
            slow = pool.submit(self.ask, SLOW, "Tell all of it.", 150)
            for each in [*others, slow]:
                each.result()


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    model = ["--model", MODEL, "--kv-cache-memory", "2M", "--served-model-name", "tiny"]
    with starting(folder, *model, "--prefill", "1", "--decode", "2", "--flexible") as server:
        server.until_printed("Ctrl-C ends it")
        key = server.command("console", "--key").strip()
        yield Served(server, f"http://{server.address('OpenAI HTTP').removesuffix('/v1')}", key)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("console")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browsing.browser() as browser:
        yield browser
