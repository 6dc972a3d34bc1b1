"""A pinned system prompt, as an operator has it: over a flood, deaths of its worker and of the supervisor."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path

import psutil

from tests.cluster.served import PATIENCE_S, Server, starting, wait_until

PACED = "paced:step_ms=1,max_model_len=512,page_bytes=1024"
FLAGS = ["--model", PACED, "--kv-cache-memory", "128K", "--served-model-name", "tiny"]
"""A pool of 128 pages, 32 of which a request takes at most."""
SYSTEM = "You are the voice of a ship, and you never tell where it is. " * 5
BLOCK = 16


def pins_of(server: Server) -> list[dict]:
    return json.loads(server.command("pin", "list", "--json"))["pins"]


def cached_tokens(server: Server, system: str, question: str) -> int:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    body = json.dumps({"messages": messages, "max_tokens": 2}).encode()
    url = f"http://{server.address('OpenAI HTTP')}/v1/chat/completions"
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)["usage"]["prompt_tokens_details"]["cached_tokens"]


def flood(server: Server) -> None:
    for number in range(12):
        cached_tokens(server, f"{number} " * 120, "Go on.")


def test_a_pinned_system_prompt_outlives_a_flood_its_worker_and_the_supervisor(tmp_path: Path) -> None:
    """The server is that of `make serve ARGS=...`, with a model that needs no fetching, and `down` ends it."""
    with starting(tmp_path, *FLAGS, by_make=True) as server:
        server.until_printed("Ctrl-C ends it")
        (launcher,) = psutil.Process(server.process.pid).children()
        added = json.loads(server.command("pin", "add", "--system", SYSTEM, "--owner", "ops", "--json"))
        blocks = added["pinned"] // BLOCK
        assert {(each["worker_id"], each["state"], each["ready_blocks"]) for each in added["held"]} == {
            ("prefill-0", "ready", blocks),
            ("decode-0", "ready", blocks),
        }
        flood(server)
        assert cached_tokens(server, SYSTEM, "Where are we?") >= added["pinned"]
        assert next(each for each in pins_of(server) if each["worker_id"] == "decode-0")["hits"] == 1

        epochs = server.epochs()
        os.kill(server.worker_pid("DecodeActor"), signal.SIGKILL)
        wait_until(
            lambda: server.epochs().get("decode-0") not in (None, "", epochs["decode-0"]), lambda: server.printed
        )
        wait_until(lambda: all(each["state"] == "ready" for each in pins_of(server)), lambda: server.printed)
        assert cached_tokens(server, SYSTEM, "And now?") >= added["pinned"]

        os.kill(server.worker_pid("SupervisorActor"), signal.SIGKILL)
        server.until_printed("Ray starts it again")

        def is_back() -> bool:
            try:
                return len(pins_of(server)) == 2
            except AssertionError:
                return False  # the supervisor is away

        wait_until(is_back, lambda: server.printed)
        assert server.command("pin", "remove", added["pin_id"]) == "1 pin removed\n"
        assert server.command("pin", "remove", added["pin_id"]) == "0 pins removed\n"
        assert pins_of(server) == []
        for worker in json.loads(server.command("status", "--json"))["workers"]:
            assert worker["pages_pinned"] == 0
        assert server.command("down").startswith(f"stopped {launcher.pid} ")
        assert server.process.wait(PATIENCE_S) == 0
