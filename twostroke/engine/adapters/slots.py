"""The interface by which a worker loads adapters into its engine."""

from __future__ import annotations

from typing import Any, Protocol

from twostroke.base.errors import UnsupportedFeature
from twostroke.models.adapters.peft import Adapter


class AdapterSlots(Protocol):
    """Adapters that steps may name in `Batch.weights`. An engine that computes them offers this interface."""

    def prepare(self, adapter: Adapter) -> Any:
        """Returns the adapter in the form that steps compute with. Any thread may call it. Raises ConfigError if the
        adapter does not fit the model."""

    def put(self, digest: bytes, prepared: Any) -> None:
        """Lets steps use the adapter. Only the engine thread calls it; it returns quickly."""

    def drop(self, digest: bytes) -> None:
        """Forgets an adapter that no step uses any more. Only the engine thread calls it."""


class NoSlots:
    """Slots of an engine that computes only the model."""

    def prepare(self, adapter: Adapter) -> Any:
        raise UnsupportedFeature(
            "adapters are not computed by this engine: only CPUs compute them, and not in transformers' code"
        )

    def put(self, digest: bytes, prepared: Any) -> None:
        """Does nothing: no adapter is ever prepared."""

    def drop(self, digest: bytes) -> None:
        """Does nothing: no adapter was ever put."""
