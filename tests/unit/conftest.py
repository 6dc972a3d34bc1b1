"""The native kernels, for every test that computes with them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from tests.unit.kernels.variants import IN_GATE, EachVariant, built, mark_others_slow
from twostroke.kernels.cpu.build import Kernels


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_others_slow(items)


@pytest.fixture(scope="session")
def built_kernels() -> Mapping[str, Kernels]:
    return EachVariant(built)


@pytest.fixture(scope="session")
def built_parts(built_kernels: Mapping[str, Kernels]) -> Mapping[str, Kernels]:
    """The same, for tests of what is compiled when something needs it."""
    return built_kernels


@pytest.fixture(scope="session")
def kernels(built_kernels: Mapping[str, Kernels]) -> Kernels:
    """The best that this CPU can run."""
    return built_kernels[IN_GATE[0]]
