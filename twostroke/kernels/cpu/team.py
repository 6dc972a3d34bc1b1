"""The threads that run a worker's native kernels, on its own cores and on idle ones that it borrows."""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from twostroke.base.errors import ConfigError
from twostroke.kernels.cpu.build import Kernels

log = logging.getLogger(__name__)

BORROW_AFTER_US: Final = 3000
"""Microseconds without a step after which an owner's core may be borrowed. The pause between two steps is shorter."""

PATIENCE_US: Final = 50_000
"""Microseconds that a step waits for a borrower to yield. A borrower yields between two kernels, unless its process is
stopped."""

_POINTER, _NUMBER, _TEXT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_char_p

_NEW_ARGUMENTS: Final = (
    *(_POINTER, _NUMBER, _POINTER, _NUMBER),
    *(_TEXT, _NUMBER, _NUMBER, ctypes.c_int32),
    *(_TEXT, _NUMBER),
)
"""The types of: home and borrowable cores; the leases' folder, how long each side waits, whether to pin; the buffer of
an error message."""


class Team:
    """One thread per core. Kernels use other threads than the calling one only within a `step`; one thread opens steps.

    With a `directory`, workers of a host share cores by leases in it. A step waits for its `home` cores, which
    borrowers yield between two kernels. It also takes those of the `borrowable` cores whose owners are idle, or become
    idle before it ends. Without a directory, the home cores are simply a number of threads. `pin` binds each thread to
    its core, including the calling one.
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
        patience_us: int = PATIENCE_US,
    ) -> None:
        assert home, "the calling thread needs a core"
        self._new = kernels.function("twostroke_team_new", _NEW_ARGUMENTS, _POINTER)
        self._begin = kernels.function("twostroke_team_begin", (_POINTER, ctypes.c_int32))
        self._end = kernels.function("twostroke_team_end", (_POINTER,))
        self._lend = kernels.function("twostroke_team_lend", (_POINTER,))
        self._threads_now = kernels.function("twostroke_team_threads_now", (_POINTER,), _NUMBER)
        self._most_borrowed = kernels.function("twostroke_team_most_borrowed", (_POINTER,), _NUMBER)
        self._free = kernels.function("twostroke_team_free", (_POINTER,))
        self._home = home
        self._borrowable = borrowable
        self._settings = (b"" if directory is None else os.fsencode(directory), borrow_after_us, patience_us, pin)
        self.address: int | None = self._create(borrowable)
        """The address that kernels take as their team. `borrow_from` changes it."""

    @contextmanager
    def step(self, *, borrows: bool = True) -> Iterator[None]:
        """Holds the home cores, and borrows free ones if `borrows`.

        Waits for home cores that are lent out, but not for a borrower that was stopped.
        """
        assert self.address is not None, "a closed team runs nothing"
        self._begin(self.address, borrows)
        try:
            yield
        finally:
            self._end(self.address)

    def lend(self) -> None:
        """Lets others borrow the home cores at once, not only after `borrow_after_us`: no step follows soon."""
        if self.address is not None:
            self._lend(self.address)

    @property
    def threads_now(self) -> int:
        """Number of cores held by the open step; 0 between steps."""
        return 0 if self.address is None else int(self._threads_now(self.address))

    @property
    def most_borrowed(self) -> int:
        """Most cores that the open step, or else the last one, borrowed at once."""
        return 0 if self.address is None else int(self._most_borrowed(self.address))

    def borrow_from(self, borrowable: tuple[int, ...]) -> None:
        """Lets the team borrow these cores from now on. Where that fails, nothing changes. No step may be open."""
        if borrowable == self._borrowable:
            return
        self._borrowable = borrowable
        try:
            address, self.address = self.address, self._create(borrowable)
        except ConfigError as error:
            log.warning("cores cannot be borrowed: cores=%s error=%s", borrowable, error)
        else:
            self._free(address)

    def close(self) -> None:
        """Ends the helper threads. No step may be open."""
        address, self.address = self.address, None
        self._free(address)

    def _create(self, borrowable: tuple[int, ...]) -> int:
        assert not set(self._home) & set(borrowable), "a core is either home or borrowed"
        problem = ctypes.create_string_buffer(512)
        cores = (*_array(self._home), *_array(borrowable))
        address: int | None = self._new(*cores, *self._settings, problem, len(problem))
        if address is None:
            raise ConfigError(f"no thread team on cores {self._home}: {problem.value.decode(errors='replace')}")
        return address


def _array(cores: tuple[int, ...]) -> tuple[ctypes.Array[ctypes.c_int32], int]:
    return (ctypes.c_int32 * len(cores))(*cores), len(cores)
