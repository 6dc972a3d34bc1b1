"""Sums over the ranks of a worker: in shared memory on CPUs, by NCCL between GPUs, through torch's process groups.

On devices ranks meet in a file without a name, a memfd that the first rank makes and the others inherit. So no port is
opened for that, no file stays, and no other process can join. NCCL's own sockets stay on the loopback device.

A rank waits for the others' parts within a kernel, where `RankGroup.abort` does not reach. `end_waits` aborts such a
wait as far as NCCL can. A process that still waits ends by exit, like any process whose device hangs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Final

import torch
from torch import distributed
from torch.nn import functional

from twostroke.ranks.group import FIRST, RankGroup
from twostroke.scheduler.batch import Batch

JOIN_S: Final = 300.0
"""Seconds that ranks wait for each other when they join. NCCL also ends a process that waits so long for a sum outside
a recording. The first steps are slow, because each rank compiles kernels."""

_LOOPBACK: Final = {"NCCL_SOCKET_IFNAME": "lo"}
"""Environment variables for NCCL while ranks join: it listens on the loopback device, since all ranks are on one host.
"""


class Meeting:
    """The rendezvous of a worker's ranks, where they also leave small values for the first one."""

    def __init__(self, fd: int, rank: int, ranks: int) -> None:
        """`fd` is the descriptor of one memfd on all ranks. The caller may close it.

        A process group opens the file by its path at each use, even when its last object is destroyed, which may be at
        any time. So the descriptor in that path stays open while the process lives. Otherwise the group would lock and
        write to whatever file has its number.
        """
        self.rank, self.ranks = rank, ranks
        path = f"/proc/self/fd/{os.dup(fd)}"
        self._store = distributed.FileStore(path, ranks)  # type: ignore[attr-defined]  # of torch

    def leave(self, what: str, data: bytes) -> None:
        """Leaves a value for the first rank."""
        self._store.set(f"{what}/{self.rank}", data.hex())

    def left_by(self, rank: int, what: str) -> bytes:
        """Waits until a rank has left this value, and returns it."""
        return bytes.fromhex(self._store.get(f"{what}/{rank}").decode())

    def join(self, device: torch.device) -> None:
        """Waits until all ranks have joined. Raises RuntimeError where one does not."""
        is_cuda = device.type == "cuda"
        for name, value in _LOOPBACK.items():
            os.environ.setdefault(name, value)
        distributed.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=self._store,
            rank=self.rank,
            world_size=self.ranks,
            timeout=timedelta(seconds=JOIN_S),
            device_id=device if is_cuda else None,
        )


class DeviceSums:
    """The `twostroke.models.decoders.collective.Collective` of a rank on a device.

    Its kernels are launched, and the host never waits for them, so that steps with them can be recorded.
    """

    native = None

    def __init__(self, rank: int, widths: Sequence[int]) -> None:
        """The ranks have joined already. `widths` are the columns that each rank has of a gathered result."""
        self._rank = rank
        self._widths = tuple(widths)

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        """Returns an empty context: the first rank has sent this step, and nothing is left to do around it."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Does nothing: the process of a further rank ends without closing anything."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' parts, in the place of `part` if that is contiguous."""
        part = part.contiguous()
        distributed.all_reduce(part)
        return part

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """Returns the columns of all ranks' parts side by side on the first rank, None on the others.

        All ranks get them, since that is what NCCL records best; parts are made equally wide for it.
        """
        widest = max(self._widths)
        own = functional.pad(part, (0, widest - part.shape[1])).contiguous()
        parts = [torch.empty_like(own) for _ in self._widths]
        distributed.all_gather(parts, own)
        if self._rank != FIRST:
            return None
        return torch.cat([each[:, :width] for each, width in zip(parts, self._widths, strict=True)], dim=1)


def end_waits() -> None:
    """Ends this process's waits for sums, as far as NCCL can, while another thread may be in one."""
    group = distributed.group.WORLD
    if group is not None:
        threading.Thread(target=group.abort, name="end waits", daemon=True).start()  # it may hang, as the device may


def leave_group() -> None:
    """Leaves the process group, if this process has joined it. Other ranks may be gone."""
    if distributed.group.WORLD is not None:
        distributed.group.WORLD.abort()  # leaving it properly would wait for them
        distributed.destroy_process_group()


class RankSums:
    """The sums of ranks on CPUs (see `twostroke/models/decoders/collective.py`), made in memory that they share."""

    def __init__(self, group: RankGroup, vocab_size: int) -> None:
        self._group = group
        self._vocab_size = vocab_size

    @property
    def native(self) -> RankGroup:
        return self._group

    def step(self, batch: Batch) -> AbstractContextManager[None]:
        """Returns an empty context: the first rank has sent this step, and nothing is left to do around it."""
        return contextlib.nullcontext()

    def close(self) -> None:
        """Does nothing: the process of a further rank ends without closing anything."""

    def all_reduce(self, part: torch.Tensor) -> torch.Tensor:
        """Returns the sum of all ranks' parts, [rows, hidden] on each. Raises RankLost."""
        values = part.float() if part.dtype == torch.float16 else part.contiguous()
        self._group.all_reduce(values)
        return values.to(part.dtype)

    def gather(self, part: torch.Tensor) -> torch.Tensor | None:
        """Returns the logits [rows, vocabulary] on the first rank, None on others. Raises RankLost."""
        return self._group.gather(part, self._vocab_size)
