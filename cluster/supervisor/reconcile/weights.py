"""Decides, while a fleet changes its weights, which worker is next and when new requests go to the new weights. Pure.

Workers load the new weights one at a time. Until half of the workers of each role have them, requests go to the others.
Then new requests go to the workers with the new weights, and the rest follows. What was begun with the old weights ends
with them, if it ends within the drain's deadline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cluster.supervisor.actors import Serving
from cluster.values.desired_state import Checkpoint, Weights
from twostroke.base.ids import Epoch
from twostroke.config import Role


@dataclass(frozen=True, slots=True)
class LoadedWorker:
    """A worker that should serve, and what it serves now."""

    worker_id: str
    role: Role
    checkpoint: Checkpoint | None
    """None while it does not serve."""
    has_no_room: bool = False
    """Whether Ray has had no node for its process for so long that others continue. It will begin with the wanted
    weights."""


def has_enough(workers: Sequence[LoadedWorker], role: Role, wanted: Checkpoint) -> bool:
    """Returns whether half of a role's workers have these weights, or none of them serves others."""
    checkpoints = [each.checkpoint for each in workers if each.role is role]
    new = checkpoints.count(wanted)
    old = len(checkpoints) - new - checkpoints.count(None)
    return 2 * new >= len(checkpoints) or (old == 0 and (new > 0 or role is Role.PREFILL))


def weights_now(workers: Sequence[LoadedWorker], weights: Weights) -> Weights:
    """Returns the weights with what new requests go to from now on."""
    decode = [each.checkpoint for each in workers if each.role is Role.DECODE]
    is_needed = weights.wanted in decode and weights.routed not in decode  # nobody else generates
    if is_needed or all(has_enough(workers, role, weights.wanted) for role in (Role.PREFILL, Role.DECODE)):
        return replace(weights, routed=weights.wanted)
    return weights


def weights_after_failure(workers: Sequence[LoadedWorker], weights: Weights) -> Weights:
    """Returns the weights where a worker cannot serve the wanted ones: those before, if others still have them.

    Requests that go to the new weights already go back as in a reload. That is tried once, in one direction.
    """
    if weights.wanted != weights.routed:
        is_going_back = weights.wanted.number < weights.routed.number
        return weights if is_going_back else replace(weights, wanted=weights.routed)
    has_old = any(each.checkpoint == weights.before for each in workers)
    return replace(weights, wanted=weights.before) if has_old else weights


def next_to_reload(workers: Sequence[LoadedWorker], weights: Weights) -> str | None:
    """Returns the worker that should begin anew now; None while one is on its way, or all have the weights."""
    if any(each.checkpoint is None and not each.has_no_room for each in workers):
        return None
    held_back = last_decode_worker(workers)
    outdated = [
        each
        for each in workers
        if each.checkpoint != weights.wanted and not each.has_no_room and each.worker_id != held_back
    ]
    if weights.wanted != weights.routed:
        outdated = [each for each in outdated if not has_enough(workers, each.role, weights.wanted)]
    outdated.sort(key=lambda each: each.role is Role.DECODE)  # a decode worker computes prompts meanwhile
    return outdated[0].worker_id if outdated else None


def last_decode_worker(workers: Sequence[LoadedWorker]) -> str | None:
    """Returns the only decode worker that serves, while Ray has no node for others: it must not begin anew."""
    decode = [each for each in workers if each.role is Role.DECODE]
    serving = [each.worker_id for each in decode if each.checkpoint is not None]
    return serving[0] if len(serving) == 1 and any(each.has_no_room for each in decode) else None


def is_changing(workers: Iterable[LoadedWorker], weights: Weights) -> bool:
    """Returns whether workers have to begin anew, or requests have to go elsewhere, before a reload is over."""
    loaded = (each.checkpoint for each in workers)
    return weights.wanted != weights.routed or any(each not in (None, weights.wanted) for each in loaded)


def routed_fingerprint(serving: Iterable[Serving], weights: Weights) -> str:
    """Returns the fingerprint of the workers that new requests go to; empty before the first reload, or without any.

    A worker that restarted after its directory was written anew, before the reload, has other weights under the same
    checkpoint. So what most decode workers have counts, among equals what the fewest restarts have led to.
    """
    if not weights.latest:
        return ""
    routed = [each for each in serving if each.checkpoint == weights.routed]
    routed.sort(key=lambda each: Epoch.parse(each.epoch).incarnation)
    generating = [each.fingerprint for each in routed if each.role is Role.DECODE]
    counted = Counter(generating or [each.fingerprint for each in routed]).most_common(1)
    return counted[0][0] if counted else ""
