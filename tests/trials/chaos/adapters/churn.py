"""Clients that ask for adapters by name, beside an operator who loads, replaces and unloads them."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from tests.trials.chaos.adapters.calls import Answer, Calls
from tests.trials.chaos.adapters.history import History

CLIENTS: Final = 12
BASE_SHARE: Final = 0.1
"""Share of the requests that are for the model alone."""
UNSERVED_SHARE: Final = 0.05
"""Share of the requests for names that nothing is served under at the moment."""

Prompt = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """What is played with."""

    base: str
    """The name of the model alone, and of its answers among the expected ones."""
    names: Sequence[str]
    served: int
    """How many of the names lead to an adapter at any time, but for one that is being changed."""
    versions: Mapping[str, Callable[[Path], object]]
    """What writes a version into a folder."""
    expected: Mapping[tuple[str, Prompt], tuple[int, ...]]
    """The answer of each version, the model alone included, to each prompt."""
    folders: Path
    """Folder in which each name has a folder, which is overwritten when the name is loaded again."""

    @property
    def prompts(self) -> list[Prompt]:
        return sorted({prompt for _, prompt in self.expected})


@dataclass(slots=True)
class Seen:
    answers: int = 0
    of_base: int = 0
    not_found: int = 0
    """Requests for a name that led to nothing, which were told so."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    loads: int = 0
    replacements: int = 0
    unloads: int = 0
    slowest_s: float = 0.0
    """The longest time from a request to the end of its answer."""
    wrong: list[str] = field(default_factory=list)


class Churn:
    def __init__(self, stage: Stage, calls: Calls, seed: int, *, pause_s: float = 1.0) -> None:
        """`pause_s`: about the time between two rounds of one load, one replacement and one unload."""
        self._stage = stage
        self._calls = calls
        self._pause_s = pause_s
        self._draw = random.Random(seed)
        self._seed = seed
        self._history = History()
        self._threads = ThreadPoolExecutor(CLIENTS + 1)
        self.seen = Seen()

    async def play(self, seconds: float, meanwhile: Callable[[], Awaitable[None]] | None = None) -> Seen:
        """Returns what was seen. `meanwhile` runs beside the clients."""
        for name in self._stage.names:
            self._history.changing(name, None, 0.0)
        for name in self._stage.names[: self._stage.served]:
            await self._load(name)
        until_s = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(self._operate(until_s))
            for number in range(CLIENTS):
                group.create_task(self._ask_on(random.Random(self._seed * CLIENTS + number), until_s))
            if meanwhile is not None:
                await meanwhile()
        return self.seen

    async def unload_all(self) -> None:
        for name in self._names(is_served=True):
            await self._unload(name)

    async def _operate(self, until_s: float) -> None:
        """One load, one replacement and one unload at a time, in an order of their own each time."""
        while time.monotonic() < until_s:
            begun_s = time.monotonic()
            steps = [self._load_one, self._replace_one, self._unload_one]
            for step in self._draw.sample(steps, len(steps)):
                await step()
            await asyncio.sleep(max(0.0, begun_s + self._pause_s - time.monotonic()))

    async def _load_one(self) -> None:
        await self._load(self._draw.choice(self._names(is_served=False)))
        self.seen.loads += 1

    async def _replace_one(self) -> None:
        await self._load(self._draw.choice(self._names(is_served=True)), in_place=True)
        self.seen.replacements += 1

    async def _unload_one(self) -> None:
        await self._unload(self._draw.choice(self._names(is_served=True)))
        self.seen.unloads += 1

    async def _load(self, name: str, *, in_place: bool = False) -> None:
        """Loads another version than the last from the same folder: its path says nothing about what is in it."""
        others = sorted(self._stage.versions.keys() - {self._history.latest(name)})
        version, folder = self._draw.choice(others), self._stage.folders / name
        self._stage.versions[version](folder)
        await self._change(name, version, partial(self._calls.load, name, str(folder), in_place=in_place))

    async def _unload(self, name: str) -> None:
        await self._change(name, None, partial(self._calls.unload, name))

    async def _change(self, name: str, version: str | None, change: Callable[[], None]) -> None:
        self._history.changing(name, version, time.monotonic())
        await self._in_thread(change)
        self._history.changed(name, time.monotonic())

    async def _ask_on(self, draw: random.Random, until_s: float) -> None:
        while time.monotonic() < until_s:
            name, prompt, from_s = self._drawn_name(draw), draw.choice(self._stage.prompts), time.monotonic()
            answer: Answer = await self._in_thread(partial(self._calls.ask, name, prompt))
            self._note(name, prompt, answer, from_s, time.monotonic())

    def _drawn_name(self, draw: random.Random) -> str:
        kind = draw.random()
        if kind < BASE_SHARE:
            return self._stage.base
        return draw.choice(self._names(is_served=kind >= BASE_SHARE + UNSERVED_SHARE))

    def _note(self, name: str, prompt: Prompt, answer: Answer, from_s: float, to_s: float) -> None:
        seen, is_base = self.seen, name == self._stage.base
        possible = {name} if is_base else self._history.possible(name, from_s, to_s)
        if answer.status == 404 and "model_not_found" in answer.error and None in possible:
            seen.not_found += 1
            return
        right = {self._stage.expected[version, prompt] for version in possible if version is not None}
        if answer.status != 200 or answer.tokens not in right:
            shown = answer.error[:200] or answer.tokens
            seen.wrong.append(f"{name} may have been {sorted(map(str, possible))}: {answer.status} {shown}")
            return
        seen.answers += 1
        seen.of_base += is_base
        seen.prompt_tokens += len(prompt)
        seen.cached_tokens += answer.cached_tokens
        seen.slowest_s = max(seen.slowest_s, to_s - from_s)

    def _names(self, *, is_served: bool) -> list[str]:
        return [name for name in self._stage.names if (self._history.latest(name) is not None) == is_served]

    async def _in_thread(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
