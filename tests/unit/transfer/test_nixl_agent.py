"""One NIXL agent over bindings that only take notes: names, and what is left when something fails."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from twostroke.base.errors import PeerLost
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageMemory, PoolLocation
from twostroke.transfer.network import nixl_agent
from twostroke.transfer.network.nixl_agent import Agent, RemotePages


class Bindings(SimpleNamespace):
    """The bindings of NIXL, as far as an agent needs them before it writes."""

    NIXL_INIT_AGENT, NIXL_THREAD_SYNC_STRICT, DRAM_SEG, VRAM_SEG = "", 1, 2, 3

    def __init__(self) -> None:
        super().__init__(nixlAgentConfig=SimpleNamespace, nixlRegDList=_take, nixlXferDList=_take)
        self.names: list[str] = []
        self.forgotten: list[str] = []
        self.failing: set[str] = set()

    def nixlAgent(self, name: str, _config: object) -> Any:  # noqa: N802
        self.names.append(name)
        return SimpleNamespace(
            createBackend=_take,
            registerMem=_take,
            getLocalMD=lambda: b"metadata",
            loadRemoteMD=lambda _: b"reader",
            prepXferDlist=lambda agent, *_: self._may_fail("prepare", agent) or 5,
            releasedDlistH=lambda handle: self._may_fail("release", handle),
            invalidateRemoteMD=self.forgotten.append,
        )

    def _may_fail(self, call: str, argument: object) -> None:
        if call in self.failing and argument != self.NIXL_INIT_AGENT:
            raise RuntimeError(f"{call} failed")


def _take(*_: object) -> None: ...


@pytest.fixture
def bindings(monkeypatch: pytest.MonkeyPatch) -> Bindings:
    fake = Bindings()
    monkeypatch.setattr(nixl_agent, "load_bindings", lambda: fake)
    for key in nixl_agent._DEFAULTS:
        monkeypatch.setenv(key, os.environ.get(key, ""))  # what an agent sets is taken back
    return fake


def test_no_two_agents_have_one_name_whatever_machines_their_processes_are_on(
    bindings: Bindings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In containers all of them may have the same process id; an owner would take one reader for another."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    memory = PageMemory(2, 64)
    for _ in range(3):
        monkeypatch.setattr(nixl_agent, "_numbers", iter(range(10)), raising=False)  # as in a new process
        Agent("reader", memory).close()
    assert len(set(bindings.names)) == 3
    memory.close()


def test_a_reader_whose_pages_are_refused_is_forgotten(bindings: Bindings) -> None:
    memory = PageMemory(2, 64)
    agent = Agent("owner", memory)
    bindings.failing = {"prepare"}
    with pytest.raises(PeerLost, match="cannot be written to: prepare failed"):
        agent.add(b"metadata", PoolLocation(4096, None), PoolLayout.of(2, 64))
    assert bindings.forgotten == ["reader"]
    memory.close()


def test_a_reader_is_hung_up_on_even_where_its_pages_cannot_be_released(bindings: Bindings) -> None:
    memory = PageMemory(2, 64)
    agent = Agent("owner", memory)
    remote = agent.add(b"metadata", PoolLocation(4096, None), PoolLayout.of(2, 64))
    assert remote == RemotePages("reader", 5)
    bindings.failing = {"release"}
    agent.remove(remote)
    assert bindings.forgotten == ["reader"]
    memory.close()
