"""The path of a client's socket names its address, and is short enough for a Unix socket."""

from __future__ import annotations

from urllib.parse import quote

import pytest

from router.grpc_listener.client_names import client_host, socket_path
from router.grpc_listener.running import FOLDER, SUFFIX
from twostroke.security.trusted_paths import MOST_RUNTIME_BYTES

MOST_PATH_BYTES = 107


@pytest.mark.parametrize(
    ("host", "told"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("2001:db8:1234:5678:9abc:def0:1234:5678", "2001:db8:1234:5678:9abc:def0:1234:5678"),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.1"),
        ("fe80::1234:5678:9abc:def0%enp0s31f6", "fe80::1234:5678:9abc:def0"),
    ],
)
def test_every_address_fits_below_the_longest_folder_and_comes_back(host: str, told: str) -> None:
    backend = f"/{'r' * (MOST_RUNTIME_BYTES - 1)}/twostroke-{FOLDER}/{'0' * 16}{SUFFIX}"
    path = socket_path(backend, host, 65535)
    assert len(path) <= MOST_PATH_BYTES
    assert client_host(f"unix:{path}") == client_host(quote(f"unix:{path}")) == told


def test_a_peer_without_a_listener_before_it_is_its_address() -> None:
    assert client_host("ipv4:10.0.0.1:5000") == "10.0.0.1"
    assert client_host("ipv6:%5B::1%5D:5000") == "::1"
