"""Runs copies in the order in which they were requested. The host waits for them only where it must."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable

import torch

Mark = Callable[[], None]
"""Waits until all copies are done that were requested before the mark."""


class CopyStream(abc.ABC):
    """Used by one thread at a time."""

    @abc.abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Requests a copy. Neither tensor may be touched before the copy is known to be done."""

    @abc.abstractmethod
    def mark(self) -> Mark: ...

    def synchronize(self) -> None:
        """Waits until all requested copies are done."""
        self.mark()()


class InlineStream(CopyStream):
    """Copies at once: between tensors in host memory."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def mark(self) -> Mark:
        return _nothing


class CudaStream(CopyStream):
    """A separate stream, besides those that compute."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch annotates it not

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> Mark:
        # Blocking: a thread that waits sleeps, instead of taking a core from the event loop.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch annotates it not
        event.record(self._stream)
        return functools.partial(_wait, event)


def copy_stream(device: torch.device) -> CopyStream:
    return CudaStream(device) if device.type == "cuda" else InlineStream()


def _wait(event: torch.cuda.Event) -> None:
    event.synchronize()


def _nothing() -> None:
    """Waits for nothing: all requested copies are done."""
