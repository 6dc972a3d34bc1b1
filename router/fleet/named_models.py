"""The interface of models that the fleet serves besides its base model, by the names that clients use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from twostroke.request import WeightsRef
from twostroke.rpc.v1.fleet_pb2 import FleetView


class NamedModel(Protocol):
    """The base model with further weights of its own."""

    @property
    def name(self) -> str: ...

    @property
    def ref(self) -> WeightsRef: ...

    @property
    def loaded_s(self) -> float:
        """When it was loaded, in Unix seconds."""

    def salted(self, salt: bytes) -> bytes:
        """Returns a salt of this model's blocks: no other model shares them."""


NamedModels = Mapping[str, NamedModel]
NamedModelsOf = Callable[[FleetView], NamedModels]
"""Reads the named models from the supervisor's view."""


def none_named(_: FleetView) -> NamedModels:
    return {}
