"""Loses, repeats and reorders event batches on purpose, to prove that the index comes out right all the same."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.base.errors import ConfigError
from twostroke.rpc.v1.control_pb2 import KvEventBatch

ENVIRONMENT = "TWOSTROKE_EVENT_FAULTS"
"""Gives the rates for routers in which faults can be armed, as in "drop:0.01,duplicate:0.01,reorder:0.01,seed:1"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRates:
    drop: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    """Rate of batches that are delivered after the one that follows them."""
    seed: int = 0

    def __post_init__(self) -> None:
        rates = (self.drop, self.duplicate, self.reorder)
        if not (min(rates) >= 0 and sum(rates) < 1):
            raise ConfigError(f"event faults: rates must be 0 or more and stay below 1 together, got {rates}")

    @classmethod
    def parse(cls, text: str) -> FaultRates | None:
        """Parses "drop:0.01,duplicate:0.01,reorder:0.01,seed:1"; None for an empty text."""
        if not text:
            return None
        try:
            entries = [entry.split(":") for entry in text.split(",")]
            pairs = dict(entries)
            if len(pairs) < len(entries):
                raise ValueError("one is named twice")
            seed = int(pairs.pop("seed", "0"))
            return cls(**{name: float(rate) for name, rate in pairs.items()}, seed=seed)
        except (ValueError, TypeError) as error:
            raise ConfigError(
                f"event faults {text!r}: want drop:RATE,duplicate:RATE,reorder:RATE,seed:NUMBER, each at most once"
            ) from error


class EventFaults:
    """Draws the faults of one stream; the same for the same seed and stream name."""

    def __init__(self, rates: FaultRates, stream: str) -> None:
        self._rates = rates
        self._draws = random.Random(f"{rates.seed} {stream}")
        self._late: list[KvEventBatch] = []

    def deliver(self, message: KvEventBatch) -> Sequence[KvEventBatch]:
        late, self._late = self._late, []
        return [*self._befall(message), *late]

    def _befall(self, message: KvEventBatch) -> Sequence[KvEventBatch]:
        rates, draw = self._rates, self._draws.random()
        if draw < rates.drop:
            return []
        if draw < rates.drop + rates.duplicate:
            return [message, message]
        if draw < rates.drop + rates.duplicate + rates.reorder:
            self._late.append(message)
            return []
        return [message]
