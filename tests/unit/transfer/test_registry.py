"""Which transport a pair of workers takes."""

from __future__ import annotations

import pytest
import torch

from tests.unit.transfer.makers import HostSharing
from twostroke.base.errors import ConfigError, PeerLost
from twostroke.base.ids import Epoch
from twostroke.device.memory import DeviceMemory
from twostroke.engine.ranks.cuda import RankedDeviceMemory
from twostroke.kv_cache.layout import PoolLayout
from twostroke.kv_cache.memory import PageMemory, Pages
from twostroke.transfer.base import Identity, PageEndpoint, host_id
from twostroke.transfer.network import nixl_agent
from twostroke.transfer.registry import default_names, leading_to, open_transports
from twostroke.transfer.same_host.cuda_ipc import CudaIpcTransport


def endpoint(transport: str, address: str, host: str) -> PageEndpoint:
    return PageEndpoint(transport, address, host, Epoch(1, 1), "fingerprint", PoolLayout.of(1, 1))


NEAR = [endpoint("tcp", "127.0.0.1:5", host_id()), endpoint("shm", "x", host_id())]
FAR = [endpoint("shm", "x", "elsewhere/1"), endpoint("tcp", "10.0.0.7:5", "elsewhere/1")]


def test_our_order_of_preference_counts() -> None:
    for names in (("shm", "tcp"), ("tcp", "shm")):
        found = leading_to(NEAR, open_transports(names, "127.0.0.1", 2.0))
        assert [(transport.name, chosen.transport) for transport, chosen in found] == [(name, name) for name in names]


def test_a_transport_that_does_not_lead_there_is_passed_over() -> None:
    ((transport, chosen),) = leading_to(FAR, open_transports(["shm", "tcp"], "127.0.0.1", 2.0))
    assert transport.name == "tcp"
    assert chosen is FAR[1]


def test_common_transports_that_do_not_lead_there_are_a_lost_peer() -> None:
    with pytest.raises(PeerLost, match=r"shm at x on elsewhere/1.*here are \['shm'\]"):
        leading_to(FAR, open_transports(["shm"], "127.0.0.1", 2.0))


def test_no_transport_in_common_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no page transport"):
        leading_to(NEAR[:1], open_transports(["shm"], "127.0.0.1", 2.0))
    with pytest.raises(ConfigError, match="offers none"):
        leading_to([], open_transports(["shm"], "127.0.0.1", 2.0))


@pytest.mark.parametrize("names", [["pigeon"], ["shm", "shm"], []])
def test_unknown_repeated_or_no_names_are_config_errors(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="cuda_ipc, shm, nixl, tcp"):
        open_transports(names, "127.0.0.1", 2.0)


def test_transports_follow_the_memory_that_the_pages_are_in() -> None:
    host, device = PageMemory(1, 8), DeviceMemory(1, 8, torch.device("cpu"))
    assert default_names(host) == ("shm", "tcp")
    assert default_names(device) == ("cuda_ipc", "tcp")
    parts = in_parts(device)
    assert default_names(parts) == ("tcp",)
    host.close()
    parts.close()


def in_parts(own: DeviceMemory) -> RankedDeviceMemory:
    """Returns pages of two ranks."""
    return RankedDeviceMemory(PoolLayout.of(1, 16), 2, own, [torch.zeros_like(own.tensor)])


def test_nixl_refuses_pages_in_parts_of_several_devices() -> None:
    parts = in_parts(DeviceMemory(1, 8, torch.device("cpu")))
    with pytest.raises(ConfigError, match="nixl does not move pages whose parts lie on several devices"):
        nixl_agent.place_of(parts)
    parts.close()


@pytest.mark.parametrize(
    ("name", "memory"),
    [("shm", "DeviceMemory"), ("cuda_ipc", "PageMemory"), ("cuda_ipc", "RankedDeviceMemory")],
)
async def test_a_transport_refuses_pages_that_it_cannot_move(name: str, memory: str) -> None:
    pages: Pages = PageMemory(1, 8) if memory == "PageMemory" else DeviceMemory(1, 8, torch.device("cpu"))
    if memory == "RankedDeviceMemory":
        assert isinstance(pages, DeviceMemory)
        pages = in_parts(pages)
    (transport,) = open_transports([name], "127.0.0.1", 2.0)
    with pytest.raises(ConfigError, match=rf"{name}.*{memory}.*leave it out of --transports"):
        await transport.open(pages, Identity("worker", Epoch(1, 1), "fingerprint", ""))
    pages.close()


def test_without_its_package_nixl_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ("nixl_of_nowhere",))
    with pytest.raises(ConfigError, match=r"pip install 'twostroke\[nixl\]'"):
        open_transports(["nixl"], "127.0.0.1", 2.0)


async def test_cuda_ipc_reaches_devices_of_this_host_that_ours_can_copy_from() -> None:
    transport = CudaIpcTransport(HostSharing())
    near = endpoint("cuda_ipc", "x cpu-0", host_id())
    assert not transport.reaches(near)  # where ours is, is not known yet
    memory = DeviceMemory(1, 1, torch.device("cpu"))
    await transport.open(memory, Identity("worker", Epoch(1, 1), "fingerprint", ""))
    assert transport.reaches(near)
    assert not transport.reaches(endpoint("cuda_ipc", "x GPU-f00", host_id()))
    assert not transport.reaches(endpoint("cuda_ipc", "x cpu-0", "elsewhere/1"))
    await transport.close()
    memory.close()


def test_an_endpoint_travels_as_bytes() -> None:
    assert PageEndpoint.unpack(FAR[0].pack()) == FAR[0]
