"""Chats that go on side by side: each turn repeats what was said before, so that it lies in a cache somewhere."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.cluster.processes import Client

CHATS, TURNS, SYSTEM_PROMPTS = 8, 3, 2
SYSTEM, SAID, ANSWER = 96, 48, 16
"""Tokens of a system prompt, of what a user says in a turn, and of an answer."""
AT_ONCE = 2


@dataclass(frozen=True, slots=True)
class Turn:
    chat: int
    turn: int
    tokens: tuple[int, ...]
    first_token_s: float
    cached_tokens: int


async def talk(address: str, *, chats: int = CHATS, turns: int = TURNS) -> list[Turn]:
    """All turns of all chats at a router: every chat's first one, then every chat's second one, and so on."""
    draws, at_once, client = random.Random(1), asyncio.Semaphore(AT_ONCE), Client(address)
    systems = [_words(draws, SYSTEM) for _ in range(SYSTEM_PROMPTS)]
    saying = [[_words(draws, SAID) for _ in range(CHATS)] for _ in range(TURNS)]
    histories = [list(systems[chat % SYSTEM_PROMPTS]) for chat in range(chats)]
    took: list[Turn] = []

    async def ask(chat: int, turn: int) -> None:
        async with at_once:
            histories[chat] += saying[turn][chat]
            answered = await _ask(client, histories[chat], chat, turn)
            histories[chat] += answered.tokens
            took.append(answered)

    for turn in range(turns):
        await asyncio.gather(*(ask(chat, turn) for chat in range(chats)))
    await client.close()
    return sorted(took, key=lambda each: (each.chat, each.turn))


def identical(expected: Sequence[Turn], got: Sequence[Turn]) -> int:
    """Returns how many answers have the tokens that were expected."""
    known = {(each.chat, each.turn): each.tokens for each in expected}
    return sum(known[each.chat, each.turn] == each.tokens for each in got)


async def _ask(client: Client, prompt: Sequence[int], chat: int, turn: int) -> Turn:
    tokens: list[int] = []
    cached, started_s, first_s = 0, time.monotonic(), 0.0
    async for response in client.stream(prompt, max_tokens=ANSWER, ignore_eos=True, temperature=0.8, seed=chat):
        if response.token_ids:
            first_s = first_s or time.monotonic()
            tokens += response.token_ids
        if response.HasField("usage"):
            cached = response.usage.cached_tokens
    return Turn(chat, turn, tuple(tokens), first_s - started_s, cached)


def _words(draws: random.Random, count: int) -> list[int]:
    return [draws.randrange(100, 250) for _ in range(count)]
