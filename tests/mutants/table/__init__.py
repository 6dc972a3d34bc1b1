"""All mutants, by the part of the product that they are in."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant
from tests.mutants.table import clients, index, models, pages, routing, sampling, steps, usage

MUTANTS: Final[tuple[Mutant, ...]] = (
    *pages.MUTANTS,
    *index.MUTANTS,
    *steps.MUTANTS,
    *sampling.MUTANTS,
    *models.MUTANTS,
    *routing.MUTANTS,
    *clients.MUTANTS,
    *usage.MUTANTS,
)
