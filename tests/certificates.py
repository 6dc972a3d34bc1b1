"""Certificates for tests: a CA of their own, good and bad ones from it. Keys are on a curve: made in no time."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from twostroke.base.credentials import CLUSTER_NAME, TlsConfig

DAY = datetime.timedelta(days=1)
BOTH_SIDES = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)


@dataclass(frozen=True, slots=True)
class Issued:
    """A certificate and its key, as files."""

    cert: Path
    key: Path


class Authority:
    """A CA; what it issues lies in `folder`."""

    def __init__(self, folder: Path, name: str = "ca", lasts: datetime.timedelta = DAY) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self.file = folder / f"{name}.pem"
        builder = _builder(self._name, self._name, self._key.public_key(), lasts)
        self._cert = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True).sign(
            self._key, hashes.SHA256()
        )
        self.file.write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))

    def issue(
        self,
        name: str,
        *,
        names: tuple[str, ...] = (CLUSTER_NAME, "localhost"),
        uses: tuple[x509.ObjectIdentifier, ...] = BOTH_SIDES,
        lasts: datetime.timedelta = DAY,
        critical: tuple[x509.UnrecognizedExtension, ...] = (),
    ) -> Issued:
        """`lasts` below zero: it has ended. `critical`: who does not know them must
        refuse it. Issued again under the same name, it takes the place of the one before.
        """
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        alternatives = [*(x509.DNSName(each) for each in names), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = (
            _builder(subject, self._name, key.public_key(), lasts)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        )
        for extension in critical:
            builder = builder.add_extension(extension, critical=True)
        issued = Issued(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        cert = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        pem = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        for path, content in ((issued.key, key.private_bytes(*pem)), (issued.cert, cert)):
            draft = path.with_suffix(".draft")
            draft.write_bytes(content)
            draft.chmod(0o600)
            draft.replace(path)
        return issued

    def config(self, issued: Issued) -> TlsConfig:
        """The settings of one who shows this certificate, and wants to see another one from here."""
        return TlsConfig(cert=str(issued.cert), key=str(issued.key), ca=str(self.file))


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, lasts: datetime.timedelta
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - 2 * DAY)
        .not_valid_after(now + lasts)
    )
