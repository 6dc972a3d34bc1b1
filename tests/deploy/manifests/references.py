"""What objects name: ConfigMaps, Secrets and their keys, claims, accounts, roles. They exist, or the user makes them.

What the user makes is what deploy/README.md has commands for: `kubectl create secret generic NAME --from-literal=KEY=`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from tests.deploy.manifests.objects import Bundle, Complaint, Object, PodTemplate, name_of, namespace_of, where

README = Path(__file__).parents[3] / "deploy" / "README.md"
_TLS_KEYS = frozenset({"tls.crt", "tls.key", "ca.crt"})
_BUILT_IN_ROLES = frozenset({"admin", "cluster-admin", "edit", "view"})
_FILE_FLAGS = re.compile(r"--(file|token-file|api-keys|public-prefix|(cluster-)?tls-(cert|key|ca|client-ca))")
OURS = "/etc/twostroke"
"""Files below it are always mounted: the image has none."""


class Reference(NamedTuple):
    where: str
    path: str
    kind: str
    name: str
    namespace: str
    keys: tuple[str, ...] = ()
    optional: bool = False


def references_exist(bundle: Bundle) -> Iterator[Complaint]:
    for reference in references(bundle):
        if reference.optional or _object(bundle, reference) is not None or reference.name in _of_the_user(reference):
            continue
        known = ", ".join(name_of(item) for item in bundle.of(reference.kind)) or "none here"
        todo = f"use one of: {known}; or say in deploy/README.md how the user makes it"
        yield Complaint(reference.where, reference.path, f"no {reference.kind} is named {reference.name}", todo)


def ports_of_ingresses_exist(bundle: Bundle) -> Iterator[Complaint]:
    for item in bundle.of("Ingress"):
        for path, backend in ingress_backends(item):
            service = bundle.find("Service", str(backend.get("name")), namespace_of(item))
            ports = service["spec"].get("ports") or [] if service is not None else []
            told = backend.get("port") or {}
            if service is not None and not any(
                told in ({"number": port.get("port")}, {"name": port.get("name")}) for port in ports
            ):
                known = ", ".join(f"{port.get('name', '-')}={port.get('port')}" for port in ports)
                what = f"Service {backend.get('name')} has no port {told}"
                yield Complaint(where(item), f"{path}.port", what, f"use one of: {known}")


def ingress_backends(item: Object) -> Iterator[tuple[str, Object]]:
    spec = item["spec"]
    if (spec.get("defaultBackend") or {}).get("service"):
        yield "spec.defaultBackend.service", spec["defaultBackend"]["service"]
    for index, rule in enumerate(spec.get("rules") or []):
        for number, path in enumerate((rule.get("http") or {}).get("paths") or []):
            if (path.get("backend") or {}).get("service"):
                yield f"spec.rules[{index}].http.paths[{number}].backend.service", path["backend"]["service"]


def keys_exist(bundle: Bundle) -> Iterator[Complaint]:
    for reference in references(bundle):
        known = keys_of(bundle, reference.kind, reference.name, reference.namespace)
        for key in reference.keys if known is not None and not reference.optional else ():
            if known is not None and key not in known:
                what = f"{reference.kind} {reference.name} has no key {key}"
                yield Complaint(reference.where, reference.path, what, f"use one of: {', '.join(sorted(known))}")


def paths_of_the_program_are_mounted(bundle: Bundle) -> Iterator[Complaint]:
    """A file named in arguments or environment is below a mount, and a key of what is mounted there."""
    for pod in bundle.pods:
        for path, container in pod.containers:
            for place, file in _files_named(container):
                wrong = file_complaint(bundle, pod, container, file)
                if wrong is not None:
                    yield Complaint(pod.where, f"{path}.{place}", *wrong)


def file_complaint(bundle: Bundle, pod: PodTemplate, container: Object, file: str) -> tuple[str, str] | None:
    mounts = [
        mount
        for mount in container.get("volumeMounts") or []
        if PurePosixPath(file).is_relative_to(str(mount.get("mountPath")))
    ]
    if not mounts:
        return f"nothing is mounted at {file}", "mount the volume that has it"
    mount = max(mounts, key=lambda one: len(str(one["mountPath"])))
    known = _files_of(bundle, pod, str(mount.get("name")))
    inside = str(mount.get("subPath") or PurePosixPath(file).relative_to(str(mount["mountPath"])))
    if known is None or inside == "." or inside in known:
        return None
    return f"volume {mount['name']} has no {inside}", f"use one of: {', '.join(sorted(known))}"


def references(bundle: Bundle) -> Iterator[Reference]:
    for pod in bundle.pods:
        yield from _of_pod(pod)
    for item in bundle.objects:
        yield from _of_object(item)


def keys_of(bundle: Bundle, kind: str, name: str, namespace: str) -> frozenset[str] | None:
    """None: nobody says what it holds."""
    item = bundle.find(kind, name, namespace)
    if item is not None:
        return frozenset({key for field in ("data", "stringData", "binaryData") for key in item.get(field) or {}})
    for made in bundle.of("Certificate") if kind == "Secret" else ():
        if (made["spec"].get("secretName"), namespace_of(made)) == (name, namespace):
            return _TLS_KEYS
    return users_own().get((kind, name))


@functools.cache
def users_own() -> dict[tuple[str, str], frozenset[str] | None]:
    """(kind, name) of what deploy/README.md tells the user to make: its keys; None: not told."""
    text = (README.read_text() if README.is_file() else "").replace("\\\n", " ")
    found: dict[tuple[str, str], frozenset[str] | None] = {}
    for line in text.splitlines():
        matched = re.search(r"create (secret (generic|tls|docker-registry)|configmap) ([a-z0-9.-]+)(.*)", line)
        if matched:
            keys = re.findall(r"--from-(?:literal|file)=(?:\S*/)?([A-Za-z0-9._-]+)", matched[4])
            kind = "ConfigMap" if matched[1] == "configmap" else "Secret"
            known = {"tls": _TLS_KEYS, "docker-registry": frozenset({".dockerconfigjson"})}
            found[kind, matched[3]] = known.get(str(matched[2]), frozenset(keys) or None)
        for kind, name in re.findall(
            r"\b(Secret|ConfigMap|PersistentVolumeClaim|PriorityClass|Gateway|Service) `([a-z0-9.-]+)`", line
        ):
            found.setdefault((kind, name), None)
    return found


def _object(bundle: Bundle, reference: Reference) -> Object | None:
    if reference.kind == "ServiceAccount" and reference.name == "default":
        return {}
    if reference.kind == "ClusterRole" and reference.name in _BUILT_IN_ROLES:
        return {}
    for item in bundle.of("Certificate") if reference.kind == "Secret" else ():
        if (item["spec"].get("secretName"), namespace_of(item)) == (reference.name, reference.namespace):
            return item  # cert-manager makes it
    return bundle.find(reference.kind, reference.name, reference.namespace)


def _of_the_user(reference: Reference) -> set[str]:
    return {name for kind, name in users_own() if kind == reference.kind}


def _of_pod(pod: PodTemplate) -> Iterator[Reference]:
    spec, base = pod.spec, f"{pod.path}.spec"
    if spec.get("serviceAccountName"):
        yield _named(pod, "ServiceAccount", f"{base}.serviceAccountName", spec["serviceAccountName"])
    if spec.get("priorityClassName") and not str(spec["priorityClassName"]).startswith("system-"):
        told = _named(pod, "PriorityClass", f"{base}.priorityClassName", spec["priorityClassName"])
        yield told._replace(namespace="")
    for index, secret in enumerate(spec.get("imagePullSecrets") or []):
        yield _named(pod, "Secret", f"{base}.imagePullSecrets[{index}]", secret.get("name"))
    for index, volume in enumerate(spec.get("volumes") or []):
        yield from _of_volume(pod, f"{base}.volumes[{index}]", volume)
    for path, container in pod.containers:
        for index, source in enumerate(container.get("envFrom") or []):
            for field, kind in (("configMapRef", "ConfigMap"), ("secretRef", "Secret")):
                if source.get(field):
                    yield _told(pod, kind, f"{path}.envFrom[{index}]", source[field])
        for index, variable in enumerate(container.get("env") or []):
            for field, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
                told = (variable.get("valueFrom") or {}).get(field)
                if told:
                    yield _told(pod, kind, f"{path}.env[{index}].valueFrom.{field}", told)


def _of_volume(pod: PodTemplate, path: str, volume: Object) -> Iterator[Reference]:
    for source in [volume, *((volume.get("projected") or {}).get("sources") or [])]:
        for field, kind in (("configMap", "ConfigMap"), ("secret", "Secret")):
            told = source.get(field)
            if told is not None:
                keys = tuple(str(entry.get("key")) for entry in told.get("items") or [])
                name = told.get("secretName", told.get("name"))
                yield _named(pod, kind, f"{path}.{field}", name, keys, told.get("optional"))
    claim = (volume.get("persistentVolumeClaim") or {}).get("claimName")
    if claim:
        yield _named(pod, "PersistentVolumeClaim", f"{path}.persistentVolumeClaim.claimName", claim)


def _named(
    pod: PodTemplate, kind: str, path: str, name: object, keys: tuple[str, ...] = (), optional: object = False
) -> Reference:
    return Reference(pod.where, path, kind, str(name), pod.namespace, keys, bool(optional))


def _told(pod: PodTemplate, kind: str, path: str, told: Object) -> Reference:
    keys = (str(told["key"]),) if "key" in told else ()
    return _named(pod, kind, path, told.get("name"), keys, told.get("optional"))


def _of_object(item: Object) -> Iterator[Reference]:
    kind = item.get("kind")
    if kind == "RayCluster":
        yield from _of_ray(item)
    elif kind == "TriggerAuthentication":
        for index, told in enumerate(item["spec"].get("secretTargetRef") or []):
            yield _at(item, f"spec.secretTargetRef[{index}]", "Secret", told.get("name"), str(told.get("key")))
    elif kind in ("RoleBinding", "ClusterRoleBinding"):
        yield from _of_binding(item)
    elif kind == "Gateway":
        for index, listener in enumerate(item["spec"].get("listeners") or []):
            for certificate in (listener.get("tls") or {}).get("certificateRefs") or []:
                place = f"spec.listeners[{index}].tls.certificateRefs"
                if certificate.get("namespace", namespace_of(item)) == namespace_of(item):
                    yield _at(item, place, "Secret", certificate.get("name"), "tls.crt", "tls.key")
    elif kind in ("ServiceMonitor", "PodMonitor"):
        yield from _of_monitor(item)
    elif kind == "Ingress":
        for path, backend in ingress_backends(item):
            yield _at(item, f"{path}.name", "Service", backend.get("name"))


def _of_ray(item: Object) -> Iterator[Reference]:
    authentication = item["spec"].get("authOptions") or {}
    if authentication.get("secretName"):
        yield _at(item, "spec.authOptions.secretName", "Secret", authentication["secretName"], "auth_token")
    for field in ("redisPassword", "redisUsername"):
        source = ((item["spec"].get("gcsFaultToleranceOptions") or {}).get(field) or {}).get("valueFrom") or {}
        told = source.get("secretKeyRef")
        if told:
            place = f"spec.gcsFaultToleranceOptions.{field}.valueFrom.secretKeyRef"
            yield _at(item, place, "Secret", told.get("name"), str(told.get("key")))


def _of_binding(item: Object) -> Iterator[Reference]:
    role = item.get("roleRef") or {}
    home = "" if role.get("kind") == "ClusterRole" else namespace_of(item)
    yield Reference(where(item), "roleRef", str(role.get("kind")), str(role.get("name")), home)
    for index, subject in enumerate(item.get("subjects") or []):
        if subject.get("kind") == "ServiceAccount":
            home = subject.get("namespace", namespace_of(item))
            yield Reference(where(item), f"subjects[{index}]", "ServiceAccount", str(subject.get("name")), home)


def _of_monitor(item: Object) -> Iterator[Reference]:
    field = "endpoints" if item["kind"] == "ServiceMonitor" else "podMetricsEndpoints"
    for index, endpoint in enumerate((item.get("spec") or {}).get(field) or []):
        place = f"spec.{field}[{index}]"
        basic = endpoint.get("basicAuth") or {}
        for told in (basic.get("username"), basic.get("password"), endpoint.get("bearerTokenSecret")):
            if told and told.get("name"):
                name, keys = str(told["name"]), (str(told.get("key")),)
                yield Reference(where(item), place, "Secret", name, namespace_of(item), keys)
        tls = endpoint.get("tlsConfig") or {}
        for part in ("ca", "cert", "keySecret"):
            told = tls.get(part) or {}
            told = told if part == "keySecret" else told.get("secret") or {}
            if told:
                name, keys = str(told.get("name")), (str(told.get("key")),)
                yield Reference(where(item), f"{place}.tlsConfig.{part}", "Secret", name, namespace_of(item), keys)


def _at(item: Object, path: str, kind: str, name: object, *keys: str) -> Reference:
    return Reference(where(item), path, kind, str(name), namespace_of(item), keys)


def _files_named(container: Object) -> Iterator[tuple[str, str]]:
    for field in ("command", "args"):
        for index, word in enumerate(container.get(field) or []):
            flag, _, file = str(word).rpartition("=")
            if file.startswith(OURS) or (_FILE_FLAGS.fullmatch(flag) and file.startswith("/")):
                yield f"{field}[{index}]", file
    for index, variable in enumerate(container.get("env") or []):
        if str(variable.get("value", "")).startswith(OURS):
            yield f"env[{index}]", str(variable["value"])


def _files_of(bundle: Bundle, pod: PodTemplate, volume_name: str) -> frozenset[str] | None:
    """Names of files in a volume of ConfigMaps and Secrets; None: nobody can tell."""
    volume = next((one for one in pod.spec.get("volumes") or [] if one.get("name") == volume_name), {})
    files: set[str] = set()
    for source in [volume, *((volume.get("projected") or {}).get("sources") or [])]:
        for field, kind, key in (("configMap", "ConfigMap", "name"), ("secret", "Secret", "secretName")):
            told = source.get(field)
            if told is None:
                continue
            if told.get("items"):
                files |= {str(entry.get("path")) for entry in told["items"]}
                continue
            known = keys_of(bundle, kind, str(told.get(key, told.get("name"))), pod.namespace)
            if known is None:
                return None
            files |= known
    told = any(source in volume for source in ("configMap", "secret", "projected"))
    return frozenset(files) if told else None
