"""What a doctor's visit has seen: the same chat twice, the workers, and what the router's index said of its blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from twostroke.kv_cache.form import KvForm

Samples = Mapping[str, Sequence[tuple[Mapping[str, str], float]]]
"""Labels and values of all samples of a name on a metrics page."""


class FurtherFacts(Protocol):
    """A dataclass with what a feature has done on one worker."""

    def lines(self, worker: str) -> list[str]:
        """Returns what to print."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SentChat:
    """The chat, sent once."""

    salt: str
    tokens: tuple[int, ...]
    """The chat's tokens, as the router tokenized it just before it was sent."""
    prompt_tokens: int = 0
    """Tokens of the prompt, as the answer's usage says."""
    cached_tokens: int = 0
    failure: str | None = None
    """What the server said instead of answering."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """Between the two: the first answer has ended, the second is not asked for."""

    worker: str
    role: str
    """Empty where it has not introduced itself, as the fingerprint."""
    state: str
    """"serving", "starting", "draining", "dead"."""
    fingerprint: str
    kv_form: str = ""
    """The form of its pages, as "int8 from bfloat16"."""
    event_age_s: float | None = None
    """Since the router heard of it; None where it is not reported, like the following ones."""
    own_sequence: int | None = None
    """Sequence number of the last batch in the worker's event log, as the worker says."""
    index_sequence: int | None = None
    """Sequence number of the last batch that the router's index has applied."""
    held_blocks: int = 0
    """Leading blocks of the chat that it holds, by the router's index."""
    stored_blocks: int = 0
    """Blocks of the chat that it has held at any time since the doctor came, by the same."""
    queued_tokens: int = 0
    further: Mapping[str, FurtherFacts | None] = field(default_factory=dict)
    """What features have to say of it, by their names in JSON; None where one has nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    block_size: int
    vocab_size: int
    fingerprint: str
    """The fleet's, as the router says."""
    kv_form: KvForm
    """The form of the pages of decode workers, as the router says."""
    policy: str | None
    """The policy that placed the chats; None where it is not known."""
    is_blind: bool
    """Whether the policy does not ask which worker holds which blocks."""
    workers: tuple[WorkerFacts, ...]
    first: SentChat
    second: SentChat

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        for worker in values["workers"]:
            worker.update(worker.pop("further"))
        return values
