"""The port of models that the fleet serves beside its own, by the names that clients call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from twostroke.request import WeightsRef
from twostroke.rpc.v1.fleet_pb2 import FleetView


class NamedModel(Protocol):
    """The fleet's model with weights of its own beside it."""

    @property
    def name(self) -> str: ...

    @property
    def ref(self) -> WeightsRef: ...

    @property
    def loaded_s(self) -> float:
        """When it was loaded, in Unix seconds."""

    def salted(self, salt: bytes) -> bytes:
        """Returns a salt with which no other model has blocks in common."""


NamedModels = Mapping[str, NamedModel]
NamedModelsOf = Callable[[FleetView], NamedModels]
"""Reads them from what the supervisor says."""


def none_named(_: FleetView) -> NamedModels:
    return {}
