"""The certificates of a process: read, tried out, and read again when their files change.

    start      read -> tried out on themselves -> in use, or ConfigError that names flag and file
    handshake  files changed? -> read -> tried out -> in use, or a warning, and what was in use stays

Nothing watches the files between handshakes: only those need them. A connection keeps what it began with.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import ssl
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from twostroke.base.credentials import CLUSTER_NAME, TlsConfig
from twostroke.base.errors import ConfigError

log = logging.getLogger(__name__)

Content = TypeVar("Content")

RETRY_S = 1.0
"""Files that could not be used are read again after this time: one may be new before the other, or not valid yet."""
READS = 3
"""Reads of files that change meanwhile: a program that renews them writes one after the other."""
_WHY = {
    10: "has expired: issue a new one",
    9: "is not valid yet: look at this machine's clock",
    26: "is not made for this (extended key usage): servers need serverAuth, processes of a cluster clientAuth as well",
    62: f"does not name {CLUSTER_NAME} (a DNS name in subjectAltName)",
}
"""OpenSSL's X509_V_ERR codes, in plain words."""
_TIME_CODES = frozenset({9, 10})
"""Codes for a certificate that is not valid at this time. They do not say which one of a chain it is."""
_ISSUER_CODES = frozenset({2, 7, 18, 19, 20, 21})
"""Codes for a certificate that no trusted CA has issued."""


class CertificateUse(enum.Enum):
    """What a certificate is for; the values are what the names of its flags begin with."""

    CLIENTS = "--tls"
    """Clients of the router; they may have to show certificates as well."""
    CLUSTER = "--cluster-tls"
    """Processes of one cluster: each has a certificate with CLUSTER_NAME in it, and each looks at the other's."""

    @property
    def ca_flag(self) -> str:
        return "--tls-client-ca" if self is CertificateUse.CLIENTS else "--cluster-tls-ca"


@dataclass(frozen=True, slots=True)
class Pem:
    """What is in the files."""

    cert: bytes
    key: bytes
    ca: bytes | None


@dataclass(frozen=True, slots=True)
class _Loaded:
    pem: Pem
    server: ssl.SSLContext
    client: ssl.SSLContext
    expires_s: float


_Stamp = list[tuple[int, ...]]


class Certificates:
    """The certificates of one use. Raises ConfigError if they cannot be used; later failures are logged, and the
    certificates in use stay.

    May be asked on any thread.
    """

    def __init__(self, config: TlsConfig, use: CertificateUse, sockets: type[ssl.SSLSocket] = ssl.SSLSocket) -> None:
        """`sockets`: what the contexts make of connections."""
        self._config = config
        self._use = use
        self._sockets = sockets
        self._lock = threading.Lock()
        self._retry_at_s = 0.0
        self._stamp, self._loaded = self._read_in()

    @property
    def pem(self) -> Pem:
        return self._current().pem

    @property
    def server(self) -> ssl.SSLContext:
        """For the next connection that comes in."""
        return self._current().server

    @property
    def client(self) -> ssl.SSLContext:
        """For the next connection to another process of the cluster."""
        assert self._use is CertificateUse.CLUSTER
        return self._current().client

    @property
    def asks_clients(self) -> bool:
        """Whether the other side must show a certificate."""
        return self._config.ca is not None

    @property
    def expires_s(self) -> float:
        """When the certificate in use ends, in seconds since 1970."""
        return self._current().expires_s

    def renewing_server(self) -> ssl.SSLContext:
        """Returns a context for users that keep one for all connections. Each connection gets the current
        certificate.
        """
        context = _server_context(self._config, self._sockets)

        def renew(sock: ssl.SSLSocket | ssl.SSLObject, name: str | None, before: ssl.SSLContext) -> None:
            del name, before
            sock.context = self.server

        context.sni_callback = renew
        return context

    def _current(self) -> _Loaded:
        with self._lock:
            if time.monotonic() >= self._retry_at_s:
                try:
                    if self._current_stamp() != self._stamp:
                        self._stamp, self._loaded = self._read_in()
                except ConfigError as error:
                    self._retry_at_s = time.monotonic() + RETRY_S
                    log.warning("certificates not renewed, the ones before stay in use error=%s", error.message)
            return self._loaded

    def _read_in(self) -> tuple[_Stamp, _Loaded]:
        """Reads all files, and reads them again if one changed meanwhile. gRPC gets what was read, and OpenSSL reads
        for itself.
        """
        for _ in range(READS):
            stamp = self._current_stamp()
            loaded = self._load()
            if self._current_stamp() == stamp:
                return stamp, loaded
        flag, path = self._files()[0]
        raise ConfigError(f"{flag} {path} and the files beside it change while they are read", field=flag)

    def _current_stamp(self) -> _Stamp:
        """Returns a stamp that changes when a file is written, replaced or linked elsewhere."""
        stats = [_read(flag, path, Path(path).stat) for flag, path in self._files()]
        return [(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for stat in stats]

    def _files(self) -> list[tuple[str, str]]:
        """Returns the files, each with its flag."""
        prefix, config = self._use.value, self._config
        files = [(f"{prefix}-cert", config.cert), (f"{prefix}-key", config.key)]
        return files if config.ca is None else [*files, (self._use.ca_flag, config.ca)]

    def _load(self) -> _Loaded:
        contents = [_read(flag, path, Path(path).read_bytes) for flag, path in self._files()]
        for (flag, path), content in zip(self._files(), contents, strict=True):
            if b"-----BEGIN " not in content:
                raise ConfigError(f"{flag} {path} is no PEM file: no line of it begins with -----BEGIN", field=flag)
        pem = Pem(contents[0], contents[1], contents[2] if len(contents) > 2 else None)
        try:
            server, client = (make(self._config, self._sockets) for make in (_server_context, _client_context))
            expires_s = self._try_out()
        except ssl.SSLError as error:
            raise self._explained(error) from error
        log.info("certificate in use flag=%s-cert file=%s expires_s=%d", self._use.value, self._config.cert, expires_s)
        return _Loaded(pem, server, client, expires_s)

    def _try_out(self) -> float:
        """Performs a handshake in memory with a peer that checks the certificate as others will. Returns its expiry in
        seconds since 1970.
        """
        if self._use is CertificateUse.CLIENTS:
            return self._try_out_alone()
        server, client = (make(self._config, self._sockets) for make in (_server_context, _client_context))
        return _handshake_in_memory(server, client, CLUSTER_NAME)

    def _try_out_alone(self) -> float:
        """Performs the handshake with a peer that trusts this certificate, whoever issued it."""
        alone = TlsConfig(cert=self._config.cert, key=self._config.key)
        return _handshake_in_memory(_server_context(alone, self._sockets), _trusting_context(alone.cert), None)

    def _explained(self, error: ssl.SSLError) -> ConfigError:
        (cert_flag, cert), (key_flag, key), *_ = self._files()
        if isinstance(error, ssl.SSLCertVerificationError):
            return self._not_verified(error)
        if error.reason == "KEY_VALUES_MISMATCH":
            return ConfigError(f"{key_flag} {key} is not the key of {cert_flag} {cert}", field=key_flag)
        if error.reason == "NO_CERTIFICATE_OR_CRL_FOUND":
            return ConfigError(f"{self._use.ca_flag} {self._config.ca} holds no certificate", field=self._use.ca_flag)
        why = (error.reason or str(error)).lower().replace("_", " ")
        return ConfigError(
            f"{cert_flag} {cert} with {key_flag} {key} cannot be used ({why}): give a certificate, and its key without "
            "a password, as PEM",
            field=cert_flag,
        )

    def _not_verified(self, error: ssl.SSLCertVerificationError) -> ConfigError:
        (cert_flag, cert), ca_flag, ca = self._files()[0], self._use.ca_flag, self._config.ca
        why = _WHY.get(error.verify_code, f"cannot be used: {error.verify_message}")
        if error.verify_code in _ISSUER_CODES:
            why = f"does not come from the CA in {ca_flag} {ca}: {error.verify_message}"
        if error.verify_code in _TIME_CODES and self._use is CertificateUse.CLUSTER:
            with contextlib.suppress(ssl.SSLCertVerificationError):
                self._try_out_alone()
                of_ca = f"{ca_flag} {ca} (or a certificate between it and {cert_flag} {cert})"
                return ConfigError(f"{of_ca} {why}", field=ca_flag)
        return ConfigError(f"{cert_flag} {cert} {why}", field=cert_flag)


def check_certificates(endpoints: TlsConfig | None, cluster: TlsConfig | None) -> None:
    """Raises ConfigError where one of them cannot be used, before anything is started that needs it."""
    for config, use in ((endpoints, CertificateUse.CLIENTS), (cluster, CertificateUse.CLUSTER)):
        if config is not None:
            Certificates(config, use)


def _read(flag: str, path: str, read: Callable[[], Content]) -> Content:
    try:
        return read()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{flag} {path} cannot be read: {why}", field=flag) from error


def _server_context(config: TlsConfig, sockets: type[ssl.SSLSocket]) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_SERVER, config, sockets)
    # No session tickets: every handshake must check the certificate.
    context.num_tickets = 0
    context.options |= ssl.OP_NO_TICKET
    if config.ca is not None:
        # TLS 1.2 also resumes sessions that the server has kept, by their id. Such a client shows no certificate.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(config.ca)
    return context


def _client_context(config: TlsConfig, sockets: type[ssl.SSLSocket]) -> ssl.SSLContext:
    context = _context(ssl.PROTOCOL_TLS_CLIENT, config, sockets)
    if config.ca is not None:
        context.load_verify_locations(config.ca)
    return context


def _context(protocol: int, config: TlsConfig, sockets: type[ssl.SSLSocket]) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.sslsocket_class = sockets
    context.load_cert_chain(config.cert, config.key, password=lambda: "")  # without it, OpenSSL asks at the terminal
    return context


def _trusting_context(cert: str) -> ssl.SSLContext:
    """Returns a client context that trusts exactly this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(cert)
    return context


def _handshake_in_memory(server_context: ssl.SSLContext, client_context: ssl.SSLContext, name: str | None) -> float:
    """Performs a handshake in memory. Returns when the server's certificate ends. Raises SSLError as either
    side does.
    """
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_context.wrap_bio(down, up, server_hostname=name)
    server = server_context.wrap_bio(up, down, server_side=True)
    waiting = [client, server]
    while waiting:
        side = waiting.pop(0)
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            waiting.append(side)
    told = client.getpeercert()
    assert told is not None
    return ssl.cert_time_to_seconds(str(told["notAfter"]))
