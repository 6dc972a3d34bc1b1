"""Numbers and the lock of router processes, which the kernel takes back from those that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from router.shared_memory import LOCK_WAIT_S, MOST_PROCESSES, RouterMemory, create_router_memory
from twostroke.base.errors import ConfigError


@pytest.fixture
def descriptor() -> Iterator[int]:
    created = create_router_memory()
    yield created
    os.close(created)


def test_every_process_has_a_number_of_its_own_and_gives_it_back_with_its_end(descriptor: int) -> None:
    processes = [RouterMemory.inherited(descriptor) for _ in range(MOST_PROCESSES)]
    assert [process.number for process in processes] == list(range(MOST_PROCESSES))
    with pytest.raises(ConfigError, match="32 router processes are here already"):
        RouterMemory.inherited(descriptor)
    assert not processes[0].has_ended(5)
    processes[5].bytes[5 * 64] = 7
    processes[5].close()
    processes[0]._alive_s.clear()  # as it is a moment later
    assert processes[0].has_ended(5)
    revived = RouterMemory.inherited(descriptor)
    assert (revived.number, revived.bytes[5 * 64]) == (5, 0)


def test_what_is_no_memory_of_routers_is_refused() -> None:
    with pytest.raises(ConfigError, match="descriptor 987 is no memory of routers"):
        RouterMemory.inherited(987)


_HOLDER = """
import sys
from router.shared_memory import RouterMemory
shared = RouterMemory.inherited(int(sys.argv[1]))
with shared.locked():
    print("locked", flush=True)
    sys.stdin.readline()
"""


def test_nobody_waits_long_for_a_frozen_process_and_a_dead_one_has_no_lock(descriptor: int) -> None:
    shared = RouterMemory.inherited(descriptor)
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(descriptor)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=[descriptor],
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"locked\n"
    os.kill(holder.pid, signal.SIGSTOP)
    begun_s = time.monotonic()
    for _ in range(1000):
        with shared.locked():
            pass
    assert time.monotonic() - begun_s < 0.5 < 1000 * LOCK_WAIT_S, "each has waited"
    assert not shared.has_ended(1)
    holder.kill()
    holder.communicate()
    shared._alive_s.clear()
    assert shared.has_ended(1)
    assert shared._take_lock(descriptor)
