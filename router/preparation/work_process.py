"""Runs a process that does one piece of work after the other, with a queue of waiting work for each tenant."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import os
import signal
import struct
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

from router.child_environment import child_environment
from router.preparation.prepared_texts import TenantTexts
from router.preparation.wire import BrokenMessage, packed, unpacked
from router.requests.work import PreparationOutcome, SegmentQuery, Work
from router.text.structured.output import StructuredOutput
from twostroke.base.errors import Draining, InternalError, Overloaded, RequestTooLarge, ServeError

log = logging.getLogger(__name__)

WORK_S = 60.0
"""Seconds for one request, and for loading the process. Even 8 MiB take less on a slow machine."""
MOST_WAITING_BYTES = 64 << 20
"""Bytes of one tenant's bodies in one queue. A larger body may wait there alone."""
PIECE_BYTES = 64 << 10
"""Bytes of a body that are written at once."""
HEADER = struct.Struct(">QQ")
"""Lengths of a message (see `wire`) and of its body, which both follow."""
MOST_OUTCOME_BYTES = 256 << 20
"""Bytes of the longest message that a process may write. Tokens and texts of the largest bodies take a fraction."""
MOST_QUERIES = 8192
"""Most messages of a process for one piece of work. Each prompt and each hint may need a query."""
READ_BYTES = 1 << 20
"""Bytes of a process's output that are read ahead."""


class TextFiles(NamedTuple):
    """The tokenizer's files, from which every process reads when it starts."""

    model_dir: str
    digest: str
    """Their digest when the router started. A process that finds another one ends."""


@dataclass(frozen=True, slots=True)
class WorkProgram:
    """The program of a process, and its limits."""

    module: str
    purpose: str
    """What the process does, for errors: "to PURPOSE takes more than ..."."""
    work_s: float
    """Seconds for one piece of work."""
    cpu_s: float | None
    """Seconds of processor time for one piece of work. The process enforces it. None: only `work_s` counts."""
    wait_s: float | None
    """Most seconds in the queue and the process together. None: no limit."""
    ends_too_large: frozenset[int]
    """Exit statuses of a process whose work took too much memory."""

    @property
    def out_of_time(self) -> ServeError:
        """The error for work that took longer than `work_s`. With `cpu_s`, the machine may be busy: try again."""
        if self.cpu_s is None:
            return RequestTooLarge(f"to {self.purpose} takes more than {self.work_s:g} s")
        return Overloaded(f"the router could not {self.purpose} within {self.work_s:g} s: it is busy; try again")


@dataclass(slots=True, eq=False)  # compared by identity: bodies may be equal, and are large
class _Waiting:
    work: Work | StructuredOutput
    done: asyncio.Future[PreparationOutcome]
    known: TenantTexts | None
    """Cached texts of its tenant."""


_UNREAD = PreparationOutcome(error=Draining("this router takes no new requests: it is shutting down"))


def _answer(waiting: _Waiting, outcome: PreparationOutcome) -> None:
    if not waiting.done.done():
        waiting.done.set_result(outcome)


@dataclass(slots=True)
class _TenantQueue:
    waiting: collections.deque[_Waiting] = field(default_factory=collections.deque)
    waiting_bytes: int = 0


class WorkProcess:
    """One process and the requests that wait for it. Tenants take turns."""

    def __init__(self, program: WorkProgram, files: TextFiles, *, nice: int, idle_s: float | None) -> None:
        """`idle_s`: the process starts when it is needed, and ends after this long without work. None: it stays."""
        self._program = program
        self._files = files
        self._nice = nice
        self._idle_s = idle_s
        self._queues: collections.OrderedDict[str, _TenantQueue] = collections.OrderedDict()
        """Queues of tenants with waiting requests, in the order of their turns."""
        self._has_work = asyncio.Event()
        self._child: _Child | None = None
        self._has_ended = False

    async def prepare(
        self, work: Work | StructuredOutput, tenant: str, known: TenantTexts | None = None
    ) -> PreparationOutcome:
        """Has the process prepare one body. It may query `known`, the cached texts of the tenant."""
        if self._has_ended:
            return _UNREAD
        queue = self._queues.setdefault(tenant, _TenantQueue())
        if queue.waiting and queue.waiting_bytes + len(work.body) > MOST_WAITING_BYTES:
            raise Overloaded(f"requests of {queue.waiting_bytes} bytes wait to be read already; try again")
        waiting = _Waiting(work, asyncio.get_running_loop().create_future(), known)
        queue.waiting.append(waiting)
        queue.waiting_bytes += len(work.body)
        self._has_work.set()
        try:
            async with asyncio.timeout(self._program.wait_s):
                return await waiting.done
        except TimeoutError:
            raise Overloaded(f"too many others come first: to {self._program.purpose} would take longer") from None
        finally:
            self._leave(tenant, queue, waiting)

    async def run(self) -> None:
        try:
            while True:
                if self._idle_s is None and self._child is None:
                    with contextlib.suppress(OSError):  # it is tried again, and logged, when there is work
                        self._child = await _Child.start(self._program, self._files, self._nice)
                await self._wait_for_work()
                if (waiting := self._next()) is not None:
                    await self._serve(waiting)
        finally:
            self._has_ended = True
            for queue in self._queues.values():
                for waiting in queue.waiting:
                    _answer(waiting, _UNREAD)
            await self._end_child()

    async def _serve(self, waiting: _Waiting) -> None:
        outcome = _UNREAD
        try:
            outcome = await self._outcome_of(waiting)
        except OSError as error:
            log.error("no process to prepare requests in error=%s", error)
            outcome = PreparationOutcome(
                error=InternalError(f"the router could not {self._program.purpose}: a process could not be started")
            )
        finally:
            _answer(waiting, outcome)

    async def _wait_for_work(self) -> None:
        try:
            async with asyncio.timeout(None if self._child is None else self._idle_s):
                await self._has_work.wait()
        except TimeoutError:
            await self._end_child()

    def _next(self) -> _Waiting | None:
        if not self._queues:
            self._has_work.clear()
            return None
        tenant, queue = next(iter(self._queues.items()))
        self._queues.move_to_end(tenant)
        waiting = queue.waiting[0]
        self._leave(tenant, queue, waiting)
        return waiting

    def _leave(self, tenant: str, queue: _TenantQueue, waiting: _Waiting) -> None:
        if waiting in queue.waiting:
            queue.waiting.remove(waiting)
            queue.waiting_bytes -= len(waiting.work.body)
            if not queue.waiting and self._queues.get(tenant) is queue:
                del self._queues[tenant]

    async def _outcome_of(self, waiting: _Waiting) -> PreparationOutcome:
        """Returns the outcome of a piece of work. Tries twice if the process ends, but not because of a limit."""
        program, work = self._program, waiting.work
        for _ in range(2):
            if self._child is None:
                self._child = await _Child.start(program, self._files, self._nice)
            try:
                return await self._in_time(self._child, waiting)
            except TimeoutError:
                await self._end_child()
                return PreparationOutcome(error=program.out_of_time)
            except BrokenMessage:
                await self._end_child()
                log.error("a process that prepares requests wrote what is not a message kind=%s", work.kind)
                break
            except (EOFError, ConnectionError):
                status = await self._end_child(has_ended=True)
                log.warning("a process that prepares requests ended kind=%s bytes=%d", work.kind, len(work.body))
                if status == -signal.SIGPROF:
                    return PreparationOutcome(
                        error=RequestTooLarge(f"to {program.purpose} takes more than {program.cpu_s:g} s")
                    )
                if status in program.ends_too_large:
                    return PreparationOutcome(
                        error=RequestTooLarge(f"to {program.purpose} takes more memory than one may have")
                    )
        return PreparationOutcome(
            error=InternalError(f"the router could not {program.purpose}: the process for it failed")
        )

    async def _in_time(self, child: _Child, waiting: _Waiting) -> PreparationOutcome:
        """Returns the outcome. Raises TimeoutError. The time of the work begins when the process has loaded."""
        async with asyncio.timeout(WORK_S):
            await child.load()
        async with asyncio.timeout(self._program.work_s):
            return await child.exchange(waiting.work, waiting.known)

    async def _end_child(self, *, has_ended: bool = False) -> int | None:
        child, self._child = self._child, None
        return None if child is None else await child.end(has_ended=has_ended)


class _Child:
    """The running process. It ends when its stdin ends, so it never outlives the router."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self._is_loaded = False

    @classmethod
    async def start(cls, program: WorkProgram, files: TextFiles, nice: int) -> _Child:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", program.module, str(os.getpid()), str(nice), str(program.cpu_s or 0.0)),
            *(files.model_dir, files.digest),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env={**child_environment(), "TOKENIZERS_PARALLELISM": "false"},
            limit=READ_BYTES,
        )
        return cls(process)

    async def load(self) -> None:
        """Waits until the process has loaded. Raises like `exchange`."""
        if not self._is_loaded:
            await self._stdout.readexactly(HEADER.size)
            self._is_loaded = True

    async def exchange(self, work: Work | StructuredOutput, known: TenantTexts | None) -> PreparationOutcome:
        """Sends work to the process and returns its outcome. Answers its queries meanwhile.

        Raises EOFError (as IncompleteReadError) or ConnectionError if the process has ended, and BrokenMessage, which
        is a ConnectionError, if it has written something else than messages.
        """
        await self._write(packed(dataclasses.replace(work, body=b"")), work.body)
        for _ in range(MOST_QUERIES):
            message = unpacked(await self._read(), object)
            if isinstance(message, SegmentQuery) and known is not None:
                await self._write(packed(known.answer(message)))
                continue
            if not isinstance(message, PreparationOutcome):
                break
            if known is not None:
                known.learn(message)
            return message
        raise BrokenMessage("it is neither an outcome nor a query")

    async def _write(self, data: bytes, body: bytes = b"") -> None:
        self._stdin.write(HEADER.pack(len(data), len(body)))
        for whole in (memoryview(data), memoryview(body)):
            for start in range(0, len(whole), PIECE_BYTES):  # copying all at once would take milliseconds
                self._stdin.write(whole[start : start + PIECE_BYTES])
                await self._stdin.drain()

    async def _read(self) -> bytes:
        (length, _) = HEADER.unpack(await self._stdout.readexactly(HEADER.size))
        if length > MOST_OUTCOME_BYTES:
            raise BrokenMessage(f"it has {length} bytes")
        return await self._stdout.readexactly(length)

    async def end(self, *, has_ended: bool = False) -> int:
        """Ends the process. Returns its exit status.

        `has_ended`: it has ended by itself. Then it is not killed, as that would hide its status from asyncio.
        """
        if not has_ended:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._stdin.close()
        with contextlib.suppress(ConnectionError):
            await self._stdin.wait_closed()
        return await self._process.wait()
