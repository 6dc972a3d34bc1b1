"""Values that the API takes in one form only, of kinds that carry or grant something, and of Services."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import re
from collections.abc import Iterator

from tests.deploy.manifests.objects import Complaint, Object, PodTemplate, where
from tests.deploy.manifests.words import is_subdomain, quantity

_DATA_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}")
_MOST_BYTES = 1 << 20
_MOST_MODE = 0o777
_SECRET_KEYS = {
    "kubernetes.io/tls": ("tls.crt", "tls.key"),
    "kubernetes.io/dockerconfigjson": (".dockerconfigjson",),
    "kubernetes.io/ssh-auth": ("ssh-privatekey",),
}
"""Types that the API server looks into."""
_FIELDS = re.compile(
    r"metadata\.(name|namespace|uid|labels\['[^']+'\]|annotations\['[^']+'\])|spec\.(nodeName|serviceAccountName)"
    r"|status\.(hostIPs?|podIPs?)"
)
_RESOURCE_FIELDS = re.compile(r"(limits|requests)\.(cpu|memory|ephemeral-storage|hugepages-\w+)")
_VERBS = frozenset({"*", "create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"})
_RBAC = "rbac.authorization.k8s.io"


def data_is_well_formed(item: Object) -> Iterator[Complaint]:
    """Checks the data of ConfigMaps and Secrets."""
    if item.get("kind") not in ("ConfigMap", "Secret"):
        return
    size = 0
    for field in ("data", "stringData", "binaryData"):
        for key, value in (item.get(field) or {}).items():
            place = f"{field}.{key}"
            size += len(str(value))
            if not _DATA_KEY.fullmatch(key):
                yield Complaint(where(item), place, f"{key!r} is not a key", "use letters, digits, -, _ and .")
            encoded = field == "binaryData" or (field == "data" and item["kind"] == "Secret")
            if encoded and not _is_base64(str(value)):
                yield Complaint(where(item), place, "is not base64", "encode it, or write it into stringData")
    for key in _SECRET_KEYS.get(str(item.get("type")), ()) if item["kind"] == "Secret" else ():
        if key not in {**(item.get("data") or {}), **(item.get("stringData") or {})}:
            yield Complaint(where(item), "data", f"type {item['type']} without {key}", f"add {key}")
    if size > _MOST_BYTES:
        yield Complaint(where(item), "data", f"{size} bytes", "at most a MiB")


def amounts_are_valid(item: Object) -> Iterator[Complaint]:
    """Checks the amounts of quotas and limit ranges."""
    spec, amounts = item.get("spec") or {}, []
    if item.get("kind") == "ResourceQuota":
        amounts = [(f"spec.hard.{name}", amount) for name, amount in (spec.get("hard") or {}).items()]
    elif item.get("kind") == "LimitRange":
        for index, limit in enumerate(spec.get("limits") or []):
            for field in ("min", "max", "default", "defaultRequest"):
                told = limit.get(field) or {}
                amounts += [(f"spec.limits[{index}].{field}.{name}", amount) for name, amount in told.items()]
    for path, amount in amounts:
        number = quantity(amount)
        if number is None or number < 0:
            yield Complaint(where(item), path, f"{amount!r} is not a quantity", "write 500m, 2, 512Mi, 4Gi")


def modes_are_valid(pod: PodTemplate) -> Iterator[Complaint]:
    for index, volume in enumerate(pod.spec.get("volumes") or []):
        for field in ("configMap", "secret", "projected", "downwardAPI"):
            source = volume.get(field) or {}
            place = f"{pod.path}.spec.volumes[{index}].{field}"
            modes = [source.get("defaultMode"), *(entry.get("mode") for entry in source.get("items") or [])]
            for mode in modes:
                if mode is not None and not 0 <= mode <= _MOST_MODE:
                    yield Complaint(pod.where, place, f"mode {mode} is above 0777", "write it in octal: 0440")
            for entry in source.get("items") or []:
                path = str(entry.get("path", ""))
                if not path or path.startswith("/") or ".." in path.split("/"):
                    yield Complaint(
                        pod.where, f"{place}.items", f"{path!r} is not a path inside", "write a relative one"
                    )


def fields_of_pods_exist(pod: PodTemplate) -> Iterator[Complaint]:
    for path, container in pod.containers:
        for index, variable in enumerate(container.get("env") or []):
            source, place = variable.get("valueFrom") or {}, f"{path}.env[{index}].valueFrom"
            field = (source.get("fieldRef") or {}).get("fieldPath")
            if field is not None and not _FIELDS.fullmatch(field):
                yield Complaint(pod.where, f"{place}.fieldRef", f"a pod has no field {field}", "use status.podIP, ...")
            resource = (source.get("resourceFieldRef") or {}).get("resource")
            if resource is not None and not _RESOURCE_FIELDS.fullmatch(resource):
                what = f"{resource} is not a resource"
                yield Complaint(pod.where, f"{place}.resourceFieldRef", what, "use limits.memory, requests.cpu, ...")


def hooks_take_time(pod: PodTemplate) -> Iterator[Complaint]:
    for path, container in pod.containers:
        for hook, handler in (container.get("lifecycle") or {}).items():
            seconds = ((handler or {}).get("sleep") or {"seconds": 1}).get("seconds")
            if seconds is None or seconds < 1:
                yield Complaint(pod.where, f"{path}.lifecycle.{hook}.sleep", f"{seconds} seconds", "at least 1")


def service_kinds_are_consistent(item: Object) -> Iterator[Complaint]:
    if item.get("kind") != "Service":
        return
    spec = item["spec"]
    kind, address = spec.get("type", "ClusterIP"), spec.get("clusterIP")
    if address not in (None, "", "None") and not _is_address(address):
        yield Complaint(where(item), "spec.clusterIP", f"{address!r} is not an address", "use None, or leave it out")
    if kind == "ExternalName" and not is_subdomain(str(spec.get("externalName", "")).rstrip(".")):
        what = f"{spec.get('externalName', 'nothing')!r} is not a name in DNS"
        yield Complaint(where(item), "spec.externalName", what, "name where it leads")
    if address == "None" and kind != "ClusterIP":
        yield Complaint(where(item), "spec.clusterIP", f"a {kind} is never headless", "leave out type")
    for index, port in enumerate(spec.get("ports") or []):
        node_port = port.get("nodePort")
        if node_port is not None and (kind == "ClusterIP" or not 1 <= node_port <= 65535):
            place = f"spec.ports[{index}].nodePort"
            yield Complaint(where(item), place, f"{node_port} with type {kind}", "leave it out")
    if spec.get("externalTrafficPolicy") and kind == "ClusterIP":
        place = "spec.externalTrafficPolicy"
        yield Complaint(where(item), place, "nothing comes from outside", "leave it out")


def grants_are_well_formed(item: Object) -> Iterator[Complaint]:
    kind = item.get("kind")
    if kind in ("Role", "ClusterRole"):
        for index, rule in enumerate(item.get("rules") or []):
            place = f"rules[{index}]"
            if not rule.get("verbs") or not (
                rule.get("nonResourceURLs") or (rule.get("resources") and "apiGroups" in rule)
            ):
                todo = "give apiGroups, resources and verbs"
                yield Complaint(where(item), place, "grants nothing", todo)
            for group in rule.get("apiGroups") or []:
                if not re.fullmatch(r"\*|([a-z0-9.-]*)", group) or re.fullmatch(r"v\d+\w*", group):
                    what, todo = f"{group!r} is no API group", "write '' for pods and the like, apps, ray.io, ..."
                    yield Complaint(where(item), f"{place}.apiGroups", what, todo)
            for verb in set(rule.get("verbs") or []) - _VERBS:
                yield Complaint(
                    where(item), f"{place}.verbs", f"{verb!r} is not a verb", f"use {', '.join(sorted(_VERBS))}"
                )
    elif kind in ("RoleBinding", "ClusterRoleBinding") and (item.get("roleRef") or {}).get("apiGroup") != _RBAC:
        yield Complaint(where(item), "roleRef.apiGroup", "is not that of roles", f"write {_RBAC}")
    elif kind == "ClusterRoleBinding" and item["roleRef"].get("name") == "cluster-admin":
        for index, subject in enumerate(item.get("subjects") or []):
            if subject.get("kind") == "ServiceAccount":
                what = f"whoever gets into a pod of {subject.get('name')} owns the whole cluster"
                yield Complaint(where(item), f"subjects[{index}]", what, "grant what it needs, by a Role")


def _is_base64(text: str) -> bool:
    try:
        base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError):
        return False
    return True


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
