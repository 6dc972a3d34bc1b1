"""Routes lead from a gateway to a port of ours; an InferencePool names pods and their port."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

from tests.deploy.manifests.objects import Bundle, Complaint, Object, name_of, namespace_of, where
from tests.deploy.manifests.references import users_own

ROUTES = ("HTTPRoute", "GRPCRoute")
_PROTOS = Path(__file__).parents[3] / "proto"
_ROUTER = Path(__file__).parents[3] / "router"
_HTTP = ("HTTP", "HTTPS")
_SHORTEST_TIMEOUT_S = 600
_UNITS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}


def routes_have_a_gateway(bundle: Bundle) -> Iterator[Complaint]:
    for item in bundle.of(*ROUTES):
        for index, parent in enumerate(item["spec"].get("parentRefs") or []):
            place, name = f"spec.parentRefs[{index}]", str(parent.get("name"))
            kind, namespace = parent.get("kind", "Gateway"), parent.get("namespace", namespace_of(item))
            gateway = bundle.find(kind, name, namespace)
            if gateway is None:
                if (kind, name) not in users_own():
                    known = ", ".join(name_of(one) for one in bundle.of("Gateway")) or "none here"
                    yield Complaint(where(item), place, f"no {kind} is named {name}", f"use one of: {known}")
                continue
            yield from _listener_complaints(item, place, parent, gateway)
        if not item["spec"].get("parentRefs"):
            yield Complaint(where(item), "spec.parentRefs", "none: nothing would lead here", "name the Gateway")


def listeners_are_complete(item: Object) -> Iterator[Complaint]:
    for index, listener in enumerate(item["spec"].get("listeners") or [] if item.get("kind") == "Gateway" else []):
        place = f"spec.listeners[{index}]"
        tls, spaces = listener.get("tls") or {}, (listener.get("allowedRoutes") or {}).get("namespaces") or {}
        terminates = listener.get("protocol") == "HTTPS" and tls.get("mode", "Terminate") == "Terminate"
        if terminates and not (tls.get("certificateRefs") or tls.get("options")):
            yield Complaint(where(item), f"{place}.tls", "HTTPS without a certificate", "name it in certificateRefs")
        for reference in tls.get("certificateRefs") or []:
            if (reference.get("group", ""), reference.get("kind", "Secret")) != ("", "Secret"):
                what = f"a certificate in a {reference.get('kind', 'Secret')} {reference.get('group', '')}".strip()
                yield Complaint(where(item), f"{place}.tls.certificateRefs", what, "put it into a Secret")
        if spaces.get("from") == "Selector" and not spaces.get("selector"):
            path = f"{place}.allowedRoutes.namespaces"
            yield Complaint(where(item), path, "from Selector without a selector", "give one, or from: Same")


def other_namespaces_grant_it(bundle: Bundle) -> Iterator[Complaint]:
    """What lies in another namespace may be named where a ReferenceGrant there says so."""
    for item in bundle.of(*ROUTES, "Gateway"):
        for path, kind, reference in _named(item):
            namespace = reference.get("namespace", namespace_of(item))
            granted = any(
                namespace_of(grant) == namespace
                and any(one.get("kind") == item["kind"] for one in grant["spec"].get("from") or [])
                and any(one.get("kind") == kind for one in grant["spec"].get("to") or [])
                for grant in bundle.of("ReferenceGrant")
            )
            if namespace != namespace_of(item) and not granted:
                what = f"{kind} {reference.get('name')} lies in namespace {namespace}, which grants it to nobody"
                yield Complaint(where(item), path, what, "add a ReferenceGrant there, or keep it in this namespace")


def streams_are_not_cut(bundle: Bundle) -> Iterator[Complaint]:
    """An answer may take minutes; 0s means no limit."""
    for item in bundle.of(*ROUTES):
        for index, rule in enumerate(item["spec"].get("rules") or []):
            for field, text in (rule.get("timeouts") or {}).items():
                if 0 < _seconds(str(text)) < _SHORTEST_TIMEOUT_S:
                    place, what = f"spec.rules[{index}].timeouts.{field}", f"answers would be cut after {text}"
                    yield Complaint(where(item), place, what, "0s, and let the router and its clients decide")


def routes_have_a_backend(bundle: Bundle) -> Iterator[Complaint]:
    for item in bundle.of(*ROUTES):
        for index, rule in enumerate(item["spec"].get("rules") or [{}]):
            filters = {one.get("type") for one in rule.get("filters") or []}
            if not rule.get("backendRefs") and not filters & {"RequestRedirect", "ExtensionRef"}:
                place, what = f"spec.rules[{index}].backendRefs", "none: every request would be answered with an error"
                yield Complaint(where(item), place, what, "name the Service and its port")
        for path, reference in backends(item):
            kind, name = reference.get("kind", "Service"), str(reference.get("name"))
            namespace = reference.get("namespace", namespace_of(item))
            backend = bundle.find(kind, name, namespace)
            group = str((backend or {}).get("apiVersion", "")).rpartition("/")[0]
            if backend is not None and reference.get("group", "") != group:
                what = f"{kind} {name} is of group {group!r}, not {reference.get('group', '')!r}"
                yield Complaint(where(item), f"{path}.group", what, f"write group: {group}")
            elif backend is None:
                known = ", ".join(name_of(one) for one in bundle.of(kind)) or "none here"
                yield Complaint(where(item), f"{path}.name", f"no {kind} is named {name}", f"use one of: {known}")
            elif kind == "Service":
                ports = {port.get("port"): port for port in backend["spec"].get("ports") or []}
                if reference.get("port") is None:
                    continue  # the CRD's rules say that
                if reference["port"] not in ports:
                    known = ", ".join(map(str, ports))
                    what = f"Service {name} has no port {reference['port']}"
                    yield Complaint(where(item), f"{path}.port", what, f"use one of: {known}")
                else:
                    yield from _protocol_complaints(item, path, ports[reference["port"]])


def routes_lead_to_what_is_served(bundle: Bundle) -> Iterator[Complaint]:
    """gRPC services and methods of our protos, and paths of the router's HTTP API."""
    for item in bundle.of(*ROUTES):
        for index, rule in enumerate(item["spec"].get("rules") or []):
            for number, match in enumerate(rule.get("matches") or []):
                place = f"spec.rules[{index}].matches[{number}]"
                method, path = match.get("method"), (match.get("path") or {}).get("value")
                if isinstance(method, dict) and method.get("type", "Exact") == "Exact":
                    yield from _method_complaints(item, place, method)
                if path is not None and not any(_leads(match["path"], known) for known in http_paths()):
                    what, todo = f"no page of the router is at {path}", f"use some of {', '.join(sorted(http_paths()))}"
                    yield Complaint(where(item), f"{place}.path.value", what, todo)


def _method_complaints(item: Object, place: str, method: Object) -> Iterator[Complaint]:
    service, name = method.get("service"), method.get("method")
    if service is not None and service not in grpc_services():
        what, todo = f"no gRPC service is named {service}", f"use one of: {', '.join(sorted(grpc_services()))}"
        yield Complaint(where(item), f"{place}.method.service", what, todo)
    elif service is not None and name is not None and name not in grpc_services()[service]:
        what, todo = f"{service} has no {name}", f"use one of: {', '.join(sorted(grpc_services()[service]))}"
        yield Complaint(where(item), f"{place}.method.method", what, todo)


def _leads(match: Object, known: str) -> bool:
    path = str(match["value"])
    if match.get("type", "PathPrefix") == "Exact":
        return path == known
    return match.get("type") == "RegularExpression" or known == path or known.startswith(path.rstrip("/") + "/")


def pools_name_pods(bundle: Bundle) -> Iterator[Complaint]:
    for item in bundle.of("InferencePool"):
        spec = item["spec"]
        labels = (spec.get("selector") or {}).get("matchLabels") or {}
        pods = bundle.pods_with(labels, namespace_of(item))
        if not labels or not pods:
            yield Complaint(where(item), "spec.selector", f"{labels} selects no pod", "use labels of the routers")
        for index, target in enumerate(spec.get("targetPorts") or []):
            for pod in pods:
                numbers = {
                    port.get("containerPort")
                    for _, container in pod.containers
                    for port in container.get("ports") or []
                }
                names = {
                    port.get("name")
                    for _, container in pod.containers
                    for port in container.get("ports") or []
                    if port.get("containerPort") == target.get("number")
                }
                if names & {"admin", "metrics", "rpc", "pages", "peers"}:
                    place, what = f"spec.targetPorts[{index}].number", f"port {min(names)} is not for clients"
                    yield Complaint(where(item), place, what, "use the port http")
                if target.get("number") not in numbers:
                    place, what = f"spec.targetPorts[{index}].number", f"{pod.where} has no port {target.get('number')}"
                    yield Complaint(where(item), place, what, f"use one of: {sorted(numbers)}")
        picker = spec.get("endpointPickerRef") or {}
        name = str(picker.get("name"))
        if picker and picker.get("kind", "Service") == "Service":
            service = bundle.find("Service", name, namespace_of(item))
            if service is None and ("Service", name) not in users_own():
                place = "spec.endpointPickerRef.name"
                yield Complaint(where(item), place, f"no Service is named {name}", "name the endpoint picker's")


@functools.cache
def grpc_services() -> dict[str, frozenset[str]]:
    """Methods by service: ours, as the protos have them, and health."""
    found = {"grpc.health.v1.Health": frozenset({"Check", "Watch"})}
    for file in _PROTOS.rglob("*.proto"):
        text = file.read_text()
        package = re.search(r"(?m)^package ([\w.]+);", text)
        prefix = f"{package[1]}." if package else ""
        for name, body in re.findall(r"(?ms)^service (\w+) \{(.*?)^\}", text):
            found[prefix + name] = frozenset(re.findall(r"(?m)^\s*rpc (\w+)", body))
    return found


@functools.cache
def http_paths() -> frozenset[str]:
    """Returns the paths of the router's API and health pages, as their modules have them."""
    files = sorted(_ROUTER.rglob("*.py"))
    paths = [path for file in files for path in re.findall(r'\bRoute\("(/[^"{]*)', file.read_text())]
    return frozenset(path.rstrip("/") for path in paths)


def _listener_complaints(item: Object, place: str, parent: Object, gateway: Object) -> Iterator[Complaint]:
    listeners = gateway["spec"].get("listeners") or []
    wanted = parent.get("sectionName")
    fitting = [one for one in listeners if wanted in (None, one.get("name"))]
    fitting = [one for one in fitting if parent.get("port") in (None, one.get("port"))]
    if not fitting:
        known = ", ".join(f"{one.get('name')}={one.get('port')}" for one in listeners)
        what = f"{where(gateway)} has no listener {wanted or parent.get('port')}"
        yield Complaint(where(item), place, what, f"use one of: {known}")
        return
    fitting = [one for one in fitting if _admits(one, item["kind"])]
    if not fitting:
        what = f"no such listener of {where(gateway)} takes a {item['kind']}"
        yield Complaint(where(item), place, what, "name another one, or allow the kind there")
        return
    names = item["spec"].get("hostnames") or []
    if names and not any(_meets(name, one.get("hostname")) for name in names for one in fitting):
        known = ", ".join(str(one.get("hostname")) for one in fitting)
        what = f"{names} is not what the listener answers to"
        yield Complaint(where(item), "spec.hostnames", what, f"use {known}")


def _admits(listener: Object, kind: str) -> bool:
    allowed = (listener.get("allowedRoutes") or {}).get("kinds")
    return listener.get("protocol") in _HTTP and (not allowed or kind in {one.get("kind") for one in allowed})


def _meets(name: str, listened: str | None) -> bool:
    if not listened or name == listened:
        return True
    pairs = ((name, listened), (listened, name))
    return any(wide.startswith("*.") and narrow.endswith(wide[1:]) for narrow, wide in pairs)


def backends(item: Object) -> Iterator[tuple[str, Object]]:
    for index, rule in enumerate(item["spec"].get("rules") or []):
        for number, reference in enumerate(rule.get("backendRefs") or []):
            yield f"spec.rules[{index}].backendRefs[{number}]", reference


def _named(item: Object) -> Iterator[tuple[str, str, Object]]:
    """(path, kind, reference) of what may lie in another namespace."""
    if item["kind"] != "Gateway":
        yield from ((path, reference.get("kind", "Service"), reference) for path, reference in backends(item))
        return
    for index, listener in enumerate(item["spec"].get("listeners") or []):
        for reference in (listener.get("tls") or {}).get("certificateRefs") or []:
            yield f"spec.listeners[{index}].tls.certificateRefs", reference.get("kind", "Secret"), reference


def _seconds(text: str) -> float:
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(r"(\d+)(ms|h|m|s)", text))


def _protocol_complaints(item: Object, path: str, port: Object) -> Iterator[Complaint]:
    """A gateway speaks HTTP/1.1 to a port that does not say otherwise, and gRPC needs HTTP/2."""
    protocol = port.get("appProtocol", "")
    if item["kind"] == "GRPCRoute" and protocol not in ("kubernetes.io/h2c", "grpc"):
        what = f"port {port.get('port')} does not say that it speaks HTTP/2"
        yield Complaint(where(item), f"{path}.port", what, "lead to the gRPC port, with appProtocol kubernetes.io/h2c")
    if item["kind"] == "HTTPRoute" and ("h2c" in protocol or protocol == "grpc"):
        what = f"port {port.get('port')} speaks gRPC"
        yield Complaint(where(item), f"{path}.port", what, "lead to the HTTP port")
