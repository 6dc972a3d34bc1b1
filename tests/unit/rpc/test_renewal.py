"""A gRPC server's configuration is replaced seldom: handshakes beside a replacement end the process (gRPC 1.85)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certificates import Authority
from twostroke.rpc import tls
from twostroke.rpc.tls import SESSIONS_S, Renewal
from twostroke.security.tls import Certificates, CertificateUse


class Shown:
    """A renewal on a clock that the test moves, and the pauses that it made."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, asks_clients: bool) -> None:
        self.now_s = 0.0
        self.pauses: list[float] = []
        self.ca = Authority(folder)
        config = self.ca.config(self.ca.issue("server"))
        if not asks_clients:
            config = type(config)(cert=config.cert, key=config.key)
        monkeypatch.setattr(tls.time, "sleep", self.pauses.append)
        self.renewal = Renewal(Certificates(config, CertificateUse.CLIENTS), lambda: self.now_s)
        assert self.renewal.first() is not None


def test_handshakes_share_a_configuration_until_the_certificate_is_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Shown(tmp_path, monkeypatch, asks_clients=False)
    shown.now_s = 10 * SESSIONS_S
    assert [shown.renewal.next() for _ in range(1000)] == [None] * 1000
    shown.ca.issue("server")
    assert shown.renewal.next() is not None
    assert shown.renewal.next() is None
    assert len(shown.pauses) == 1, "for the handshakes that hold the one before"


def test_sessions_of_clients_with_certificates_end_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Shown(tmp_path, monkeypatch, asks_clients=True)
    assert shown.renewal.next() is None
    shown.now_s = SESSIONS_S + 1
    assert shown.renewal.next() is not None
    assert shown.renewal.next() is None
