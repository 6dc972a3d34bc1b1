"""What every client is asked, what the server itself says to it, and whether a client saw the same."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.hand_cut import messages_of

Json = dict[str, Any]

QUESTION = {"role": "user", "content": "What is the capital of France?"}
LONG_ENOUGH = 100_000
"""Tokens of an answer that no model here has room for."""
PATIENCE_S = 120.0

ASKS: tuple[Json, ...] = tuple(
    {"name": f"{name}, {'stream' if stream else 'whole'}", "stream": stream, **ask}
    for name, ask in (
        ("chat", {"messages": [QUESTION], "max_tokens": 20}),
        ("response", {"input": [QUESTION], "max_tokens": 20}),
        ("completion", {"prompt": "1, 2, 3, 4,", "max_tokens": 12}),
    )
    for stream in (False, True)
)
TOO_LONG: Json = {"name": "too long", "messages": [QUESTION], "max_tokens": LONG_ENOUGH, "stream": False}


@dataclass(frozen=True, slots=True)
class Served:
    """A server that clients are pointed at."""

    url: str
    """Without /v1."""
    model: str
    model_dir: Path
    """The folder that holds the tokenizer."""
    grpc: str
    """Address of the gRPC API."""

    def given(self) -> Json:
        """What a client's script reads."""
        asked = {"asks": ASKS, "too_long": TOO_LONG}
        return {"base_url": f"{self.url}/v1", "grpc": self.grpc, "model": self.model, **asked}

    def expected(self) -> dict[str, Json]:
        """Returns the text and the tokens of each ask. They are counted apart from `usage`: the tokenizer's, and ids of
        the answer."""
        return {ask["name"]: self._expected(ask) for ask in ASKS}

    def _expected(self, ask: Json) -> Json:
        """A response is expected to be what a chat with the same messages gets."""
        is_chat = "prompt" not in ask
        prompt = {"messages": ask.get("messages") or ask["input"]} if is_chat else {"prompt": ask["prompt"]}
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        body = {**prompt, "max_tokens": ask["max_tokens"], "temperature": 0, "return_token_ids": True}
        choice = self.post(path, body)["choices"][0]
        tokenized = {"add_generation_prompt": True} if is_chat else {}
        return {
            "text": choice["message"]["content"] if is_chat else choice["text"],
            "prompt_tokens": self.post("/tokenize", {**prompt, **tokenized})["count"],
            "completion_tokens": len(choice["token_ids"]),
        }

    def post(self, path: str, body: Json) -> Json:
        answer: Json = json.loads(self._answer(path, body))
        return answer

    def stream(self, path: str, body: Json) -> list[Json]:
        return messages_of(self._answer(path, body))

    def _answer(self, path: str, body: Json) -> bytes:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as got:
            answer: bytes = got.read()
        return answer


def wrong(answers: dict[str, Json], expected: dict[str, Json], too_long: str, kinds: tuple[str, ...]) -> list[str]:
    """What a client has seen otherwise; `kinds`: what it can ask. `too_long`: its name for a request that is."""
    problems = []
    for name, answer in expected.items():
        if name.startswith(kinds) and answers.get(name) != answer:
            problems.append(f"{name}: {answers.get(name)} instead of {answer}")
    if answers.get("too long") != {"error": too_long}:
        problems.append(f"too long: {answers.get('too long')} instead of {too_long}")
    return problems
