"""The threads that run a worker's native kernels, and the cores they run on: its own, and idle ones it may borrow."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from twostroke.errors import ConfigError
from twostroke.kernels.cpu.build import Kernels

BORROW_AFTER_US: Final = 3000
"""A core is borrowed once its owner has been without a step for this long: the pause between two steps is shorter."""

_POINTER, _NUMBER = ctypes.c_void_p, ctypes.c_int64


class Team:
    """One thread per core. Kernels use more than the calling thread only within a `step`; one thread opens steps.

    With a `directory`, workers of a host share cores by leases kept there: a step waits for its `home` cores, which
    borrowers yield between two kernels, and takes those of the `borrowable` cores whose owners are idle. Without one,
    the home cores are simply a number of threads. `pin` binds each thread to its core, the calling one included.
    """

    def __init__(
        self,
        kernels: Kernels,
        home: tuple[int, ...],
        borrowable: tuple[int, ...] = (),
        directory: Path | None = None,
        *,
        pin: bool = False,
        borrow_after_us: int = BORROW_AFTER_US,
    ) -> None:
        assert home, "the calling thread needs a core"
        self._begin = kernels.function("twostroke_team_begin", (_POINTER,))
        self._end = kernels.function("twostroke_team_end", (_POINTER,))
        self._threads_now = kernels.function("twostroke_team_threads_now", (_POINTER,), _NUMBER)
        self._free = kernels.function("twostroke_team_free", (_POINTER,))
        new = kernels.function(
            "twostroke_team_new",
            (_POINTER, _NUMBER, _POINTER, _NUMBER, ctypes.c_char_p, _NUMBER, ctypes.c_int32, ctypes.c_char_p, _NUMBER),
            _POINTER,
        )
        folder = ("" if directory is None else str(directory)).encode()

        def create(borrowable: tuple[int, ...]) -> int:
            assert not set(home) & set(borrowable), "a core is either home or borrowed"
            problem = ctypes.create_string_buffer(512)
            address: int | None = new(
                (ctypes.c_int32 * len(home))(*home),
                len(home),
                (ctypes.c_int32 * len(borrowable))(*borrowable),
                len(borrowable),
                folder,
                borrow_after_us,
                pin,
                problem,
                len(problem),
            )
            if address is None:
                raise ConfigError(f"no thread team on cores {home}: {problem.value.decode(errors='replace')}")
            return address

        self._create = create
        self._borrowable = borrowable
        self.address: int | None = create(borrowable)
        """What a kernel takes as its team; another one after `borrow_from`."""

    @contextmanager
    def step(self) -> Iterator[None]:
        """Hold the cores. Waits for those that are home and lent out."""
        self._begin(self.address)
        try:
            yield
        finally:
            self._end(self.address)

    @property
    def threads_now(self) -> int:
        """Cores held by the open step; 0 between steps."""
        return int(self._threads_now(self.address))

    def borrow_from(self, borrowable: tuple[int, ...]) -> None:
        """From now on these cores may be borrowed. No step is open."""
        if borrowable != self._borrowable:
            address, self.address = self.address, self._create(borrowable)
            self._free(address)
            self._borrowable = borrowable

    def close(self) -> None:
        """End the helper threads. No step is open."""
        self._free(self.address)
        self.address = None
