"""Which transport a pair of workers takes."""

from __future__ import annotations

import pytest

from twostroke.errors import ConfigError, PeerLost
from twostroke.ids import Epoch
from twostroke.transfer.base import Endpoint
from twostroke.transfer.host import host_id
from twostroke.transfer.registry import choose, open_transports


def endpoint(transport: str, address: str, host: str) -> Endpoint:
    return Endpoint(transport, address, host, Epoch(1, 1), "fingerprint", 1, 1)


NEAR = [endpoint("tcp", "127.0.0.1:5", host_id()), endpoint("shm", "x", host_id())]
FAR = [endpoint("shm", "x", "elsewhere/1"), endpoint("tcp", "10.0.0.7:5", "elsewhere/1")]


def test_our_order_of_preference_counts() -> None:
    for names in (("shm", "tcp"), ("tcp", "shm")):
        transport, chosen = choose(NEAR, open_transports(names, "127.0.0.1"))
        assert (transport.name, chosen.transport) == (names[0], names[0])


def test_a_transport_that_does_not_lead_there_is_passed_over() -> None:
    transport, chosen = choose(FAR, open_transports(["shm", "tcp"], "127.0.0.1"))
    assert transport.name == "tcp"
    assert chosen is FAR[1]


def test_common_transports_that_do_not_lead_there_are_a_lost_peer() -> None:
    with pytest.raises(PeerLost, match=r"shm at x on elsewhere/1.*here are \['shm'\]"):
        choose(FAR, open_transports(["shm"], "127.0.0.1"))


def test_no_transport_in_common_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="no page transport"):
        choose(NEAR[:1], open_transports(["shm"], "127.0.0.1"))
    with pytest.raises(ConfigError, match="offers none"):
        choose([], open_transports(["shm"], "127.0.0.1"))


@pytest.mark.parametrize("names", [["nixl"], ["shm", "shm"], []])
def test_unknown_repeated_or_no_names_are_config_errors(names: list[str]) -> None:
    with pytest.raises(ConfigError, match="shm, tcp"):
        open_transports(names, "127.0.0.1")


def test_an_endpoint_travels_as_bytes() -> None:
    assert Endpoint.unpack(FAR[0].pack()) == FAR[0]
