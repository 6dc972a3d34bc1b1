"""One NIXL agent over one pool, reduced to the few calls that are used here.

NIXL's own Python wrapper lets every agent's progress thread spin on a core, so this goes to its bindings; hence
pyproject.toml fixes its version. All calls may come from any thread.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from twostroke.base.errors import ConfigError, PeerLost
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import Pages, PoolLocation
from twostroke.transfer.sockets.frames import Deadline

_PACKAGES = ("nixl_cu12", "nixl_cu13")
_BACKEND = "UCX"
_PROGRESS_US = 10_000
"""Longest sleep of an idle progress thread; it is woken by traffic. With NIXL's own 0 it takes a core."""
_DEFAULTS = {"UCX_TLS": "^sm,cuda_ipc", "UCX_TCP_TX_SEG_SIZE": "1m", "UCX_TCP_RX_SEG_SIZE": "1m"}
"""Defaults of UCX variables. No writes through shared mappings: they would continue after the reader has destroyed its
agent, and there are better transports within a host. Large segments halve the processor time per byte where UCX goes
over TCP."""
_SPINS = 50
_SPIN_S, _SLEEP_S = 20e-6, 300e-6
_LOOK_AROUND_EVERY = 16
"""Polls of a transfer between two checks that it is still wanted."""

log = logging.getLogger(__name__)


def load_bindings() -> ModuleType:
    """Loads the package for this CUDA version if known, else the first installed. Raises ConfigError without any."""
    torch = sys.modules.get("torch")
    cuda = torch.version.cuda if torch is not None else None
    for package in (f"nixl_cu{cuda.partition('.')[0]}",) if cuda else _PACKAGES:
        try:
            return importlib.import_module(f"{package}._bindings")
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
    raise ConfigError(
        "page transport nixl is not installed: pip install 'twostroke[nixl]', or leave it out of --transports",
        field="transports",
    )


@dataclass(frozen=True, slots=True)
class RemotePages:
    """Pages of another agent: its name, and a prepared list of pages."""

    agent: str
    handle: int


def place_of(memory: Pages) -> PoolLocation:
    """Returns where the pages lie. Raises ConfigError for pages in several places, which no agent can name."""
    if memory.place is None:
        raise ConfigError(
            "page transport nixl does not move pages whose parts lie on several devices: leave it out of --transports",
            field="transports",
        )
    return memory.place


class Agent:
    """An agent writes from its pool into remote pages, and lets agents that have its metadata write into its pool.

    Once it is closed, nothing is written into the pool through it.
    """

    def __init__(self, name: str, memory: Pages) -> None:
        self._nixl = load_bindings()
        for key, value in _DEFAULTS.items():
            os.environ.setdefault(key, value)
        try:
            # Peers on other hosts know an agent by its name. Process ids are not unique: those of containers repeat.
            self._agent: Any = self._create(f"{name}/{secrets.token_hex(16)}", memory)
            self._pool = self._prepare(self._nixl.NIXL_INIT_AGENT, place_of(memory), memory.layout)
            self.metadata = bytes(self._agent.getLocalMD())
        except ConfigError:
            raise
        except Exception as error:  # the bindings' classes have no base of their own
            raise ConfigError(f"page transport nixl cannot be used here: {error}", field="transports") from error

    def add(self, metadata: bytes, place: PoolLocation, layout: PoolLayout) -> RemotePages:
        """Prepares writes into a reader's pages. Raises PeerLost if its agent cannot be reached."""
        try:
            name = self._agent.loadRemoteMD(metadata).decode()
        except Exception as error:
            raise PeerLost(f"nixl: the reader's agent cannot be reached: {error}") from error
        try:
            return RemotePages(name, self._prepare(name, place, layout))
        except Exception as error:
            self._forget(name)
            raise PeerLost(f"nixl: the reader's pages cannot be written to: {error}") from error

    def remove(self, remote: RemotePages) -> None:
        """Disconnects from an agent. Writes to it end."""
        try:
            self._agent.releasedDlistH(remote.handle)
        except Exception as error:
            log.debug("nixl pages not released agent=%s error=%s", remote.agent, error)
        self._forget(remote.agent)

    def write(
        self,
        pages: npt.NDArray[np.int32],
        remote: RemotePages,
        remote_pages: npt.NDArray[np.int32],
        deadline: Deadline,
        is_wanted: Callable[[], bool],
    ) -> None:
        """Writes pages of the pool into remote ones, and waits until they are there.

        Raises TimeoutError at the deadline, EOFError if no longer wanted, PeerLost if NIXL fails. After an error the
        remote pages may still be written to until the remote agent is removed here, or closed there.
        """
        nixl, agent = self._nixl, self._agent
        try:
            request = agent.makeXferReq(nixl.NIXL_WRITE, self._pool, pages, remote.handle, remote_pages, b"", [], False)
        except Exception as error:
            raise PeerLost(f"nixl: {error}") from error
        try:
            self._finish(request, deadline, is_wanted)
        finally:
            self._release(request)

    def close(self) -> None:
        del self._agent  # the bindings destroy an agent when no reference to it is left

    def _create(self, name: str, memory: Pages) -> Any:
        nixl = self._nixl
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = _PROGRESS_US
        agent = nixl.nixlAgent(name, config)
        agent.createBackend(_BACKEND, {})
        place = place_of(memory)
        region = [(place.address, memory.layout.size_bytes, place.gpu or 0, "")]
        agent.registerMem(nixl.nixlRegDList(self._kind(place), region))
        return agent

    def _finish(self, request: int, deadline: Deadline, is_wanted: Callable[[], bool]) -> None:
        nixl, agent = self._nixl, self._agent
        try:
            status = agent.postXferReq(request)
            for look in itertools.count():
                if status != nixl.NIXL_IN_PROG:
                    break
                if look % _LOOK_AROUND_EVERY == _LOOK_AROUND_EVERY - 1:
                    deadline.remaining_s()
                    if not is_wanted():
                        raise EOFError("the reader has gone")
                time.sleep(_SPIN_S if look < _SPINS else _SLEEP_S)
                status = agent.getXferStatus(request)
        except (EOFError, TimeoutError):
            raise
        except Exception as error:
            raise PeerLost(f"nixl: {error}") from error
        if status != nixl.NIXL_SUCCESS:
            raise PeerLost(f"nixl: {status}")

    def _forget(self, agent: str) -> None:
        try:
            self._agent.invalidateRemoteMD(agent)
        except Exception as error:  # it has gone already
            log.debug("nixl agent not removed agent=%s error=%s", agent, error)

    def _release(self, request: int) -> None:
        try:
            self._agent.releaseXferReq(request)
        except Exception as error:  # it ends with its remote agent
            log.debug("nixl request not released error=%s", error)

    def _prepare(self, agent: str, place: PoolLocation, layout: PoolLayout) -> int:
        parts = []
        for start, region in zip(layout.starts, layout.regions, strict=True):
            rows = np.empty((region.pages, 3), np.uint64)
            rows[:, 0] = place.address + start + np.arange(region.pages, dtype=np.uint64) * np.uint64(region.page_bytes)
            rows[:, 1] = region.page_bytes
            rows[:, 2] = place.gpu or 0
            parts.append(rows)
        rows = np.concatenate(parts)
        descriptors = self._nixl.nixlXferDList(self._kind(place), rows)
        return int(self._agent.prepXferDlist(agent, descriptors, []))

    def _kind(self, place: PoolLocation) -> Any:
        return self._nixl.DRAM_SEG if place.gpu is None else self._nixl.VRAM_SEG
