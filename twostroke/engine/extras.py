"""The port of the engine's branches: what they add to the steps of a model, and what the engine offers besides steps.

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
"""What an engine offers besides steps, by its interface."""


class ExtraMessage(Protocol):
    """What the first process of a worker tells the others. It can be pickled."""

    def on(self, receiver: Any) -> None:
        """Does it in another process, on the receiver of its extra."""


@dataclass(frozen=True, slots=True)
class OtherProcesses:
    """How the first process of a worker reaches the others. Both raise RankLost."""

    tell: Callable[[ExtraMessage], None]
    """Lets them do what it says between two steps, and returns when they have."""
    aside: Callable[[ExtraMessage], None]
    """Lets them do it while steps run. Raises ConfigError where one of them cannot."""


class StepExtra(Protocol):
    """A feature that adds to the steps of one loaded model, or of a share of it."""

    def of_step(self, batch: Batch) -> Any:
        """Returns what is added to this step, in the form in which the model takes it. None: nothing."""

    def offers(self, others: OtherProcesses | None) -> Offers:
        """Returns what the first process offers; `others` is None where a worker has one process."""

    def receiver(self) -> Any:
        """Returns what messages of the first process are done on, in another process."""


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
        """`linears` makes products as the model's are made. None: the native forward pass computes them."""


class ForeignCode(Protocol):
    """Code that computes models of its own. Without it, our decoders compute them."""

    def load(self, directory: Path, spec: ModelSpec, backend: AttentionBackend, options: LoadOptions) -> Model:
        """Raises ConfigError for weights that it cannot load."""

    def tried(
        self,
        model: Model,
        memory: PageMemory,
        angles: tuple[torch.Tensor, torch.Tensor],
        spec: ModelSpec,
        config: ModelConfig,
        pool: AnyPool,
    ) -> Determinism:
        """Tries a loaded model over the pages of a pool. Raises ConfigError where it cannot serve so."""


@dataclass(frozen=True, slots=True)
class RunnerBranches:
    """What branches give the runner of a model on CPUs."""

    extra: ExtraOfModel | None = None
    code: ForeignCode | None = None


NO_BRANCHES: Final = RunnerBranches()
