"""What the launcher does by itself, without a Ray."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from cluster.launch.launcher import Interrupts


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook
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


@pytest.mark.usefixtures("handlers")
def test_a_signal_that_python_swallows_ends_the_start_without_a_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    class Freed:
        """A lock that is replaced while a process forks."""

        def __init__(self, happens: Callable[[], object]) -> None:
            self._happens = happens

        def __del__(self) -> None:
            self._happens()

    interrupts = Interrupts()
    Freed(lambda: signal.raise_signal(signal.SIGINT))
    assert capsys.readouterr().err == ""
    Freed(lambda: 1 // 0)
    assert "ZeroDivisionError" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        interrupts.check()
