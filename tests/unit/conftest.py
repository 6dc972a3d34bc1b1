"""Native kernels, built once per run and for every variant that this CPU can run."""

from __future__ import annotations

from pathlib import Path

import pytest

from twostroke.kernels.cpu.build import OVERRIDE, Kernels, chosen_variants, load_kernels


@pytest.fixture(scope="session")
def built_kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernels]:
    folder: Path = tmp_path_factory.mktemp("kernels")
    built = {}
    for variant in chosen_variants():
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(OVERRIDE, variant.name)
            kernels = load_kernels(folder)
        assert kernels is not None, "the gate's machine has a compiler"
        built[variant.name] = kernels
    return built


@pytest.fixture(scope="session")
def kernels(built_kernels: dict[str, Kernels]) -> Kernels:
    """The best that this CPU can run."""
    return next(iter(built_kernels.values()))
