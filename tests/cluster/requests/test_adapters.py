"""Adapters of a served fleet: loaded, replaced and unloaded while requests run, over restarts of everything.

`make adapters` plays the load of the last test at full length with a model that really computes.
"""

from __future__ import annotations

import json
import os
import random
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.served import Server, starting, wait_until
from tests.lora import random_tensors, write_adapter
from tests.trials.chaos.adapters.calls import Calls
from tests.trials.chaos.adapters.churn import Churn, Prompt, Stage
from tests.trials.chaos.adapters.fleet import BASE, TOKEN, churned

PACED = "paced:step_ms=1,max_model_len=512,page_bytes=1024"
FLAGS = ["--model", PACED, "--kv-cache-memory", "1M", "--served-model-name", "tiny", "--prefill", "1", "--decode", "2"]
PROMPT = "What does the captain say of the ship that nobody has seen for years? " * 2
NAMES, SERVED, VERSIONS, SECONDS = 12, 8, 10, 4.0
KEPT = "4"
"""Adapters that a worker keeps: half of what is served."""
PROMPTS: list[Prompt] = [tuple(random.Random(number).choices(range(200), k=70)) for number in range(3)]
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


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server with one adapter, and the folder below which it takes others."""
    folder = tmp_path_factory.mktemp("adapters")
    loras = folder / "loras"
    first = write_adapter(loras / "0", random_tensors(seed=0))
    (folder / "token").touch(0o600)
    (folder / "token").write_text(TOKEN)
    flags = ["--lora-modules", f"first={first}", "--lora-dirs", str(loras), "--max-loras", KEPT]
    flags += ["--allow-runtime-lora-updating", "--token-file", str(folder / "token")]
    with starting(folder, *FLAGS, *flags) as server:
        server.until_printed("Ctrl-C ends it")
        yield server, loras


def test_adapters_are_models_of_their_own_over_replacements_and_restarts(
    served: tuple[Server, Path], tmp_path: Path
) -> None:
    server, loras = served
    folders = [loras / "0", *(write_adapter(loras / str(seed), random_tensors(seed=seed)) for seed in (1, 2))]
    outside = write_adapter(tmp_path / "outside")
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
    assert post(server, "/v1/load_lora_adapter", load, TOKEN)[0] == 200
    second = text(server, "second")
    assert second not in (base, first)
    assert post(server, "/v1/load_lora_adapter", load, TOKEN)[0] == 400, "it is there already"
    assert post(server, "/v1/load_lora_adapter", {**load, "lora_name": "x", "lora_path": str(outside)}, TOKEN)[0] == 400

    # in place: other bytes under the same name and path
    write_adapter(folders[1], random_tensors(seed=7))
    assert post(server, "/v1/load_lora_adapter", {**load, "load_inplace": True}, TOKEN)[0] == 200
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

    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "third"}, TOKEN)[0] == 200
    assert post(server, "/v1/unload_lora_adapter", {"lora_name": "third"}, TOKEN)[0] == 404
    assert post(server, "/v1/completions", {"model": "third", "prompt": "x"})[0] == 404
    listed = json.loads(server.command("adapter", "list", "--json"))["adapters"]
    assert [each["name"] for each in listed] == ["first", "second"] == sorted(models(server).keys() - {"tiny"})
    for name in ("first", "second"):
        assert post(server, "/v1/unload_lora_adapter", {"lora_name": name}, TOKEN)[0] == 200


async def test_no_answer_is_another_versions_while_adapters_come_and_go(served: tuple[Server, Path]) -> None:
    server, loras = served
    calls = Calls(server.address("OpenAI HTTP"), TOKEN)
    churn = Churn(paced_stage(calls, loras), calls, seed=3, pause_s=0.3)
    seen, counted = await churned(server, churn, SECONDS, kills=False)
    assert seen.wrong == []
    assert min(seen.answers, seen.of_base, seen.not_found, seen.cached_tokens) > 0
    assert min(seen.loads, seen.replacements, seen.unloads, counted.evictions) > 0
    assert counted.failures == 0


def paced_stage(calls: Calls, loras: Path) -> Stage:
    """Asks for the answer of each version under a name that nobody else uses."""
    writers = {f"v{seed}": partial(write_adapter, tensors=random_tensors(seed=seed)) for seed in range(VERSIONS)}
    expected = {(BASE, prompt): calls.ask(BASE, prompt).tokens for prompt in PROMPTS}
    for version, write in writers.items():
        write(loras / version)
        calls.load(version, str(loras / version))
        expected |= {(version, prompt): calls.ask(version, prompt).tokens for prompt in PROMPTS}
        calls.unload(version)
    assert len(set(expected.values())) == len(expected)
    return Stage(BASE, [f"name{number}" for number in range(NAMES)], SERVED, writers, expected, loras)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["no folder", "dora"])
def test_an_adapter_that_cannot_be_served_ends_the_start_in_one_line(tmp_path: Path, why: str) -> None:
    folder = write_adapter(tmp_path / "a", use_dora=True) if why == "dora" else tmp_path / "a"
    with starting(tmp_path, *FLAGS, "--lora-modules", f"a={folder}") as server:
        server.until_printed("adapter refused")
