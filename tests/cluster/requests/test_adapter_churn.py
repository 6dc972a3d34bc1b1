"""Adapters that are loaded, replaced and unloaded under load: every answer is that of a version that was served."""

from __future__ import annotations

import asyncio
import json
import random
import time
import urllib.error
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.cluster.served import Server, starting
from tests.lora import random_tensors, write_adapter

PACED = "paced:step_ms=2,max_model_len=512,page_bytes=1024"
FLAGS = ["--model", PACED, "--kv-cache-memory", "1M", "--served-model-name", "tiny", "--prefill", "2", "--decode", "2"]
TOKEN = "the-token-of-this-test-and-of-nobody-else"
NAMES, VERSIONS, SECONDS, CLIENTS = 6, 8, 6.0, 12
PROMPTS = [f"{number}: tell me what the ship carries, and where it was seen last. " * 2 for number in range(3)]


def post(url: str, path: str, body: dict[str, Any]) -> tuple[int, str]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
    request = urllib.request.Request(f"http://{url}{path}", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def ask(url: str, model: str, prompt: str) -> tuple[int, str]:
    status, body = post(url, "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0})
    return status, json.loads(body)["choices"][0]["text"] if status == 200 else body


@dataclass
class History:
    """What each name may have led to, and when: (from, to, version), None for nothing."""

    spans: dict[str, list[list[Any]]] = field(default_factory=lambda: defaultdict(list))

    def changing(self, name: str, version: int | None, now_s: float) -> None:
        """From now on a request may already get it."""
        self.spans[name].append([now_s, float("inf"), version])

    def changed(self, name: str, now_s: float) -> None:
        """From now on no request gets what was before."""
        for span in self.spans[name][:-1]:
            span[1] = min(span[1], now_s)

    def possible(self, name: str, from_s: float, to_s: float) -> set[int | None]:
        return {version for begin, end, version in self.spans[name] if begin <= to_s and end >= from_s}


async def test_no_answer_is_another_versions_while_adapters_come_and_go(tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / "loras" / str(v), random_tensors(seed=v)) for v in range(VERSIONS)]
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(TOKEN)
    flags = ["--lora-dirs", str(tmp_path / "loras"), "--max-loras", "4", "--allow-runtime-lora-updating"]
    with starting(tmp_path, *FLAGS, *flags, "--token-file", str(tmp_path / "token")) as server:
        await asyncio.to_thread(server.until_printed, "Ctrl-C ends it")
        await churn(server, folders)


async def churn(server: Server, folders: list[Path]) -> None:
    url, draw, history = server.address("OpenAI HTTP"), random.Random(3), History()
    expected: dict[tuple[int | None, str], str] = {}
    for version, folder in enumerate(folders):
        load = {"lora_name": f"v{version}", "lora_path": str(folder)}
        assert (await asyncio.to_thread(post, url, "/v1/load_lora_adapter", load))[0] == 200
        for prompt in PROMPTS:
            expected[version, prompt] = (await asyncio.to_thread(ask, url, f"v{version}", prompt))[1]
    assert len(set(expected.values())) == len(expected)
    names = [f"name{number}" for number in range(NAMES)]
    for name in names:
        history.changing(name, None, 0.0)
    until_s, wrong, counts = time.monotonic() + SECONDS, [], defaultdict(int)

    async def client(own: random.Random) -> None:
        while time.monotonic() < until_s:
            name, prompt, from_s = own.choice(names), own.choice(PROMPTS), time.monotonic()
            status, said = await asyncio.to_thread(ask, url, name, prompt)
            possible = history.possible(name, from_s, time.monotonic())
            if status == 404 and "model_not_found" in said:
                is_right = None in possible
            else:
                is_right = status == 200 and said in {expected.get((version, prompt)) for version in possible}
            counts[status] += 1
            if not is_right:
                wrong.append((name, status, said[:200], possible))

    async def operator() -> None:
        while time.monotonic() < until_s:
            name, version = draw.choice(names), draw.randrange(VERSIONS)
            is_unload = draw.random() < 0.25 and history.spans[name][-1][2] is not None
            history.changing(name, None if is_unload else version, time.monotonic())
            if is_unload:
                done = await asyncio.to_thread(post, url, "/v1/unload_lora_adapter", {"lora_name": name})
            else:
                load = {"lora_name": name, "lora_path": str(folders[version]), "load_inplace": True}
                done = await asyncio.to_thread(post, url, "/v1/load_lora_adapter", load)
            assert done[0] == 200, done
            history.changed(name, time.monotonic())
            await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as group:
        group.create_task(operator())
        for number in range(CLIENTS):
            group.create_task(client(random.Random(number)))
    assert wrong == []
    assert counts[200] > 100
    assert counts[404] > 0
