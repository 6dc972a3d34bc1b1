"""The interface of the engine's branches: what they add to the steps of a model, and what the engine offers besides
steps.

`branches.py` is the table that hands a branch's objects to a backend. No backend knows any of them. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from twostroke.scheduler.batch import Batch

if TYPE_CHECKING:  # torch, which a fleet of paced workers does without
    import torch

    from twostroke.config import ModelConfig
    from twostroke.engine.determinism import Determinism
    from twostroke.kernels.attention.interface import AttentionBackend
    from twostroke.kernels.pools.parted_pool import AnyPool
    from twostroke.kernels.products.linear import Linears
    from twostroke.kv_cache.memory import PageMemory
    from twostroke.models.decoders.choice import LoadOptions
    from twostroke.models.decoders.transformer import Model
    from twostroke.models.spec import ModelSpec

Offers = Mapping[type, Any]
"""Objects that an engine offers besides steps, each by its interface."""


class ExtraMessage(Protocol):
    """A message from the first process of a worker to the others. It can be pickled."""

    def on(self, receiver: Any) -> None:
        """Carries the message out in another process, on the receiver of that process's extra."""


@dataclass(frozen=True, slots=True)
class OtherProcesses:
    """How the first process of a worker reaches the others. Both calls raise RankLost."""

    tell: Callable[[ExtraMessage], None]
    """Has the other processes carry out a message between two steps, and returns when they have."""
    aside: Callable[[ExtraMessage], None]
    """Has them carry out a message while steps run, and returns when they have. Raises ConfigError where one of them
    cannot."""


class StepExtra(Protocol):
    """A feature that adds to the steps of one loaded model, or of a share of it."""

    def of_step(self, batch: Batch) -> Any:
        """Returns what is added to this step, in the form in which the model takes it, or None for nothing."""

    def offers(self, others: OtherProcesses | None) -> Offers:
        """Returns what the first process offers; `others` is None where a worker has one process."""

    def receiver(self) -> Any:
        """Returns the object on which messages of the first process are carried out, in another process."""


class NoExtra:
    """The extra of an engine that computes only the model."""

    def of_step(self, batch: Batch) -> Any:
        return None

    def offers(self, others: OtherProcesses | None) -> Offers:
        return {}

    def receiver(self) -> None:
        return None


NO_EXTRA: Final = NoExtra()


class ExtraOfModel(Protocol):
    """Makes the extra of a loaded model. It can be pickled."""

    def __call__(self, directory: Path, spec: ModelSpec, dtype: torch.dtype, *, linears: Linears | None) -> StepExtra:
        """`linears` computes matrix products in the way of the model's. None: the native forward pass computes them."""


class ForeignCode(Protocol):
    """Code of others that computes models. Without it, our decoders compute them."""

    def load(self, directory: Path, spec: ModelSpec, backend: AttentionBackend, options: LoadOptions) -> Model:
        """Loads a model. Raises ConfigError for weights that it cannot load."""

    def tried(
        self,
        model: Model,
        memory: PageMemory,
        angles: tuple[torch.Tensor, torch.Tensor],
        spec: ModelSpec,
        config: ModelConfig,
        pool: AnyPool,
    ) -> Determinism:
        """Tries a loaded model over the pages of a pool. Raises ConfigError where the trial fails."""


@dataclass(frozen=True, slots=True)
class RunnerBranches:
    """What branches give the runner of a model on CPUs."""

    extra: ExtraOfModel | None = None
    code: ForeignCode | None = None


NO_BRANCHES: Final = RunnerBranches()
