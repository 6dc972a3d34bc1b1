"""Fixtures that more than one package's tests share."""

from __future__ import annotations

import functools
import gc
import logging
import os
from collections.abc import Generator
from pathlib import Path

import httpx._transports.default
import pytest

from tests import durations
from tests.processor_time import FileTimes

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before the first channel: tests that kill servers are noisy else
# Before torch and numpy: the gate's processes share two cores, and threads of OpenMP wait for each other by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

with pytest.MonkeyPatch.context() as patch:
    # Triton decides when it is imported whether its own functions are interpreted, and transformers would import it.
    patch.setenv("TRITON_INTERPRET", "1")
    import triton.language  # noqa: F401

# Each client of httpx reads all certificates of the world, for 25 ms of the processor, and most tests open three.
transports = httpx._transports.default
transports.create_ssl_context = functools.cache(transports.create_ssl_context)  # type: ignore[attr-defined]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(FileTimes())


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Thousands of tests and the modules that they import stay: the collector looks at them once, and at none later.

    Each of its rounds over them takes half a second, and some tests ask for one.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger) and logger.name.partition(".")[0] == "torch":
                logger.propagate = True  # else pytest gives each of some forty a handler before each test
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else libraries that count their objects at the end report them all as leaks


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files come first, so that the gate's processes end together."""
    place = durations.places(durations.read_table(durations.TABLE.read_text()))
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The default model in float32, fetched into the user's cache if it is not there yet."""
    from tests.prepare import fetched_model  # loads numpy, which begins threads where nothing forbids it

    return fetched_model()
