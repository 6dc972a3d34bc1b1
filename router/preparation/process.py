"""The process that prepares requests. The router writes them to its stdin. It ends when stdin does, or its router.

The first message that it writes is empty: it has loaded the tokenizer and is ready.

`python -m router.preparation.process PARENT NICE CPU_S MODEL_DIR DIGEST`
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import os
import resource
import signal
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from router.preparation.prepare import prepare
from router.preparation.wire import packed, unpacked
from router.preparation.work_process import HEADER
from router.requests.work import PreparationOutcome, SegmentQuery, Segments
from router.text.text_files import one_text
from router.text.tokenizer import load_text
from twostroke.base.allocator import give_holes_back, give_large_buffers_back
from twostroke.base.errors import InternalError, InvalidRequest

PR_SET_PDEATHSIG = 1
MOST_BYTES = 3 << 30
"""Bytes of address space for one request, in addition to what the process has at its start."""
MOST_FRAMES = 800
"""Python's recursion limit while a request is read. The router's own is 1,000, and must be enough for a response that
repeats a value with the same nesting."""
LARGE_BYTES = 1 << 20
"""Bytes of a body from which on the process gives memory back: its objects leave holes between others."""
CGROUP_SHARE = 2
"""Divisor of a container's memory: one request gets that part of it, so that the kernel does not kill the router."""


def main() -> None:
    serve(_prepares, most_bytes(Path("/sys/fs/cgroup/memory.max")))


def _prepares(model_dir: str) -> Callable[[Any], PreparationOutcome]:
    text = load_text(model_dir)
    sys.setrecursionlimit(MOST_FRAMES)

    def prepare_one(work: Any) -> PreparationOutcome:
        segments = _RoutersSegments()
        outcome = prepare(work, text, segments)
        outcome.learned = None if outcome.error is not None else segments.learned
        return outcome

    return prepare_one


class _RoutersSegments:
    """Finds segments in the router's cache, and collects new ones, which go back with the outcome."""

    def __init__(self) -> None:
        self._new: dict[bytes, array[int]] = {}

    def find(self, keys: Sequence[bytes]) -> Sequence[array[int]]:
        try:
            _write(packed(SegmentQuery(b"".join(keys))))
            answer, _ = _read(sys.stdin.buffer) or (None, b"")
        except MemoryError:  # the rest of the answer would be read as the next request
            os.abort()
        if not isinstance(answer, Segments):
            raise TypeError("the router did not answer a query")
        tokens, ends = array("I", answer.tokens), itertools.accumulate(answer.counts)
        return [tokens[end - count : end] for end, count in zip(ends, answer.counts, strict=True)]

    def keep(self, key: bytes, tokens: array[int]) -> None:
        self._new[key] = tokens

    @property
    def learned(self) -> Segments | None:
        if not self._new:
            return None
        tokens = b"".join(each.tobytes() for each in self._new.values())
        return Segments(b"".join(self._new), tuple(map(len, self._new.values())), tokens)


def serve(load: Callable[[str], Callable[[Any], PreparationOutcome]], most: int) -> None:
    """Does the work that comes on stdin, with the function that `load` returns for the model's directory.

    `most`: bytes of address space for one piece of work, in addition to what the process has at its start. The command
    line is `PARENT NICE CPU_S MODEL_DIR DIGEST`. SIGPROF ends the process if one piece takes more than CPU_S seconds of
    processor time; 0 means no limit. The process also ends if the model's text files have another digest than DIGEST.
    """
    parent, nice, most_cpu_s, model_dir = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group; the router ends this later
        signal.signal(number, signal.SIG_IGN)
    os.nice(nice)
    give_large_buffers_back()
    with one_text(model_dir, sys.argv[5]):
        do = load(model_dir)
    give_holes_back()
    _limit_memory(most)
    _write(b"")
    while (frame := _read(sys.stdin.buffer)) is not None:
        work = dataclasses.replace(frame[0], body=frame[1])
        signal.setitimer(signal.ITIMER_PROF, most_cpu_s)
        try:
            outcome = do(work)
        except Exception as error:
            outcome = PreparationOutcome(error=InternalError(f"internal error: {type(error).__name__}: {error}"))
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(_packed(outcome))
        if len(work.body) >= LARGE_BYTES:
            del outcome, work, frame
            give_holes_back()


def _packed(outcome: PreparationOutcome) -> bytes:
    try:
        return packed(outcome)
    except ValueError:  # deeper than msgpack allows
        error = InvalidRequest("the request is nested too deeply")
        return packed(PreparationOutcome(error=error, tokens=outcome.tokens))


def _limit_memory(most: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + most
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def most_bytes(limit: Path) -> int:
    """Returns the bytes of address space for one request. `limit` is the file with a cgroup's (v2) memory limit."""
    value = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return MOST_BYTES if value == "max" else min(MOST_BYTES, int(value) // CGROUP_SHARE)


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(HEADER.pack(len(data), 0) + data)
    sys.stdout.buffer.flush()


def _read(stream: BinaryIO) -> tuple[Any, bytes] | None:
    """Returns a message of the router and its body, or None at the end of the stream."""
    head = stream.read(HEADER.size)
    if len(head) < HEADER.size:
        return None
    length, body_length = HEADER.unpack(head)
    return unpacked(stream.read(length), object), stream.read(body_length)


if __name__ == "__main__":
    main()
