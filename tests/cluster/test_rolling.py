"""Every process of a cluster begins a new life while clients use it: none of them notices."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from openai import AsyncOpenAI

from tests.cluster.served import SMALL, Server, starting

CLIENTS = 6
PROMPTS = [f"{number} {'word ' * (20 + 7 * number)}" for number in range(CLIENTS)]
MODEL = "paced:step_ms=5,max_model_len=2048"
LENGTHS = (20, 150)


@asynccontextmanager
async def clients(server: Server) -> AsyncIterator[list[AsyncOpenAI]]:
    """Some of each router; none of them tries again."""
    doors = [router["http"] for router in json.loads(server.command("status", "--json"))["routers"]]
    opened = [
        AsyncOpenAI(base_url=f"http://{door}/v1", api_key="none", max_retries=0)
        for door in itertools.islice(itertools.cycle(doors), CLIENTS)
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


async def test_a_rolling_restart_of_every_process_fails_no_request_and_changes_no_token(tmp_path: Path) -> None:
    flags = ["--prefill", "2", "--decode", "2", "--routers", "2", "--kv-cache-memory", "4M"]
    with starting(tmp_path, *SMALL, "--model", MODEL, *flags) as server:
        await asyncio.to_thread(server.until_printed, "Ctrl-C ends it")
        before = server.epochs()
        async with clients(server) as opened:
            expected = {
                (prompt, tokens): await answer(opened[0], prompt, tokens, False)
                for prompt in PROMPTS
                for tokens in LENGTHS
            }
            over = asyncio.Event()

            async def use(client: AsyncOpenAI, prompt: str) -> int:
                for count in itertools.count():
                    if over.is_set():
                        return count
                    tokens = LENGTHS[count % 2]
                    assert await answer(client, prompt, tokens, count % 3 > 0) == expected[prompt, tokens]
                raise AssertionError

            async with asyncio.TaskGroup() as load:
                using = [load.create_task(use(*each)) for each in zip(opened, PROMPTS, strict=True)]
                print(await asyncio.to_thread(server.command, "restart", "--all"))
                over.set()
        print([task.result() for task in using])
        after = server.epochs()
        assert sorted(after) == sorted(before)
        assert all(int(after[worker].partition(".")[0]) > int(before[worker].partition(".")[0]) for worker in before)
