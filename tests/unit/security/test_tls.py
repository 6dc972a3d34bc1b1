"""Certificates of a process: what cannot be used is said in one line, and what changes is used from then on."""

from __future__ import annotations

import contextlib
import datetime
import ssl
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.x509 import ObjectIdentifier, UnrecognizedExtension
from cryptography.x509.oid import ExtendedKeyUsageOID

from tests.certificates import DAY, Authority
from twostroke.base.credentials import TlsConfig
from twostroke.base.errors import ConfigError
from twostroke.security import tls
from twostroke.security.tls import Certificates, CertificateUse


@pytest.fixture
def ca(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def _missing(ca: Authority, folder: Path) -> TlsConfig:
    good = ca.issue("good")
    return TlsConfig(cert=str(good.cert), key=str(folder / "nowhere.key"), ca=str(ca.file))


def _another_key(ca: Authority, folder: Path) -> TlsConfig:
    good, other = ca.issue("good"), ca.issue("other")
    return TlsConfig(cert=str(good.cert), key=str(other.key), ca=str(ca.file))


def _garbage(ca: Authority, folder: Path) -> TlsConfig:
    good, garbage = ca.issue("good"), folder / "garbage"
    garbage.write_bytes(b"-----BEGIN PRIVATE KEY-----\nnone\n")
    return TlsConfig(cert=str(good.cert), key=str(garbage), ca=str(ca.file))


def _key_as_ca(ca: Authority, folder: Path) -> TlsConfig:
    good = ca.issue("good")
    return TlsConfig(cert=str(good.cert), key=str(good.key), ca=str(good.key))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_missing, "-key {folder}/nowhere.key cannot be read: No such file"),
        (_another_key, "-key {folder}/other.key is not the key of {flag}-cert {folder}/good.crt"),
        (_garbage, "-cert {folder}/good.crt with {flag}-key {folder}/garbage cannot be used"),
        (_key_as_ca, "-ca {folder}/good.key holds no certificate"),
        (lambda ca, _: ca.config(ca.issue("old", lasts=-DAY)), "-cert {folder}/old.crt has expired"),
        (
            lambda ca, _: ca.config(ca.issue("client", uses=(ExtendedKeyUsageOID.CLIENT_AUTH,))),
            "-cert {folder}/client.crt is not made for this",
        ),
    ],
)
@pytest.mark.parametrize("use", list(CertificateUse))
def test_what_cannot_be_used_is_refused_by_flag_and_file(
    make: Callable[[Authority, Path], TlsConfig], said: str, use: CertificateUse, ca: Authority, tmp_path: Path
) -> None:
    flag = use.ca_flag.removesuffix("-ca") if "-ca " in said else use.value
    with pytest.raises(ConfigError) as refused:
        Certificates(make(ca, tmp_path), use)
    assert refused.value.message.startswith(flag + said.format(folder=tmp_path, flag=use.value))
    assert "\n" not in refused.value.message


def test_files_that_change_while_they_are_read_are_never_mixed(ca: Authority, monkeypatch: pytest.MonkeyPatch) -> None:
    issued = ca.issue("worker")
    certificates = Certificates(ca.config(issued), CertificateUse.CLUSTER)
    ca.issue("worker")
    really, changes = Path.read_bytes, 0

    def read_and_change(path: Path) -> bytes:
        nonlocal changes
        content = really(path)
        if path == issued.cert and changes == 0:
            changes += 1
            ca.issue("worker")
        return content

    monkeypatch.setattr(Path, "read_bytes", read_and_change)
    pem = certificates.pem
    assert changes == 1
    assert (pem.cert, pem.key) == (really(issued.cert), really(issued.key))


def test_a_cluster_wants_its_own_ca_and_its_own_name(ca: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger").issue("from-elsewhere")
    with pytest.raises(ConfigError, match=r"--cluster-tls-cert .*elsewhere.crt does not come from the CA in .*ca.pem"):
        Certificates(ca.config(stranger), CertificateUse.CLUSTER)
    with pytest.raises(ConfigError, match=r"--cluster-tls-cert .*nameless.crt does not name twostroke.cluster"):
        Certificates(ca.config(ca.issue("nameless", names=("localhost",))), CertificateUse.CLUSTER)


def test_a_ca_that_has_expired_is_named_and_not_the_certificate(tmp_path: Path) -> None:
    ca = Authority(tmp_path, "old-ca", lasts=-DAY)
    with pytest.raises(ConfigError, match=r"^--cluster-tls-ca .*old-ca.pem .*has expired"):
        Certificates(ca.config(ca.issue("good")), CertificateUse.CLUSTER)


@pytest.mark.parametrize("use", list(CertificateUse))
def test_a_certificate_that_nobody_would_trust_is_refused_for_what_is_wrong_with_it(
    ca: Authority, use: CertificateUse
) -> None:
    odd = ca.issue("odd", critical=(UnrecognizedExtension(ObjectIdentifier("1.2.3.4"), b"?"),))
    with pytest.raises(ConfigError, match=rf"^{use.value}-cert .*odd.crt .*unhandled critical extension") as refused:
        Certificates(TlsConfig(cert=str(odd.cert), key=str(odd.key), ca=str(ca.file)), use)
    assert "does not come from" not in refused.value.message


def test_changed_files_are_used_and_broken_ones_are_not(
    ca: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tls, "RETRY_S", 0.0)
    issued = ca.issue("worker")
    certificates = Certificates(ca.config(issued), CertificateUse.CLUSTER)
    first = certificates.server
    assert certificates.server is first
    assert abs(certificates.expires_s - time.time() - DAY.total_seconds()) < 60

    good = issued.cert.read_bytes()
    ca.issue("worker", lasts=datetime.timedelta(days=9))
    second = certificates.server
    assert second is not first
    assert certificates.expires_s - time.time() > 8 * DAY.total_seconds()

    issued.cert.write_bytes(good)  # of another key
    assert certificates.server is second
    assert "--cluster-tls-key" in caplog.text
    assert "not renewed" in caplog.text
    issued.key.unlink()
    assert certificates.server is second
    ca.issue("worker")
    assert certificates.server is not second


@pytest.mark.parametrize("use", list(CertificateUse))
def test_who_must_show_a_certificate_and_shows_none_or_a_strangers_is_not_let_in(
    ca: Authority, tmp_path: Path, use: CertificateUse
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    stranger = Authority(elsewhere).issue("stranger")
    certificates = Certificates(ca.config(ca.issue("good")), use)
    for server in (certificates.server, certificates.renewing_server()):
        for shown in (None, stranger):
            client = ssl.create_default_context(cafile=str(ca.file))
            client.check_hostname = False
            if shown is not None:
                client.load_cert_chain(shown.cert, shown.key)
            with pytest.raises(ssl.SSLError):
                tls._handshake_in_memory(server, client, "localhost")
        client.load_cert_chain((mine := ca.issue("client")).cert, mine.key)
        assert tls._handshake_in_memory(server, client, "localhost") > time.time()


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_who_must_show_a_certificate_does_not_come_back_with_a_session(ca: Authority, newest: ssl.TLSVersion) -> None:
    certificates = Certificates(ca.config(ca.issue("good")), CertificateUse.CLIENTS)
    client = ssl.create_default_context(cafile=str(ca.file))
    client.load_cert_chain((mine := ca.issue("client")).cert, mine.key)
    client.maximum_version = newest
    for server in (certificates.server, certificates.renewing_server()):
        assert not _resumes(server, client)


def _resumes(server_context: ssl.SSLContext, client_context: ssl.SSLContext) -> bool:
    open_sides: list[ssl.SSLObject] = []  # OpenSSL forgets the session of a connection that ends without a goodbye
    session: ssl.SSLSession | None = None
    for _ in range(2):
        up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = client_context.wrap_bio(down, up, server_hostname="localhost", session=session)
        server = server_context.wrap_bio(up, down, server_side=True)
        open_sides += [client, server]
        try:
            for side in 3 * (client, server):
                with contextlib.suppress(ssl.SSLWantReadError):
                    side.do_handshake()
        except ssl.SSLError:  # not even the first time
            return False
        session = client.session
    return bool(client.session_reused)
