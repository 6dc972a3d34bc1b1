"""What the launcher does by itself, without a Ray."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator

import pytest

from cluster.launcher import Interrupts


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_library_swallows_still_ends_the_start(number: signal.Signals) -> None:
    interrupts = Interrupts()
    interrupts.check()
    with contextlib.suppress(BaseException):  # as ray.init does in places
        signal.raise_signal(number)
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()
