"""cert-manager's Certificates, whose CRDs are not here: by what its documentation says of their fields."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.deploy.manifests.cluster_files import files_of
from tests.deploy.manifests.objects import Bundle, Complaint, Object, name_of, namespace_of, where
from twostroke.base.credentials import CLUSTER_NAME

_FIELDS = frozenset({
    "additionalOutputFormats", "commonName", "dnsNames", "duration", "emailAddresses", "encodeUsagesInRequest",
    "ipAddresses", "isCA", "issuerRef", "keystores", "literalSubject", "nameConstraints", "otherNames", "privateKey",
    "renewBefore", "renewBeforePercentage", "revisionHistoryLimit", "secretName", "secretTemplate",
    "signatureAlgorithm", "subject", "uris", "usages",
})  # fmt: skip
_NAMES = ("commonName", "dnsNames", "emailAddresses", "ipAddresses", "literalSubject", "otherNames", "uris")
_USAGES = frozenset({
    "any", "cert sign", "client auth", "code signing", "content commitment", "crl sign", "data encipherment",
    "decipher only", "digital signature", "email protection", "encipher only", "ipsec end system", "ipsec tunnel",
    "ipsec user", "key agreement", "key encipherment", "microsoft sgc", "netscape sgc", "ocsp signing", "s/mime",
    "server auth", "signing", "timestamping",
})  # fmt: skip
_NEEDED_USAGES = frozenset({"server auth", "client auth"})


def certificates_are_complete(item: Object) -> Iterator[Complaint]:
    if item.get("kind") != "Certificate":
        return
    spec = item["spec"]
    for field in sorted(set(spec) - _FIELDS):
        yield Complaint(where(item), f"spec.{field}", "unknown field", f"known are: {', '.join(sorted(_FIELDS))}")
    if not spec.get("secretName"):
        yield Complaint(where(item), "spec.secretName", "none", "name the Secret that shall have it")
    if not (spec.get("issuerRef") or {}).get("name"):
        yield Complaint(where(item), "spec.issuerRef.name", "none", "name the Issuer")
    if not any(spec.get(field) for field in _NAMES):
        yield Complaint(where(item), "spec.dnsNames", "it is for nobody", "name whom it is for")
    for usage in sorted(set(spec.get("usages") or []) - _USAGES):
        yield Complaint(where(item), "spec.usages", f"{usage!r} is not a usage", "write server auth, client auth")
    lasts_s, renewed = (_seconds(str(spec.get(field, ""))) for field in ("duration", "renewBefore"))
    if lasts_s and renewed and renewed >= lasts_s:
        what = f"{spec['renewBefore']} is not shorter than {spec['duration']}"
        yield Complaint(where(item), "spec.renewBefore", what, "renew after two thirds of its life")


def cluster_certificates_fit(bundle: Bundle) -> Iterator[Complaint]:
    """One for all processes, which are servers and clients of each other."""
    secured = any(file.config.certificates.cluster is not None for _, _, file in files_of(bundle))
    mounted = {
        (pod.namespace, (volume.get("secret") or {}).get("secretName"))
        for pod in bundle.pods
        for volume in pod.spec.get("volumes") or []
        if pod.owner == "RayCluster"
    }
    for item in bundle.of("Certificate") if secured else ():
        spec = item["spec"]
        if (namespace_of(item), spec.get("secretName")) not in mounted:
            continue
        if CLUSTER_NAME not in (spec.get("dnsNames") or []):
            yield Complaint(where(item), "spec.dnsNames", f"{CLUSTER_NAME} is missing", "add it")
        missing = sorted(_NEEDED_USAGES - set(spec.get("usages") or []))
        if missing:
            yield Complaint(
                where(item), "spec.usages", f"not for {', '.join(missing)}", "usages: [server auth, client auth]"
            )


def issuers_exist(bundle: Bundle) -> Iterator[Complaint]:
    """A ClusterIssuer may be anywhere."""
    for item in bundle.of("Certificate"):
        issuer = item["spec"].get("issuerRef") or {}
        own = issuer.get("kind", "Issuer") == "Issuer" and "cert-manager" in issuer.get("group", "cert-manager.io")
        if own and bundle.find("Issuer", str(issuer.get("name")), namespace_of(item)) is None:
            known = ", ".join(name_of(one) for one in bundle.of("Issuer")) or "none here"
            what = f"no Issuer is named {issuer.get('name')}"
            yield Complaint(where(item), "spec.issuerRef", what, f"use one of: {known}; or kind: ClusterIssuer")


def _seconds(text: str) -> float:
    units = {"h": 3600.0, "m": 60.0, "s": 1.0}
    return sum(float(number) * units[unit] for number, unit in re.findall(r"(\d+)(h|m|s)", text))
