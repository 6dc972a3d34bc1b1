"""What Ray's head asks for is looked at before Ray is loaded. A server of gRPC plays the head's."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from cluster.ray.address import GET_CLUSTER_ID, ray_head_address
from cluster.ray.credentials import CERTIFICATES
from tests.certificates import Authority, Issued
from twostroke.base.errors import ConfigError


@pytest.fixture(autouse=True)
def nothing_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("RAY_"):
            monkeypatch.delenv(name)


@contextmanager
def head(
    authority: Authority | None = None,
    issued: Issued | None = None,
    answer: Callable[[bytes, grpc.ServicerContext], bytes] = lambda request, context: request,
) -> Iterator[str]:
    """Its address. With certificates it wants one of whoever comes, as Ray's."""
    server = grpc.server(futures.ThreadPoolExecutor(1))
    handler = grpc.unary_unary_rpc_method_handler(answer)
    service, _, method = GET_CLUSTER_ID.removeprefix("/").partition("/")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
    if authority is None or issued is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        pairs = [(issued.key.read_bytes(), issued.cert.read_bytes())]
        own = grpc.ssl_server_credentials(pairs, authority.file.read_bytes(), require_client_auth=True)
        port = server.add_secure_port("127.0.0.1:0", own)
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def use(monkeypatch: pytest.MonkeyPatch, issued: Issued, authority: Authority) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    for name, path in zip(CERTIFICATES, (issued.cert, issued.key, authority.file), strict=True):
        monkeypatch.setenv(name, str(path))


def refusal(address: str) -> str:
    with pytest.raises(ConfigError) as refused:
        ray_head_address(address)
    return refused.value.message


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RAY_AUTH_MODE": "tokn"}, "RAY_AUTH_MODE must be token or disabled, got 'tokn'"),
        ({"RAY_AUTH_TOKEN_PATH": "/no/token"}, "RAY_AUTH_TOKEN_PATH /no/token: No such file or directory"),
        ({"RAY_AUTH_TOKEN_PATH": "/"}, "RAY_AUTH_TOKEN_PATH /: Is a directory"),
        ({"RAY_AUTH_TOKEN_PATH": "/dev/null"}, "RAY_AUTH_TOKEN_PATH /dev/null: the file is empty"),
        (
            {"RAY_USE_TLS": "1"},
            "RAY_USE_TLS needs RAY_TLS_SERVER_CERT, RAY_TLS_SERVER_KEY, RAY_TLS_CA_CERT, and RAY_TLS_S",
        ),
        ({"RAY_USE_TLS": "true", "RAY_TLS_SERVER_CERT": "/no/cert"}, "RAY_TLS_SERVER_CERT /no/cert: No such file"),
    ],
)
def test_what_is_missing_is_named_before_anybody_is_asked(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert refusal("127.0.0.1:1").startswith(said)


def test_a_token_in_the_environment_needs_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "5" * 64)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/no/token")
    with head() as address:
        assert ray_head_address(address) == address


def test_who_speaks_tls_and_who_does_not_find_out_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = Authority(tmp_path, "ours"), Authority(tmp_path, "theirs")
    issued, other = ours.issue("node"), theirs.issue("other")
    with head(ours, issued) as encrypted, head() as plain:
        assert ray_head_address(plain) == plain
        assert "Ray's head speaks TLS: set RAY_USE_TLS=1, RAY_TLS_SERVER_CERT" in refusal(encrypted)
        use(monkeypatch, issued, ours)
        assert ray_head_address(encrypted) == encrypted
        assert "Ray's head does not speak TLS, and RAY_USE_TLS is set here" in refusal(plain)
        use(monkeypatch, other, theirs)
        assert "shows a certificate that RAY_TLS_CA_CERT does not take" in refusal(encrypted)
        use(monkeypatch, Issued(issued.cert, other.key), ours)
        assert f"RAY_TLS_SERVER_KEY {other.key}: KEY_VALUES_MISMATCH" in refusal(encrypted)
