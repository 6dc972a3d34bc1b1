"""A load's name taken apart: one run, or a cold one and a warm one after it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from twostroke.errors import ConfigError

PER_LANE = 2
FEWEST = 6
"""Requests of a closed loop that does not say how many: enough for a median, and every lane is used again."""
PER_RATE_S = 30
"""Seconds of an open loop that does not say how many."""

_FORMS = (
    re.compile(r"(?P<prompt>\d+)x(?P<output>\d+)@c(?P<lanes>\d+)(x(?P<requests>\d+))?"),
    re.compile(r"(?P<prompt>\d+)x(?P<output>\d+)@r(?P<rate>\d+(\.\d+)?)(x(?P<requests>\d+))?"),
    re.compile(r"burst:(?P<prompt>\d+)x(?P<output>\d+)x(?P<requests>\d+)"),
    re.compile(r"shared:(?P<prompt>\d+)/(?P<shared>\d+)x(?P<output>\d+)x(?P<requests>\d+)"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScenarioLoad:
    """One run's requests: all alike in length."""

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


@dataclass(frozen=True, slots=True)
class Scenario:
    """What one endpoint is put through in one turn."""

    name: str
    loads: tuple[ScenarioLoad, ...]


def parse_scenario(text: str) -> Scenario:
    """Raises ConfigError."""
    found = next((match for form in _FORMS if (match := form.fullmatch(text))), None)
    if found is None:
        raise ConfigError(
            f"--load {text!r} is none of PxO@cC[xN], PxO@rR[xN], burst:PxOxN, shared:P/SxOxN", field="load"
        )
    parts = {key: float(value) for key, value in found.groupdict().items() if value is not None}
    if not all(parts.values()):
        raise ConfigError(f"--load {text}: every number must be positive", field="load")
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
