"""What steps cost on cores that workers share, from a `twostroke profile` of a real host under load.

A profile says about every kernel when it ran, on how many threads, and what it did. So a kernel can be compared with
itself: alone on the host, during another worker's step, and with a borrowed core. These ratios give what each step
would have taken on an idle host. From that follows what its terms cost.
"""

from __future__ import annotations

import bisect
import gzip
import itertools
import json
import zlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tools.simulate.fleet.shape import CoreSpeeds, SharedCores
from twostroke.base.errors import ConfigError
from twostroke.scheduler.cost import StepCost

ALONE, BESIDE, BORROWED = range(3)
MOST_BETWEEN_US = 5000.0
"""A worker that begins its next step later than this had nothing to run."""
REPORTED_WEIGHT = 1.0
"""Weight of what the workers report of one term; a step has weight 1. Small, since a profile shows hundreds of
steps."""
USUAL_SPREAD = 1.5
"""Standard deviation of a normal distribution in median absolute deviations: rare stalls hardly change the latter."""
LEAST_KERNELS = 20
"""Kernels of one kind that must have run in a way to be compared."""
TERMS = ("step_s", "stream_s", "context_token_s", "prompt_step_s", "prompt_token_s", "prompt_pair_s")
LEAST_PROMPT_ROWS = 16
"""Rows from which on a kernel mostly computes prompts. A power of two."""
STEP_FACTS = ("streams", "context_tokens", "prompt_tokens", "prompt_pairs")
"""What a profile says of each step."""

Kind = tuple[str, int]
"""Name of a kernel and its rows, in powers of two."""


@dataclass(frozen=True, slots=True)
class ProfiledKernel:
    start_us: float
    end_us: float
    kind: Kind
    threads: int
    work: float

    @property
    def seconds(self) -> float:
        return (self.end_us - self.start_us) / 1e6


@dataclass(slots=True)
class ProfiledStep:
    start_us: float
    end_us: float
    facts: Mapping[str, float]
    kernels: list[ProfiledKernel] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FittedCores:
    cost: StepCost
    cores: SharedCores
    noise: float
    """Sigma of the log-normal noise of a step's length."""


def read_steps(path: Path) -> list[list[ProfiledStep]]:
    """Returns the steps of each worker of a trace that `twostroke profile` wrote. Raises ConfigError."""
    try:
        packed = path.read_bytes()
        return steps_of(json.loads(gzip.decompress(packed) if path.suffix == ".gz" else packed)["traceEvents"])
    except (OSError, EOFError, zlib.error, ValueError, LookupError, TypeError, AttributeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise ConfigError(f"--steps {path}: not a trace of `twostroke profile`: {why}", field="steps") from error


def steps_of(events: Iterable[Mapping[str, Any]]) -> list[list[ProfiledStep]]:
    """Returns the steps of each worker, in order, with their kernels; a worker's last may lack some."""
    steps: dict[int, list[ProfiledStep]] = defaultdict(list)
    for event in events:
        if event["ph"] != "X":
            continue
        start_us, end_us, facts = event["ts"], event["ts"] + event["dur"], event["args"]
        if event["name"] == "step":
            steps[event["pid"]].append(ProfiledStep(start_us, end_us, {name: facts[name] for name in STEP_FACTS}))
        elif event.get("cat") == "kernel" and steps[event["pid"]] and facts["rows"] > 0:
            kind = (event["name"], int(facts["rows"]).bit_length())
            work = facts["flops"] or facts["bytes"]
            steps[event["pid"]][-1].kernels.append(ProfiledKernel(start_us, end_us, kind, int(facts["threads"]), work))
    return [each for each in steps.values() if each]


def fitted_cores(workers: Sequence[list[ProfiledStep]], reported: StepCost) -> FittedCores:
    """Fits costs and speeds. Raises ConfigError where the profile shows too little for that.

    `reported` is what the workers say of their costs. It decides what steps that are all alike leave open: how their
    length is split over the terms.
    """
    modes = [_modes(steps, [other for other in workers if other is not steps]) for steps in workers]
    ran: dict[Kind, dict[int, list[ProfiledKernel]]] = defaultdict(lambda: defaultdict(list))
    for steps, step_modes in zip(workers, modes, strict=True):
        for step, kernel_modes in zip(steps, step_modes, strict=True):
            for kernel, mode in zip(step.kernels, kernel_modes, strict=True):
                ran[kernel.kind][mode].append(kernel)
    streams = _speeds({kind: by for kind, by in ran.items() if 2 ** kind[1] <= LEAST_PROMPT_ROWS})
    prompts = _speeds({kind: by for kind, by in ran.items() if 2 ** kind[1] > LEAST_PROMPT_ROWS})
    rows = [
        (step.facts, _alone_s(step, kernel_modes, prompts if step.facts["prompt_tokens"] else streams))
        for steps, step_modes in zip(workers, modes, strict=True)
        for step, kernel_modes in zip(steps, step_modes, strict=True)
    ]
    cost, noise = _cost_of(rows, reported)
    gaps_s = [gap_s for steps in workers for gap_s in _gaps_s(steps)]
    if not gaps_s:
        raise _shows_too_little("no worker ran one step right after another")
    every = [step for steps in workers for step in steps]
    cores = SharedCores(
        streams=_whole_steps(streams, [step for step in every if not step.facts["prompt_tokens"]]),
        prompts=_whole_steps(prompts, [step for step in every if step.facts["prompt_tokens"]]),
        between_s=median(gaps_s),
    )
    return FittedCores(cost, cores, noise)


def _whole_steps(kernels: CoreSpeeds, steps: Sequence[ProfiledStep]) -> CoreSpeeds:
    """Returns the speeds of whole steps: what is not in kernels takes as long with borrowed cores."""
    if not steps:  # of prompts there are some, since the costs were fitted
        raise _shows_too_little("no step has streams alone")
    taken_s = sum(step.end_us - step.start_us for step in steps) / 1e6
    share = sum(kernel.seconds for step in steps for kernel in step.kernels) / taken_s
    return replace(kernels, borrowed=1 - share * (1 - kernels.borrowed))


def _modes(steps: Sequence[ProfiledStep], others: Sequence[list[ProfiledStep]]) -> list[list[int]]:
    """Returns how each kernel of each step ran."""
    busy = sorted((step.start_us, step.end_us) for other in others for step in other)
    starts = [start for start, _ in busy]

    def mode(kernel: ProfiledKernel) -> int:
        if kernel.threads > 1:
            return BORROWED
        middle_us = (kernel.start_us + kernel.end_us) / 2
        latest = bisect.bisect_right(starts, middle_us) - 1
        return BESIDE if latest >= 0 and busy[latest][1] > middle_us else ALONE

    return [[mode(kernel) for kernel in step.kernels] for step in steps]


def _speeds(ran: Mapping[Kind, Mapping[int, Sequence[ProfiledKernel]]]) -> CoreSpeeds:
    """Compares each kind of kernel with itself; kinds count by the time that they take."""
    usual = CoreSpeeds()
    borrowed, beside = (_slowdown(ran, mode) for mode in (BORROWED, BESIDE))
    return CoreSpeeds(
        borrowed=usual.borrowed if borrowed is None else borrowed,
        beside=usual.beside if beside is None else max(1.0, beside),
    )


def _slowdown(ran: Mapping[Kind, Mapping[int, Sequence[ProfiledKernel]]], mode: int) -> float | None:
    """Returns how many times as long kernels took in this mode as alone; None where too few can be compared."""
    in_mode_s = alone_s = 0.0
    for by_mode in ran.values():
        alone, in_mode = by_mode.get(ALONE, ()), by_mode.get(mode, ())
        if min(len(alone), len(in_mode)) >= LEAST_KERNELS:
            work = sum(kernel.work for by in by_mode.values() for kernel in by)
            alone_s += work * _per_work_s(alone)
            in_mode_s += work * _per_work_s(in_mode)
    return in_mode_s / alone_s if alone_s else None


def _per_work_s(kernels: Sequence[ProfiledKernel]) -> float:
    return sum(kernel.seconds for kernel in kernels) / sum(kernel.work for kernel in kernels)


def _alone_s(step: ProfiledStep, modes: Sequence[int], speeds: CoreSpeeds) -> float:
    """Returns what the step would have taken on one thread of an idle host."""
    times = {ALONE: 1.0, BESIDE: speeds.beside, BORROWED: speeds.borrowed}
    taken_s = (step.end_us - step.start_us) / 1e6
    return taken_s + sum(
        kernel.seconds * (1 / times[mode] - 1) for kernel, mode in zip(step.kernels, modes, strict=True)
    )


def _cost_of(rows: Sequence[tuple[Mapping[str, float], float]], reported: StepCost) -> tuple[StepCost, float]:
    """Fits the terms by least squares of relative errors, none below 0. Returns the errors' usual size, too.

    Raises ConfigError where no step has streams, or none has prompt tokens.
    """
    for kind in ("streams", "prompt_tokens"):
        if not any(facts[kind] for facts, _ in rows):
            raise _shows_too_little(f"no step has {kind}")
    seconds = np.array([taken_s for _, taken_s in rows])
    terms = np.array([_quantities(facts) for facts, _ in rows]) / seconds[:, None]
    stated = np.array([asdict(reported)[name] for name in TERMS])
    known = REPORTED_WEIGHT * np.diag(1 / stated[stated > 0])
    terms = np.vstack((terms, np.zeros((len(known), len(TERMS)))))
    terms[len(rows) :, stated > 0] = known
    wanted = np.concatenate((np.ones(len(rows)), np.full(len(known), REPORTED_WEIGHT)))
    kept = [at for at in range(len(TERMS)) if terms[:, at].any()]
    while True:
        scale = np.abs(terms[:, kept]).max(axis=0)
        found, *_ = np.linalg.lstsq(terms[:, kept] / scale, wanted, rcond=None)
        if (found >= 0).all():
            break
        del kept[int(np.argmin(found))]
    errors = terms[: len(rows), kept] @ (found / scale) - 1
    cost = StepCost(**{TERMS[at]: float(each) for at, each in zip(kept, found / scale, strict=True)})
    return cost, USUAL_SPREAD * float(np.median(np.abs(errors)))


def _shows_too_little(what: str) -> ConfigError:
    return ConfigError(f"the profile shows too little: {what}", field="steps")


def _quantities(facts: Mapping[str, float]) -> tuple[float, ...]:
    """Returns what each of `TERMS` is multiplied by."""
    has_streams, has_prompt = float(facts["streams"] > 0), float(facts["prompt_tokens"] > 0)
    return (
        has_streams, facts["streams"], has_streams * facts["context_tokens"],
        has_prompt, facts["prompt_tokens"], facts["prompt_pairs"],
    )  # fmt: skip


def _gaps_s(steps: Sequence[ProfiledStep]) -> list[float]:
    """Returns the seconds between steps of a worker that had more to run."""
    gaps_us = [later.start_us - earlier.end_us for earlier, later in itertools.pairwise(steps)]
    return [gap_us / 1e6 for gap_us in gaps_us if 0 <= gap_us < MOST_BETWEEN_US]
