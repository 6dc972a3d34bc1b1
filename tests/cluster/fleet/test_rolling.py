"""Every process of a cluster begins a new life while clients use it: none of them notices."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from openai import AsyncOpenAI

from tests.cluster.served import CHECKOUT, Server, alive, starting

CLIENTS = 3
PROMPTS = [f"{number} {'word ' * (20 + 7 * number)}" for number in range(CLIENTS)]
MODEL = "paced:step_ms=5,max_model_len=2048"
LENGTHS = (20, 150)
ROUND_S = 400.0
"""For every process to begin a new life, one by one; each may drain for half a minute first, and load a model."""


@asynccontextmanager
async def clients(server: Server) -> AsyncIterator[list[AsyncOpenAI]]:
    """Some of each router; none of them tries again."""
    endpoints = [router["http"] for router in json.loads(server.command("status", "--json"))["routers"]]
    opened = [
        AsyncOpenAI(base_url=f"http://{endpoint}/v1", api_key="none", max_retries=0)
        for endpoint in itertools.islice(itertools.cycle(endpoints), CLIENTS)
    ]
    yield opened
    for client in opened:
        await client.close()


async def answer(client: AsyncOpenAI, prompt: str, tokens: int, is_stream: bool) -> str:
    fixed = {"temperature": 0, "seed": 1, "max_tokens": tokens, "extra_body": {"ignore_eos": True}}
    if not is_stream:
        done = await client.completions.create(model="tiny", prompt=prompt, **fixed)
        return done.choices[0].text
    stream = await client.completions.create(model="tiny", prompt=prompt, stream=True, **fixed)
    return "".join([chunk.choices[0].text async for chunk in stream])


async def roll(server: Server, *, times: int = 1) -> None:
    """Every process begins a new life, several times over, while all clients get the answers that they had before."""
    await asyncio.to_thread(server.until_printed, "Ctrl-C ends it")
    before = server.epochs()
    async with clients(server) as opened:
        kinds = [(prompt, tokens) for prompt in PROMPTS for tokens in LENGTHS]
        answers = await asyncio.gather(*(answer(opened[0], prompt, tokens, False) for prompt, tokens in kinds))
        expected = dict(zip(kinds, answers, strict=True))
        is_over = asyncio.Event()

        async def use(client: AsyncOpenAI, prompt: str) -> None:
            for count in itertools.count():
                if is_over.is_set() and count > 2:
                    return
                tokens = LENGTHS[count % len(LENGTHS)]
                assert await answer(client, prompt, tokens, count % 3 > 0) == expected[prompt, tokens]

        async with asyncio.TaskGroup() as load:
            for client, prompt in zip(opened, PROMPTS, strict=True):
                load.create_task(use(client, prompt))
            for _ in range(times):
                await asyncio.to_thread(server.command, "restart", "--all", patience_s=ROUND_S)
            is_over.set()
    assert "died" not in server.printed
    assert sorted(server.epochs()) == sorted(before)
    assert [len(epochs(server, worker)) for worker in before] == [1 + times] * len(before)


def epochs(server: Server, worker: str) -> set[str]:
    """Epochs. A restarted supervisor tells of those that go on once more."""
    return set(re.findall(rf"{worker} serves at \S+ \(epoch (\S+)\)", server.printed))


async def test_a_rolling_restart_of_every_process_fails_no_request_and_changes_no_token_and_ctrl_c_ends_all(
    tmp_path: Path,
) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    example = (CHECKOUT / "deploy/examples/one-machine.yaml").read_text()  # two decode workers
    own = f"{MODEL}\n  served_model_name: tiny"
    for usual, here in (("smollm2-135m", own), ("8000", "0"), ("50051", "0"), ("512MiB", "4MiB")):
        assert usual in example
        example = example.replace(usual, here)
    with starting(tmp_path, file=example) as server:
        await roll(server)
        processes = server.processes()
        assert server.end(signal.SIGINT) == 0
        assert "\x1b" not in server.printed, "plain lines where there is no terminal"
        assert not alive(processes)
        assert not list(server.temporary.iterdir())
    assert set(os.listdir("/dev/shm")) == shared_memory


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("smollm2_dir")
async def test_rolling_restarts_with_the_real_model(tmp_path: Path) -> None:
    flags = ["--dtype", "float32", "--decode", "2", "--routers", "2", "--kv-cache-memory", "256M"]
    torch_keeps_files_in = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor")}
    with starting(tmp_path, *flags, "--served-model-name", "tiny", **torch_keeps_files_in) as server:
        await roll(server, times=3)
