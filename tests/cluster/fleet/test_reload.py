"""Weights change, and workers sleep, while clients use the cluster: no request fails, and no old page is read."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from openai import AsyncOpenAI
from safetensors.torch import load_file, save_file

from tests import process_table
from tests.cluster.fleet.test_rolling import answer, clients
from tests.cluster.served import PATIENCE_S, Server, starting

MODEL = "paced:step_ms=2,max_model_len=8192,weights={}"
FLAGS = ("--served-model-name", "tiny", "--prefill", "1", "--decode", "2", "--kv-cache-memory", "8M")
PROMPTS = [f"{number} {'word ' * (30 + 11 * number)}" for number in range(6)]
TOKENS = 24
LONG_TOKENS = 7500
"""Tokens of an answer that takes longer than a reload."""
SHARED_BYTES = 8 << 20


@asynccontextmanager
async def under_load(server: Server, is_right: Callable[[str, str], bool]) -> AsyncIterator[list[int]]:
    """Clients ask all the while, and every answer has to be right; yields how many each had so far."""
    async with clients(server) as opened:
        counts, is_over = [0] * len(opened), asyncio.Event()

        async def use(index: int, client: AsyncOpenAI) -> None:
            for prompt in itertools.islice(itertools.cycle(PROMPTS), index, None):
                text = await answer(client, prompt, TOKENS, counts[index] % 2 > 0)
                assert is_right(prompt, text), f"neither the old nor the new answer: {text!r}"
                counts[index] += 1
                if is_over.is_set():
                    return

        async with asyncio.TaskGroup() as load:
            for index, client in enumerate(opened):
                load.create_task(use(index, client))
            yield counts
            is_over.set()


async def all_answers(server: Server) -> dict[str, str]:
    async with clients(server) as opened:
        return {prompt: await answer(opened[0], prompt, TOKENS, False) for prompt in PROMPTS}


async def end_of_long_stream(server: Server, *command: str) -> tuple[str, str | None]:
    """Returns the text of a stream during which a command runs, and the code of the error that ends it."""
    (address, *_) = [router["http"] for router in json.loads(server.command("status", "--json"))["routers"]]
    body = {"model": "tiny", "prompt": PROMPTS[0], "max_tokens": LONG_TOKENS, "temperature": 0, "seed": 1}
    async with httpx.AsyncClient(timeout=PATIENCE_S) as client:
        asked = client.post(f"http://{address}/v1/completions", json={**body, "stream": True, "ignore_eos": True})
        stream = asyncio.create_task(asked)
        await asyncio.sleep(0.5)  # it has tokens
        await asyncio.to_thread(server.command, *command)
        answered = await stream
    chunks = [json.loads(event.removeprefix("data: ")) for event in answered.text.split("\n\n") if event[-1:] == "}"]
    errors = [chunk["error"]["code"] for chunk in chunks if "error" in chunk]
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks if "error" not in chunk)
    return text, errors[0] if errors else None


def refused(server: Server, *arguments: str) -> str:
    done = server.run(*arguments)
    assert done.returncode != 0, done.stdout
    return done.stderr


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for the tests of a paced model. Each leaves the first weights, and all workers awake."""
    folder = tmp_path_factory.mktemp("shared")
    disk = ("--disk-cache", "64M", "--disk-cache-dir", str(folder / "disk"))
    with starting(folder, "--model", MODEL.format(1), *FLAGS, *disk) as server:
        server.until_printed("Ctrl-C ends it")
        yield server


async def test_weights_change_under_load_and_every_answer_is_the_old_or_the_new_one(shared: Server) -> None:
    old, new = await all_answers(shared), dict[str, str]()
    seen: set[tuple[str, str]] = set()

    def is_right(prompt: str, text: str) -> bool:
        if text != old[prompt]:
            seen.add((prompt, text))
        return True

    async with under_load(shared, is_right) as counts:
        before = list(counts)
        await asyncio.to_thread(shared.command, "reload", MODEL.format(2))
        new = await all_answers(shared)
    assert all(new[prompt] != old[prompt] for prompt in PROMPTS)
    assert seen <= set(new.items()), "only answers of the new weights are there besides those of the old ones"
    assert seen
    assert all(now > then for now, then in zip(counts, before, strict=True))
    assert await all_answers(shared) == new
    assert "died" not in shared.printed
    wrong = await asyncio.to_thread(refused, shared, "reload", MODEL.format(2) + ",vocab=77")
    assert "only weights=N may differ" in wrong
    text, error = await end_of_long_stream(shared, "reload", MODEL.format(1), "--deadline", "0.2")
    assert await all_answers(shared) == old
    assert error == "weights_changed", "it is longer than the reload"
    assert text.startswith(new[PROMPTS[0]])


async def test_a_sleeping_worker_has_no_pages_and_is_not_missed(shared: Server) -> None:
    expected = await all_answers(shared)
    process = psutil.Process(shared.worker_pid("DecodeActor"))
    held = {each.pid: shared_bytes(each) for each in decode_workers(shared)}
    assert all(size >= SHARED_BYTES for size in held.values())
    async with under_load(shared, lambda prompt, text: text == expected[prompt]):
        await asyncio.to_thread(shared.command, "sleep", "decode-1")
        assert sorted(shared.epochs()) == ["decode-0", "prefill-0"]
        after = {each.pid: shared_bytes(each) for each in decode_workers(shared)}
        assert after.keys() == held.keys(), "its process stays"
        assert min(after.values()) == 0
        await asyncio.to_thread(shared.command, "wake", "decode-1")
        assert sorted(shared.epochs()) == ["decode-0", "decode-1", "prefill-0"]
    assert process.is_running()
    assert "last prefill" in await asyncio.to_thread(refused, shared, "sleep", "prefill-0")


def decode_workers(server: Server) -> list[psutil.Process]:
    return [each for each in server.processes() if "DecodeActor" in process_table.title_of(each)]


def shared_bytes(process: psutil.Process) -> int:
    """Bytes of the page pools that a process maps."""
    return sum(each.size for each in process.memory_maps(grouped=False) if "memfd:" in each.path)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_a_fine_tune_of_the_real_model_takes_its_place_under_load(smollm2_dir: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    shutil.copytree(smollm2_dir, tuned)
    tensors = load_file(tuned / "model.safetensors")
    tensors["model.layers.7.mlp.down_proj.weight"] *= -1
    save_file(tensors, tuned / "model.safetensors", metadata={"format": "pt"})
    flags = ("--served-model-name", "tiny", "--prefill", "2", "--decode", "2", "--kv-cache-memory", "128M")
    with starting(tmp_path, "--model", str(smollm2_dir), "--dtype", "float32", *flags) as server:
        await asyncio.to_thread(server.until_printed, "Ctrl-C ends it")
        old = await all_answers(server)
        seen: set[tuple[str, str]] = set()

        def is_right(prompt: str, text: str) -> bool:
            seen.add((prompt, text))
            return True

        async with under_load(server, is_right):
            await asyncio.to_thread(server.command, "reload", str(tuned), patience_s=300.0)
        new = await all_answers(server)
        assert new != old
        assert seen <= old.items() | new.items()
        held = {each.pid: each.memory_info().rss for each in decode_workers(server)}
        await asyncio.to_thread(server.command, "sleep", "decode-1")
        after = {each.pid: each.memory_info().rss for each in decode_workers(server)}
        print(
            f"memory of a decode worker before {max(held.values()) >> 20} MiB, asleep {min(after.values()) >> 20} MiB"
        )
        assert min(after.values()) < 0.6 * max(held.values())
        await asyncio.to_thread(server.command, "wake", "decode-1")
        assert await all_answers(server) == new
