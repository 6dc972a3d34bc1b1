"""From what was seen to what is wrong and what to do about it: a pure function."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from tools.doctor.facts import Facts, WorkerFacts
from twostroke.config import Role

SILENCE_S = 3.0
"""Several heartbeats of a worker's event log: as long as the router waits before it gives a silent worker no work."""
BLOCK_SIZE_FIELD = "block_size"
"""The name of the block size in fingerprints."""
SAME_FILES = "give router and workers the same model directory: tokenizer and weights belong together"


class Cause(enum.StrEnum):
    FINE = "fine"
    UNHEALTHY = "unhealthy worker"
    FINGERPRINT = "fingerprint"
    BLOCK_SIZE = "block size"
    FORM = "form"
    PARTIAL_BLOCK = "partial block"
    TOKENIZER = "tokenizer"
    TEMPLATE = "template"
    SALT = "salt"
    STALE_INDEX = "stale index"
    EVICTION = "eviction"
    POLICY = "policy"
    UNEXPLAINED = "unexplained"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    cause: Cause
    finding: str
    remedy: str
    """Empty where nothing is wrong."""

    @property
    def is_fine(self) -> bool:
        return self.cause is Cause.FINE


def diagnose(facts: Facts) -> Diagnosis:
    """Returns the first cause that is found. Causes that explain others are looked for first: a worker that does not
    serve explains why nothing was reused there.
    """
    return next(verdict for check in CHECKS if (verdict := check(facts)) is not None)


def _failed(facts: Facts) -> Diagnosis | None:
    failure = facts.first.failure or facts.second.failure
    if failure is None:
        return None
    which = "first" if facts.first.failure else "second"
    return Diagnosis(
        Cause.UNHEALTHY,
        f"the {which} chat was not answered: {failure}",
        "`twostroke status` shows who serves; the logs of whoever does not say why",
    )


def _fingerprint(facts: Facts) -> Diagnosis | None:
    for worker in facts.workers:
        if not worker.fingerprint or worker.fingerprint == facts.fingerprint:
            continue
        differing = _differing(facts.fingerprint, worker.fingerprint)
        is_block_size = [name for name, _, _ in differing] == [BLOCK_SIZE_FIELD]
        told = ", ".join(f"{name} {other} instead of {fleet}" for name, fleet, other in differing)
        return Diagnosis(
            Cause.BLOCK_SIZE if is_block_size else Cause.FINGERPRINT,
            f"{worker.worker} does not hold the fleet's KV and gets no work: {told}",
            "start it with the flags of the others: --block-size"
            if is_block_size
            else "start it with the model and the flags of the others, or restart the router with the new fleet",
        )
    return None


def _form(facts: Facts) -> Diagnosis | None:
    """Checks page forms: prefill workers store decode workers' form, or the one that it is converted from."""
    decode, source = facts.kv_form, facts.kv_form.source
    for worker in facts.workers:
        fitting = {str(decode)} if worker.role == Role.DECODE or source is None else {str(source)}
        if worker.kv_form and worker.kv_form not in fitting:
            return Diagnosis(
                Cause.FORM,
                f"{worker.worker} stores pages as {worker.kv_form}, the fleet needs {fitting.pop()}: no work for it",
                "start it with the fleet's --kv-format, --prefill-kv-format and --decode-kv-format",
            )
    return None


def _differing(fleet: str, other: str) -> list[tuple[str, str, str]]:
    """Returns (field, fleet's value, the other's) where two fingerprints part."""
    ours, theirs = _fields(fleet), _fields(other)
    names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
    return [(name, ours.get(name, "none"), theirs.get(name, "none")) for name in names]


def _fields(fingerprint: str) -> dict[str, str]:
    """Returns the fields of "a=1;b=2"; a fingerprint without fields is itself the only one."""
    pairs = (part.partition("=") for part in fingerprint.split(";"))
    return {name: value for name, is_pair, value in pairs if is_pair} or {"fingerprint": fingerprint}


def _unhealthy(facts: Facts) -> Diagnosis | None:
    for worker in facts.workers:
        if worker.state != "serving":
            finding = f"{worker.worker} is {worker.state}"
        elif worker.event_age_s is not None and worker.event_age_s > SILENCE_S:
            finding = f"{worker.worker} has been silent for {worker.event_age_s:.1f} s"
        else:
            continue
        return Diagnosis(
            Cause.UNHEALTHY,
            f"{finding}: what it holds is not reused",
            "its log says why; the supervisor starts a dead worker again, a stopped one (kill -STOP) waits for -CONT",
        )
    if not any(worker.role == "decode" for worker in facts.workers):
        return Diagnosis(Cause.UNHEALTHY, "no decode worker is there", "`twostroke status` shows who is")
    return None


def _partial_block(facts: Facts) -> Diagnosis | None:
    tokens = len(facts.second.tokens)
    if tokens >= facts.block_size:
        return None
    return Diagnosis(
        Cause.PARTIAL_BLOCK,
        f"the chat has {tokens} tokens and a block {facts.block_size}: only full blocks are kept",
        "send longer prompts, or serve with a smaller --block-size",
    )


def _fine(facts: Facts) -> Diagnosis | None:
    full, tokens = _full_blocks(facts), len(facts.second.tokens)
    reused = _reused_blocks(facts)
    if reused < full:
        return None
    rest = tokens - full * facts.block_size
    tail = f"; the rest ({_plural(rest, 'token')}) fills no block and is always computed" if rest else ""
    return Diagnosis(
        Cause.FINE, f"all {_plural(full, 'full block')} of {tokens} tokens were reused the second time{tail}", ""
    )


def _vocabulary(facts: Facts) -> Diagnosis | None:
    largest = max((*facts.first.tokens, *facts.second.tokens), default=0)
    if largest < facts.vocab_size:
        return None
    finding = f"the router's tokenizer makes token {largest}, and the model knows {facts.vocab_size} tokens"
    return Diagnosis(Cause.TOKENIZER, finding, SAME_FILES)


def _tokenizer(facts: Facts) -> Diagnosis | None:
    for chat in (facts.first, facts.second):
        if chat.prompt_tokens != len(chat.tokens) and facts.first.tokens == facts.second.tokens:
            finding = f"Tokenize makes {len(chat.tokens)} tokens of the chat, and the request had {chat.prompt_tokens}"
            return Diagnosis(Cause.TOKENIZER, finding, SAME_FILES)
    return None


def _template(facts: Facts) -> Diagnosis | None:
    common = _common(facts.first.tokens, facts.second.tokens)
    if common == max(len(facts.first.tokens), len(facts.second.tokens)):
        return None
    return Diagnosis(
        Cause.TEMPLATE,
        f"the same chat became other tokens the second time, from token {common} of {len(facts.second.tokens)} on: "
        f"{_plural(common // facts.block_size, 'block')} can be shared, {_plural(_reused_blocks(facts), 'was', 'were')}"
        " reused",
        "take what varies (a date, a time, a counter) out of the chat template, or move it to its end",
    )


def _salt(facts: Facts) -> Diagnosis | None:
    if facts.first.salt == facts.second.salt:
        return None
    return Diagnosis(
        Cause.SALT,
        f"cache_salt was {facts.first.salt!r} and then {facts.second.salt!r}: blocks of different salts never meet",
        "send one cache_salt with all requests that may share a cache",
    )


def _stale_index(facts: Facts) -> Diagnosis | None:
    for worker in facts.workers:
        if worker.own_sequence is None or worker.own_sequence <= (worker.index_sequence or 0):
            continue
        return Diagnosis(
            Cause.STALE_INDEX,
            f"{worker.worker} has published {_plural(worker.own_sequence, 'event batch', 'event batches')}, and the "
            f"router's index knows {worker.index_sequence or 0}",
            "see twostroke_event_gaps_total and twostroke_event_divergences_total of the router; restarting the "
            "router rebuilds its index",
        )
    return None


def _eviction(facts: Facts) -> Diagnosis | None:
    lost = max(facts.workers, key=lambda worker: worker.stored_blocks - worker.held_blocks)
    if lost.stored_blocks <= lost.held_blocks or _held(facts.workers) > _reused_blocks(facts):
        return None
    return Diagnosis(
        Cause.EVICTION,
        f"{lost.worker} had {_plural(lost.stored_blocks, 'block')} of the chat and kept {lost.held_blocks} until the "
        "second time: its pages were needed for others",
        "give workers more --kv-cache-memory, or add workers",
    )


def _policy(facts: Facts) -> Diagnosis | None:
    held, reused = _held(facts.workers), _reused_blocks(facts)
    if held <= reused:
        return None
    holder = max(facts.workers, key=lambda worker: worker.held_blocks)
    finding = f"{holder.worker} held {_plural(held, 'block')} of the chat, and {reused} were reused"
    if facts.is_blind:
        return Diagnosis(
            Cause.POLICY, f"{finding}: the policy {facts.policy} does not ask who holds what", "serve with --policy kv"
        )
    return Diagnosis(
        Cause.POLICY,
        f"{finding}: the policy {facts.policy or '(unknown)'} found another worker sooner "
        f"({_plural(holder.queued_tokens, 'token')} waited at {holder.worker})",
        "ask again when the fleet is idle; the router's line `routed request=` tells the prices",
    )


def _unexplained(facts: Facts) -> Diagnosis:
    return Diagnosis(
        Cause.UNEXPLAINED,
        f"{_reused_blocks(facts)} of {_plural(_full_blocks(facts), 'block')} were reused, and nobody held more of them",
        "compare the lines `routed request=` and `choice ended` of the router's log with what the workers log",
    )


CHECKS: tuple[Callable[[Facts], Diagnosis | None], ...] = (
    _fingerprint,
    _form,
    _unhealthy,
    _vocabulary,
    _failed,
    _partial_block,
    _fine,
    _tokenizer,
    _template,
    _salt,
    _stale_index,
    _eviction,
    _policy,
    _unexplained,
)


def _full_blocks(facts: Facts) -> int:
    return len(facts.second.tokens) // facts.block_size


def _reused_blocks(facts: Facts) -> int:
    return facts.second.cached_tokens // facts.block_size


def _held(workers: Iterable[WorkerFacts]) -> int:
    return max((worker.held_blocks for worker in workers), default=0)


def _common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Returns leading tokens that two prompts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def _plural(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"
