"""Time to first token after a pinned system prompt and after one that was only used, each question after a flood."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from cluster.flags.checks import STDOUT
from tests.cluster.served import Server, starting, wait_until
from tests.trials.bench.pins.options import PinsOptions
from tools.output import write_json

WORDS = ("sea", "ship", "sail", "wind", "star", "night", "helm", "rope", "deck", "crew", "port", "bell", "mast", "tide")
TITLES = ("DecodeActor", "PrefillActor")
ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Answer:
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    text: str


@dataclass(slots=True)
class Findings:
    """Times in seconds."""

    pinned_s: list[float] = field(default_factory=list)
    unpinned_s: list[float] = field(default_factory=list)
    killed_s: list[float] = field(default_factory=list)
    """Times to first token after the pinned prompt, once its killed workers are back."""
    cached: dict[str, list[int]] = field(default_factory=dict)
    ready_again_s: float = 0.0
    """From the kill of both workers until they hold the pin again."""
    is_same: bool = True
    """The answer over pinned pages is that of before the pin, also after the kill."""

    @property
    def ratio(self) -> float:
        return statistics.median(self.pinned_s) / statistics.median(self.unpinned_s)


def run_session(options: PinsOptions) -> int:
    with (
        tempfile.TemporaryDirectory(prefix="pins-") as folder,
        starting(Path(folder), *shlex.split(options.serve)) as server,
    ):
        server.until_printed("Ctrl-C ends it")
        findings = _Session(server, options).run()
    _print(Console(stderr=options.json_path == STDOUT), findings)
    content = {"schema_version": 1, "options": options.model_dump(), "ratio": findings.ratio, **asdict(findings)}
    write_json(content, options.json_path)
    is_kept = all(count > 0 for name in ("pinned", "killed") for count in findings.cached[name])
    return 0 if findings.is_same and is_kept else 1


class _Session:
    def __init__(self, server: Server, options: PinsOptions) -> None:
        self._server = server
        self._options = options
        self._floods = 0
        self._url = f"http://{server.address('OpenAI HTTP')}/v1"
        self._model = self._get(f"{self._url}/models")["data"][0]["id"]

    def run(self) -> Findings:
        findings, pinned, unpinned = Findings(), self._text(1), self._text(2)
        first = self._ask(pinned, "Where is the ship?", ANSWER_TOKENS).text
        self._server.command("pin", "add", "--system", pinned)
        self._ask(unpinned, "Where is the ship?")
        findings.pinned_s, findings.cached["pinned"] = self._times(pinned)
        findings.unpinned_s, findings.cached["unpinned"] = self._times(unpinned)
        findings.is_same = self._ask(pinned, "Where is the ship?", ANSWER_TOKENS).text == first
        findings.ready_again_s = self._kill()
        findings.is_same &= self._ask(pinned, "Where is the ship?", ANSWER_TOKENS).text == first
        findings.killed_s, findings.cached["killed"] = self._times(pinned)
        return findings

    def _times(self, system: str) -> tuple[list[float], list[int]]:
        answers = []
        for number in range(self._options.rounds):
            self._flood()
            answers.append(self._ask(system, f"Question {number}: where are we?"))
        return [answer.ttft_s for answer in answers], [answer.cached_tokens for answer in answers]

    def _flood(self) -> None:
        for _ in range(self._options.flood):
            self._floods += 1
            self._ask(self._text(1000 + self._floods), "Go on.")

    def _kill(self) -> float:
        """Kills both workers; returns the seconds until each holds the pin again."""
        before = self._server.epochs()
        for title in TITLES:
            os.kill(self._server.worker_pid(title), signal.SIGKILL)
        began_s = time.monotonic()

        def is_back() -> bool:
            now = self._server.epochs()
            held = json.loads(self._server.command("pin", "list", "--json"))["pins"]
            ready = [pin for pin in held if pin["state"] == "ready"]
            are_new = now.keys() == before.keys() and all(now[name] != before[name] for name in before)
            return are_new and len(ready) == len(before)

        wait_until(_patient(is_back), lambda: self._server.printed)
        return time.monotonic() - began_s

    def _text(self, seed: int) -> str:
        chances = random.Random(seed)
        return " ".join(chances.choice(WORDS) for _ in range(self._options.words))

    def _ask(self, system: str, question: str, max_tokens: int = 2) -> Answer:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        body = {"model": self._model, "messages": messages, "max_tokens": max_tokens, "temperature": 0, "seed": 1}
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        began_s, ttft_s, text = time.monotonic(), 0.0, ""
        usage: dict[str, Any] = {}
        with self._open(f"{self._url}/chat/completions", json.dumps(streamed).encode()) as lines:
            for line in lines:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[len(b"data: ") :])
                usage = chunk.get("usage") or usage
                content = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                if content and not text:
                    ttft_s = time.monotonic() - began_s
                text += content
        return Answer(ttft_s, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], text)

    def _open(self, url: str, body: bytes | None = None) -> Any:
        return urllib.request.urlopen(
            urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=120
        )

    def _get(self, url: str) -> Any:
        with self._open(url) as response:
            return json.load(response)


def _patient(is_so: Callable[[], bool]) -> Callable[[], bool]:
    """While workers are away, a command may fail."""

    def ask() -> bool:
        try:
            return is_so()
        except AssertionError:
            return False

    return ask


def _print(console: Console, findings: Findings) -> None:
    for name, seconds in (
        ("pinned", findings.pinned_s),
        ("only used", findings.unpinned_s),
        ("pinned, after the kill", findings.killed_s),
    ):
        console.print(
            f"{name}: first token after {1000 * statistics.median(seconds):.0f} ms (median of {len(seconds)})"
        )
    console.print(f"pinned over only used: {findings.ratio:.3f}")
    console.print(f"cached tokens: {findings.cached}", soft_wrap=True)
    console.print(f"killed workers hold the pin again after {findings.ready_again_s:.1f} s")
    console.print(f"the same answer over pinned pages: {findings.is_same}")
