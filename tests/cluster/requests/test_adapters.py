"""Adapters of a served fleet: loaded, replaced and unloaded while requests run, over restarts of everything."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.served import Server, starting, wait_until
from tests.lora import random_tensors, write_adapter

PACED = "paced:step_ms=1,max_model_len=512,page_bytes=1024"
FLAGS = ["--model", PACED, "--kv-cache-memory", "1M", "--served-model-name", "tiny", "--prefill", "2", "--decode", "2"]
PROMPT = "What does the captain say of the ship that nobody has seen for years? " * 2
PINNED = "You are the voice of another ship, and you always tell where it is. " * 2


def post(server: Server, path: str, body: dict[str, Any], token: str = "") -> tuple[int, str]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    url = f"http://{server.address('OpenAI HTTP')}{path}"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, json.dumps(body).encode(), headers), timeout=30
        ) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def text(server: Server, model: str, prompt: str = PROMPT) -> str:
    status, body = post(
        server, "/v1/completions", {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0}
    )
    assert status == 200, body
    answer = json.loads(body)
    assert answer["model"] == model
    return answer["choices"][0]["text"]


def cached(server: Server, model: str, prompt: str = PROMPT) -> int:
    body = {"model": model, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    return json.loads(post(server, "/v1/completions", body)[1])["usage"]["prompt_tokens_details"]["cached_tokens"]


def models(server: Server) -> dict[str, dict[str, Any]]:
    with urllib.request.urlopen(f"http://{server.address('OpenAI HTTP')}/v1/models", timeout=60) as answer:
        return {card["id"]: card for card in json.load(answer)["data"]}


def test_adapters_are_models_of_their_own_over_replacements_and_restarts(tmp_path: Path) -> None:
    folders = [write_adapter(tmp_path / "loras" / str(seed), random_tensors(seed=seed)) for seed in range(3)]
    outside = write_adapter(tmp_path / "outside")
    flags = ["--lora-modules", f"first={folders[0]}", "--lora-dirs", str(tmp_path / "loras"), "--max-loras", "2"]
    token = "the-token-of-this-test-and-of-nobody-else"
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(token)
    flags += ["--allow-runtime-lora-updating", "--token-file", str(tmp_path / "token")]
    with starting(tmp_path, *FLAGS, *flags) as server:
        server.until_printed("Ctrl-C ends it")
        base, first = text(server, "tiny"), text(server, "first")
        assert base != first
        assert text(server, "tiny") == base, "no page of the adapter is the model's"
        assert text(server, "first") == first
        assert cached(server, "first") > 0
        card = models(server)["first"]
        assert (card["parent"], card["root"]) == ("tiny", str(folders[0]))

        status, body = post(server, "/v1/completions", {"model": "second", "prompt": "x"})
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
        load = {"lora_name": "second", "lora_path": str(folders[1])}
        assert post(server, "/v1/load_lora_adapter", load)[0] == 401
        assert post(server, "/v1/load_lora_adapter", load, token)[0] == 200
        second = text(server, "second")
        assert second not in (base, first)
        assert post(server, "/v1/load_lora_adapter", load, token)[0] == 400, "it is there already"
        assert (
            post(server, "/v1/load_lora_adapter", {**load, "lora_name": "x", "lora_path": str(outside)}, token)[0]
            == 400
        )

        # in place: other bytes under the same name and path
        write_adapter(folders[1], random_tensors(seed=7))
        assert post(server, "/v1/load_lora_adapter", {**load, "load_inplace": True}, token)[0] == 200
        replaced = text(server, "second")
        assert replaced not in (base, first, second)
        server.command("adapter", "load", "third", str(folders[2]))
        third = text(server, "third")

        pin = json.loads(server.command("pin", "add", "--text", PINNED, "--model", "third", "--json"))
        assert cached(server, "tiny", PINNED) == 0, "the pin is the adapter's"
        assert cached(server, "third", PINNED) >= pin["pinned"] > 0
        pinned = text(server, "third", PINNED)
        server.command("pin", "remove", pin["pin_id"])

        os.kill(server.worker_pid("SupervisorActor"), signal.SIGKILL)
        server.until_printed("Ray starts it again")
        epochs = server.epochs()
        for role in ("DecodeActor", "PrefillActor"):
            os.kill(server.worker_pid(role), signal.SIGKILL)
        wait_until(lambda: len(set(server.epochs().values()) - set(epochs.values())) >= 2, lambda: server.printed)
        for name, expected in (("tiny", base), ("first", first), ("second", replaced), ("third", third)):
            assert text(server, name) == expected
        assert text(server, "third", PINNED) == pinned

        assert post(server, "/v1/unload_lora_adapter", {"lora_name": "third"}, token)[0] == 200
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": "third"}, token)[0] == 404
        assert post(server, "/v1/completions", {"model": "third", "prompt": "x"})[0] == 404
        listed = json.loads(server.command("adapter", "list", "--json"))["adapters"]
        assert [each["name"] for each in listed] == ["first", "second"] == sorted(models(server).keys() - {"tiny"})


@pytest.mark.slow
@pytest.mark.parametrize("why", ["no folder", "dora"])
def test_an_adapter_that_cannot_be_served_ends_the_start_in_one_line(tmp_path: Path, why: str) -> None:
    folder = write_adapter(tmp_path / "a", use_dora=True) if why == "dora" else tmp_path / "a"
    with starting(tmp_path, *FLAGS, "--lora-modules", f"a={folder}") as server:
        server.until_printed("adapter refused")
