"""Recording a step: on the CPU the step itself; on CUDA what is asked of torch, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from twostroke.engine.backends.cuda.accelerator import WARM_UPS, CpuAccelerator, Cuda, accelerator_for


def test_a_recording_on_the_cpu_is_the_step_on_what_its_inputs_hold_now() -> None:
    numbers = torch.tensor([1, 2])
    recording = CpuAccelerator().record(lambda: (numbers * 10, numbers.sum()))
    tens, total = recording.outputs
    assert (tens.tolist(), total.item()) == ([10, 20], 3)
    numbers[:] = torch.tensor([5, 6])
    assert tens.tolist() == [10, 20], "nothing changes before the replay"
    recording.replay()
    assert (tens.tolist(), total.item()) == ([50, 60], 11)


def test_each_device_is_driven_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda(monkeypatch)
    assert isinstance(accelerator_for(torch.device("cpu")), CpuAccelerator)
    cuda = accelerator_for(torch.device("cuda:1"))
    assert isinstance(cuda, Cuda)
    assert cuda.device == torch.device("cuda:1")


class FakeCuda:
    """Notes what is asked of `torch.cuda`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.pools: list[object] = []
        self.streams: list[object] = []
        note = self.said.append

        class Stream:
            def __init__(self, name: object) -> None:
                self.name = "default" if name == "default" else "side"

            def wait_stream(self, other: Stream) -> None:
                note(f"{self.name} waits for {other.name}")

            def synchronize(self) -> None:
                note("wait")

        class Graph:
            def replay(self) -> None:
                note("replay")

        @contextmanager
        def around(name: str) -> Iterator[None]:
            note(f"enter {name}")
            yield
            note(f"leave {name}")

        def graph(_graph: Graph, *, pool: object, stream: Stream, capture_error_mode: str) -> Any:
            self.pools.append(pool)
            self.streams.append(stream)
            return around(f"capture {capture_error_mode}")

        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (7, 7))
        monkeypatch.setattr(torch.cuda, "device", lambda device: around(str(device)))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: around(stream.name))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream("default"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: note("wait for the device"))


def test_a_step_is_warmed_up_beside_the_stream_and_then_captured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCuda(monkeypatch)
    cuda = Cuda(torch.device("cuda:1"))
    out = torch.zeros(1)

    def step() -> tuple[torch.Tensor, ...]:
        fake.said.append("step")
        return (out,)

    recording = cuda.record(step)
    assert fake.said == [
        "enter cuda:1",
        "side waits for default",
        "enter side",
        *["step"] * WARM_UPS,
        "leave side",
        "default waits for side",
        "wait for the device",
        "enter capture thread_local",
        "step",
        "leave capture thread_local",
        "leave cuda:1",
    ]
    assert recording.outputs == (out,)
    recording.replay()
    assert fake.said[-1] == "replay"
    cuda.record(step)
    assert fake.pools == [(7, 7), (7, 7)], "recordings share one pool of memory"
    assert fake.streams[0] is fake.streams[1], "and one stream: libraries keep a workspace for each that they see"
