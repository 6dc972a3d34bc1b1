"""What is timed with what: a model's shapes, a number of threads, one kind of kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.trials.bench.kernels.options import BEST
from tests.trials.bench.kernels.timing import Result, Timed, Work
from twostroke.base.errors import ConfigError
from twostroke.config import ModelConfig
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.choice import choose_kernels
from twostroke.kernels.cpu.linear import SERVED, NativeLinears
from twostroke.kernels.cpu.team import Team
from twostroke.kernels.cpu.variants import OVERRIDE, TORCH, chosen_variants
from twostroke.kernels.products.linear import Linears, TorchLinears
from twostroke.models.catalog.places import cache_dir
from twostroke.models.spec import DTYPE_BYTES, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    model: ModelConfig
    model_dir: Path
    spec: ModelSpec
    threads: int
    repeats: int
    kernels: Kernels | None
    team: Team | None

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.model.dtype)
        return found

    @property
    def kernels_name(self) -> str:
        return TORCH if self.kernels is None else self.kernels.variant

    @property
    def weight_bytes(self) -> int:
        """Bytes of one weight, without the scales of a group of them."""
        return 1 if self.model.weights == "int8" else DTYPE_BYTES[self.model.dtype]

    def linears(self) -> Linears:
        """Packs the weights as a worker does. Raises ConfigError for int8 weights where nothing computes them."""
        is_int8 = self.model.weights == "int8"
        if self.kernels is not None and self.dtype == SERVED:
            return NativeLinears(self.kernels, self.team, is_int8=is_int8)
        if is_int8:
            raise ConfigError(f"--weights int8: {self.kernels_name} kernels on this CPU have none", field="weights")
        return TorchLinears()

    def step(self) -> AbstractContextManager[None]:
        """Within it, native kernels run on all threads."""
        return nullcontext() if self.team is None else self.team.step()

    def result(self, part: str, what: str, work: Work, found: Timed) -> Result:
        return Result(part, what, self.kernels_name, self.threads, work, found)


def check_kernels(kernels: str) -> None:
    """Raises ConfigError for kernels that this CPU has not."""
    with overridden(kernels):
        chosen_variants()


@contextmanager
def setting_of(
    model: ModelConfig, model_dir: Path, spec: ModelSpec, threads: int, kernels: str, repeats: int
) -> Iterator[Setting]:
    """With kernels that were checked before."""
    torch.set_num_threads(threads)
    with overridden(kernels):
        loaded = choose_kernels(cache_dir() / "kernels")
        team = None if loaded is None else Team(loaded, tuple(range(threads)))
        try:
            yield Setting(
                model=model, model_dir=model_dir, spec=spec, threads=threads, repeats=repeats, kernels=loaded, team=team
            )
        finally:
            if team is not None:
                team.close()


@contextmanager
def overridden(kernels: str) -> Iterator[None]:
    """For all that loads kernels meanwhile; `BEST` leaves the user's own choice alone."""
    before = os.environ.get(OVERRIDE)
    if kernels != BEST:
        os.environ[OVERRIDE] = kernels
    try:
        yield
    finally:
        os.environ.pop(OVERRIDE, None)
        if before is not None:
            os.environ[OVERRIDE] = before
