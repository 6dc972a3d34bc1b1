"""Fields whose text or number has one form, as the API server's validation asks for it and no schema says.

Rules of `pkg/apis/core/validation` and its neighbours in Kubernetes, one line each: path of the field, its form. They
hold for every pod template, those of Ray's groups too.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from tests.deploy.manifests.objects import Complaint, Object, PodTemplate, where
from tests.deploy.manifests.placement import leaves
from tests.deploy.manifests.words import (
    LABEL,
    MOST_INT32,
    is_label_value,
    is_port_name,
    is_port_number,
    is_qualified_name,
    is_subdomain,
)

_DATA_KEY = re.compile(r"(?!\.\.)[-._a-zA-Z0-9]{1,253}")
_HIGHEST_PRIORITY = 1_000_000_000
"""Above it are the classes of the system."""


class Form(NamedTuple):
    words: str
    is_kept: Callable[[Any], bool]


def _is_address(value: Any) -> bool:
    try:
        ipaddress.ip_address(str(value))
    except ValueError:
        return False
    return True


def _is_inside(value: Any) -> bool:
    """A path that does not leave where it begins."""
    return isinstance(value, str) and bool(value) and not value.startswith("/") and ".." not in value.split("/")


NAME = Form("a name: a-z, 0-9, - and .", is_subdomain)
SHORT_NAME = Form("a name: a-z, 0-9 and -, at most 63", lambda value: LABEL.fullmatch(str(value)) is not None)
KEY = Form("name or dns.prefix/name", is_qualified_name)
KEY_OR_NONE = Form("name or dns.prefix/name", lambda value: value == "" or is_qualified_name(value))
LABEL_VALUE = Form("at most 63 of letters, digits, -, _ and .", is_label_value)
DATA_KEY = Form("a key: letters, digits, -, _ and .", lambda value: _DATA_KEY.fullmatch(str(value)) is not None)
USER = Form(f"0 to {MOST_INT32}", lambda value: isinstance(value, int) and 0 <= value <= MOST_INT32)
INSIDE = Form("a relative path without ..", _is_inside)
ADDRESS = Form("an IP address", _is_address)
PORT = Form("1 to 65535, or a port's name", lambda value: is_port_number(value) or is_port_name(value))
PORT_NUMBER = Form("1 to 65535", is_port_number)
SOMETHING = Form("not empty", lambda value: value not in (None, ""))
VARIABLE = Form("printable", lambda value: isinstance(value, str) and value.isascii() and value.isprintable())
COUNT = Form("0 or more", lambda value: isinstance(value, int) and value >= 0)
FIELD_OF_A_LABEL = Form(
    "metadata.labels['KEY'] with a valid key",
    lambda value: (found := re.search(r"\['([^']*)'\]$", str(value))) is None or is_qualified_name(found[1]),
)

_BOX = r"(initContainers|containers)"
_HANDLER = rf"{_BOX}\.(\w+Probe|lifecycle\.\w+)"
_POD: dict[str, Form] = {
    r"volumes\.persistentVolumeClaim\.claimName": NAME,
    r"volumes\.(projected\.sources\.)?(configMap\.name|secret\.(secretName|name))": NAME,
    r"volumes\.(projected\.sources\.)?(configMap|secret)\.items\.key": DATA_KEY,
    r"volumes\.csi\.driver": NAME,
    r"tolerations\.key": KEY_OR_NONE,
    r"tolerations\.value": LABEL_VALUE,
    r"topologySpreadConstraints\.(topologyKey|matchLabelKeys)": KEY,
    r"affinity\..*\.(topologyKey|matchLabelKeys|mismatchLabelKeys)": KEY,
    r"affinity\.nodeAffinity\..*\.matchExpressions\.key": KEY,
    r"(.*\.)?securityContext\.(runAsUser|runAsGroup|fsGroup|supplementalGroups)": USER,
    r"(.*\.)?(seccompProfile|appArmorProfile)\.localhostProfile": INSIDE,
    r"(serviceAccountName|priorityClassName|runtimeClassName|nodeName)": NAME,
    r"schedulerName": NAME,
    r"imagePullSecrets\.name": NAME,
    r"readinessGates\.conditionType": KEY,
    r"hostAliases\.ip": ADDRESS,
    r"hostAliases\.hostnames": NAME,
    r"dnsConfig\.nameservers": ADDRESS,
    r"dnsConfig\.options\.name": SOMETHING,
    r"activeDeadlineSeconds": Form("1 or more", lambda value: isinstance(value, int) and 1 <= value <= MOST_INT32),
    rf"{_BOX}\.env\.name": VARIABLE,
    rf"{_BOX}\.env\.valueFrom\.(configMapKeyRef|secretKeyRef)\.name": NAME,
    rf"{_BOX}\.env\.valueFrom\.(configMapKeyRef|secretKeyRef)\.key": DATA_KEY,
    rf"{_BOX}\.env\.valueFrom\.fieldRef\.fieldPath": FIELD_OF_A_LABEL,
    rf"{_BOX}\.envFrom\.(configMapRef|secretRef)\.name": NAME,
    rf"{_BOX}\.ports\.hostIP": ADDRESS,
    rf"{_BOX}\.ports\.hostPort": PORT_NUMBER,
    rf"{_HANDLER}\.(httpGet|tcpSocket)\.port": PORT,
    rf"{_HANDLER}\.grpc\.port": PORT_NUMBER,
    rf"{_HANDLER}\.httpGet\.httpHeaders\.name": Form(
        "a header's name", lambda value: re.fullmatch(r"[-A-Za-z0-9]+", str(value)) is not None
    ),
    rf"{_BOX}\.volumeMounts\.mountPath": SOMETHING,
    rf"{_BOX}\.volumeMounts\.(subPath|subPathExpr)": INSIDE,
    rf"{_BOX}\.volumeDevices\.devicePath": SOMETHING,
}
_OBJECTS: dict[str, dict[str, Form]] = {
    "Service": {
        r"spec\.ports\.appProtocol": KEY,
        r"spec\.ports\.targetPort": PORT,
        r"spec\.(externalIPs|clusterIPs)": Form("an IP address", lambda value: value == "None" or _is_address(value)),
        r"spec\.loadBalancerClass": KEY,
        r"spec\.sessionAffinityConfig\.clientIP\.timeoutSeconds": Form(
            "1 to 86400", lambda value: isinstance(value, int) and 1 <= value <= 86400
        ),
        r"spec\.healthCheckNodePort": PORT_NUMBER,
    },
    "PersistentVolumeClaim": {
        r"spec\.(storageClassName|volumeName|volumeAttributesClassName)": Form(
            "a name, or empty", lambda value: value == "" or is_subdomain(value)
        ),
        r"spec\.(dataSource|dataSourceRef)\.(kind|name)": SOMETHING,
    },
    "StatefulSet": {
        r"spec\.volumeClaimTemplates\.metadata\.name": SHORT_NAME,
        r"spec\.volumeClaimTemplates\.spec\.storageClassName": Form(
            "a name, or empty", lambda value: value == "" or is_subdomain(value)
        ),
        r"spec\.(minReadySeconds|ordinals\.start)": COUNT,
        r"spec\.updateStrategy\.rollingUpdate\.partition": COUNT,
    },
    "ServiceAccount": {r"(imagePullSecrets|secrets)\.name": NAME},
    "PriorityClass": {
        r"value": Form(
            f"at most {_HIGHEST_PRIORITY}", lambda value: isinstance(value, int) and value <= _HIGHEST_PRIORITY
        ),
        r"preemptionPolicy": Form(
            "PreemptLowerPriority or Never", lambda value: value in ("PreemptLowerPriority", "Never")
        ),
        r"metadata\.name": Form("without system- before it", lambda value: not str(value).startswith("system-")),
    },
    "HorizontalPodAutoscaler": {
        r"spec\.scaleTargetRef\.(kind|name)": Form(
            "a part of a path", lambda value: re.fullmatch(r"(?!\.{1,2}$)[^/%]+", str(value)) is not None
        ),
        r"spec\.metrics\..*\.metric\.name": Form(
            "a part of a path", lambda value: re.fullmatch(r"(?!\.{1,2}$)[^/%]+", str(value)) is not None
        ),
    },
    "NetworkPolicy": {r"spec\.(ingress|egress)\.ports\.endPort": PORT_NUMBER},
    "Ingress": {r"spec\.ingressClassName": NAME, r"spec\.rules\.http\.paths\.path": Form(
        "a path from /", lambda value: str(value).startswith("/"))},
    "Gateway": {r"spec\.listeners\.port": PORT_NUMBER, r"spec\.gatewayClassName": NAME},
    "ScaledObject": {r"spec\.advanced\.horizontalPodAutoscalerConfig\.name": NAME},
}  # fmt: skip
_PROFILES = ("seccompProfile", "appArmorProfile")


def forms_of_pods_are_kept(pod: PodTemplate) -> Iterator[Complaint]:
    yield from _broken(_POD, pod.spec, pod.where, f"{pod.path}.spec.")
    for path, added in pod.added:
        yield from _broken(_POD, {"containers": [added]}, pod.where, f"{path}: ")


def forms_of_objects_are_kept(item: Object) -> Iterator[Complaint]:
    forms = _OBJECTS.get(str(item.get("kind")))
    if forms is not None:
        yield from _broken(forms, item, where(item), "")


def profiles_are_named(pod: PodTemplate) -> Iterator[Complaint]:
    """`Localhost` is a file of the node, which has to be said; the other types have none."""
    holders = [(f"{pod.path}.spec", pod.spec), *pod.containers]
    for path, holder in holders:
        for name in _PROFILES:
            profile = (holder.get("securityContext") or {}).get(name) or {}
            place, told = f"{path}.securityContext.{name}", profile.get("localhostProfile")
            if profile.get("type") == "Localhost" and not told:
                what, todo = "Localhost without localhostProfile", "name the file, or type: RuntimeDefault"
                yield Complaint(pod.where, place, what, todo)
            elif told is not None and profile.get("type") != "Localhost":
                what = f"localhostProfile with type {profile.get('type')}"
                yield Complaint(pod.where, f"{place}.localhostProfile", what, "type: Localhost, or leave it out")


def _broken(forms: dict[str, Form], value: Any, thing: str, prefix: str) -> Iterator[Complaint]:
    for path, plain, leaf in leaves(value, "", ""):
        for pattern, form in forms.items():
            if leaf is not None and re.fullmatch(pattern, plain) and not form.is_kept(leaf):
                shown = str(leaf) if len(str(leaf)) < 80 else f"{str(leaf)[:70]}..."
                yield Complaint(thing, prefix + path, f"{shown!r} is not what it must be", form.words)
