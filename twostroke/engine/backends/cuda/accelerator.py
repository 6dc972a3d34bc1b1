"""Drives a device: where launches go, how they are awaited, and how a step is recorded and replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch

WARM_UPS = 2
"""Runs before a recording: kernels are compiled and loaded, workspaces allocated; none of that may be recorded."""

Step = Callable[[], tuple[torch.Tensor, ...]]
"""A step. It reads tensors at fixed addresses, writes into the pages, and returns its results."""


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    replay: Callable[[], None]
    """Runs the step again, on the present content of its input tensors."""
    outputs: tuple[torch.Tensor, ...]
    """The tensors that each replay overwrites with its results."""


class Accelerator(Protocol):
    device: torch.device

    def guard(self) -> AbstractContextManager[object]:
        """Returns a context for all work: in it, launches of this thread go to this device."""

    def synchronize(self) -> None:
        """Waits until what this thread has launched is done."""

    def record(self, step: Step) -> Recording: ...


class CpuAccelerator:
    """The CPU in a device's place: nothing is asynchronous, and a recording is the step itself."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def guard(self) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self) -> None:
        """Waits for nothing: everything is done already."""

    def record(self, step: Step) -> Recording:
        outputs = tuple(output.clone() for output in step())

        def replay() -> None:
            for output, fresh in zip(outputs, step(), strict=True):
                output.copy_(fresh)

        return Recording(replay, outputs)


class Cuda:
    """One CUDA device; recordings are CUDA graphs that share one pool of memory.

    They share one stream too: for every stream that it has seen, cuBLAS keeps a workspace, 32 MiB on Hopper.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._graph_pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # of torch

    def guard(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self.device)

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()

    def record(self, step: Step) -> Recording:
        with self.guard():
            self._warm_up(step)
            graph = torch.cuda.CUDAGraph()
            # Thread-local: what other threads do meanwhile, such as copying pages, does not end the recording.
            with torch.cuda.graph(graph, pool=self._graph_pool, stream=self._stream, capture_error_mode="thread_local"):
                outputs = step()
        return Recording(graph.replay, outputs)

    def _warm_up(self, step: Step) -> None:
        """Runs the step WARM_UPS times on the stream that records, which is not the default one."""
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                step()
        torch.cuda.current_stream(self.device).wait_stream(self._stream)
        torch.cuda.synchronize(self.device)


def accelerator_for(device: torch.device) -> Accelerator:
    return Cuda(device) if device.type == "cuda" else CpuAccelerator()
