"""A load's name taken apart: one run, or one after the other over the same prompts. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from twostroke.base.errors import ConfigError

PER_LANE = 2
FEWEST = 6
"""Requests of a closed loop that does not say how many: enough for a median, and every lane is used again."""
PER_RATE_S = 30
"""Seconds of an open loop that does not say how many."""

MOST = 1_000_000
"""Largest number of a load: more is a mistake, and would fill the memory with plans."""

_FORMS = (
    re.compile(r"(?P<prompt>\d+)x(?P<output>\d+)@c(?P<lanes>\d+)(x(?P<requests>\d+))?"),
    re.compile(r"(?P<prompt>\d+)x(?P<output>\d+)@r(?P<rate>\d+(\.\d+)?)(x(?P<requests>\d+))?"),
    re.compile(r"burst:(?P<prompt>\d+)x(?P<output>\d+)x(?P<requests>\d+)"),
    re.compile(r"shared:(?P<prompt>\d+)/(?P<shared>\d+)x(?P<output>\d+)x(?P<requests>\d+)"),
)
_CHATS = re.compile(
    r"chats:(?P<chats>\d+)x(?P<turns>\d+)/(?P<systems>\d+):(?P<system>\d+)\+(?P<user>\d+)x(?P<output>\d+)@c(?P<lanes>\d+)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chats:
    """Parallel conversations: each turn repeats all that was said in its chat before.

    Answers are taken to be as long as asked for. Prompts repeat planned tokens in their place, so that they are the
    same for every server.
    """

    count: int
    turns: range
    """The turns that are sent, of all chats, one turn after the other."""
    system_prompts: int
    """Different first parts; chats have them in turns."""
    system_tokens: int
    user_tokens: int
    answer_tokens: int

    def prompt_tokens(self, turn: int) -> int:
        return self.system_tokens + (turn + 1) * self.user_tokens + turn * self.answer_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioLoad:
    """One run's requests: all alike in length, or turns of chats, which grow."""

    name: str
    prompt_tokens: int
    output_tokens: int
    requests: int
    concurrency: int | None
    rate: float | None
    """Requests per second of an open loop, where `concurrency` is None."""
    shared_tokens: int = 0
    first: int = 0
    """Number of the first request's own part: what runs later over the same prefix must not repeat it."""
    chats: Chats | None = None
    """The turns that are sent, where the requests are turns of chats; `prompt_tokens` is the longest prompt."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """What one endpoint is put through in one turn."""

    name: str
    loads: tuple[ScenarioLoad, ...]


def parse_scenario(text: str) -> Scenario:
    """Raises ConfigError."""
    found = next((match for form in (*_FORMS, _CHATS) if (match := form.fullmatch(text))), None)
    if found is None:
        raise ConfigError(
            f"--load {text[:80]!r} is none of PxO@cC[xN], PxO@rR[xN], burst:PxOxN, shared:P/SxOxN, "
            "chats:NxT/G:S+UxO@cC",
            field="load",
        )
    parts = {key: float(value) for key, value in found.groupdict().items() if value is not None}
    if not all(0 < number <= MOST for number in parts.values()):
        raise ConfigError(f"--load {text[:80]}: every number must be more than 0 and at most {MOST:,}", field="load")
    if found.re is _CHATS:
        return _chats(text, {key: int(value) for key, value in parts.items()})
    load = _load(text, parts)
    if not load.shared_tokens:
        return Scenario(text, (load,))
    if load.shared_tokens >= load.prompt_tokens:
        raise ConfigError(
            f"--load {text}: {load.shared_tokens} tokens in common leave none of its own to a prompt of "
            f"{load.prompt_tokens}",
            field="load",
        )
    stages = (
        replace(load, name=f"{text} {stage}", first=number * load.requests)
        for number, stage in enumerate(("cold", "warm"))
    )
    return Scenario(text, tuple(stages))


def _chats(name: str, parts: dict[str, int]) -> Scenario:
    """Returns all first turns as one run and all later turns as another: what these reuse was sent by then."""
    if parts["chats"] * parts["turns"] > MOST:
        raise ConfigError(
            f"--load {name}: {parts['chats']} chats of this many turns are more than {MOST:,}", field="load"
        )
    if parts["turns"] < 2:
        raise ConfigError(f"--load {name}: a chat of one turn has no later ones to measure", field="load")
    whole = Chats(
        count=parts["chats"],
        turns=range(parts["turns"]),
        system_prompts=parts["systems"],
        system_tokens=parts["system"],
        user_tokens=parts["user"],
        answer_tokens=parts["output"],
    )
    stages = (("first turns", range(1)), ("later turns", range(1, parts["turns"])))
    loads = (
        ScenarioLoad(
            name=f"{name} {stage}",
            prompt_tokens=whole.prompt_tokens(turns[-1]),
            output_tokens=whole.answer_tokens,
            requests=whole.count * len(turns),
            concurrency=parts["lanes"],
            rate=None,
            chats=replace(whole, turns=turns),
        )
        for stage, turns in stages
    )
    return Scenario(name, tuple(loads))


def _load(name: str, parts: dict[str, float]) -> ScenarioLoad:
    rate, lanes, requests = parts.get("rate"), parts.get("lanes"), parts.get("requests")
    if requests is None:
        requests = max(FEWEST, PER_LANE * lanes if lanes else (rate or 0.0) * PER_RATE_S)
    at_once = None if rate else int(lanes or requests)
    return ScenarioLoad(
        name=name,
        prompt_tokens=int(parts["prompt"]),
        output_tokens=int(parts["output"]),
        requests=round(requests),
        concurrency=at_once,
        rate=rate,
        shared_tokens=int(parts.get("shared", 0)),
    )
