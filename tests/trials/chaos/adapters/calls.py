"""The HTTP calls of a served fleet with adapters, as its clients and its operator make them."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

PATIENCE_S: Final = 60.0
ANSWER_TOKENS: Final = 8


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    tokens: tuple[int, ...] = ()
    cached_tokens: int = 0
    """Tokens of the prompt that were found in caches."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Calls:
    address: str
    token: str
    """The cluster's."""

    def ask(self, model: str, prompt: Sequence[int]) -> Answer:
        body = {"model": model, "prompt": list(prompt), "max_tokens": ANSWER_TOKENS, "temperature": 0}
        status, said = self._post("/v1/completions", body | {"ignore_eos": True, "return_token_ids": True})
        if status != 200:
            return Answer(status, error=said)
        answer = json.loads(said)
        details = answer["usage"].get("prompt_tokens_details") or {}
        return Answer(status, tuple(answer["choices"][0]["token_ids"]), int(details.get("cached_tokens") or 0))

    def load(self, name: str, folder: str, *, in_place: bool = False) -> None:
        """Serves what is in a folder now. Fails the run where that is refused."""
        self._change("load", {"lora_name": name, "lora_path": folder, "load_inplace": in_place})

    def unload(self, name: str) -> None:
        self._change("unload", {"lora_name": name})

    def _change(self, verb: str, body: dict[str, Any]) -> None:
        status, said = self._post(f"/v1/{verb}_lora_adapter", body)
        assert status == 200, f"{verb} of {body['lora_name']}: {status} {said}"

    def _post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        request = urllib.request.Request(f"http://{self.address}{path}", json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
