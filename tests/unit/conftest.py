"""Native kernels for every variant that this CPU can run, in the user's cache, where workers look, too."""

from __future__ import annotations

import pytest

from twostroke.kernels.cpu.build import Kernels, load_kernels
from twostroke.kernels.cpu.variants import OVERRIDE, chosen_variants
from twostroke.models.catalog.places import cache_dir


@pytest.fixture(scope="session")
def built_kernels() -> dict[str, Kernels]:
    built = {}
    for variant in chosen_variants():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(OVERRIDE, variant.name)
            kernels = load_kernels(cache_dir() / "kernels")
        assert kernels is not None, "the gate's machine has a compiler"
        built[variant.name] = kernels
    return built


@pytest.fixture(scope="session")
def kernels(built_kernels: dict[str, Kernels]) -> Kernels:
    """The best that this CPU can run."""
    return next(iter(built_kernels.values()))
