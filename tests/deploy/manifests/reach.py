"""Checks of who reaches whom, by the network policies together: what has to get through does, what must not does
not."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Any

from tests.deploy.manifests.cluster_files import files_of
from tests.deploy.manifests.objects import (
    NAMESPACE_LABEL,
    Bundle,
    Complaint,
    Object,
    PodTemplate,
    matches,
    namespace_of,
    redis_clean_up,
    selected,
    where,
)
from tests.deploy.manifests.program import started

ROUTER, HEAD, WORKER = "router", "head", "worker"
NEEDED = (
    (ROUTER, ROUTER, "admin"),
    (ROUTER, ROUTER, "peers"),
    (ROUTER, HEAD, "fleet"),
    (ROUTER, WORKER, "rpc"),
    (WORKER, HEAD, "gcs"),
    (WORKER, WORKER, "rpc"),
    (WORKER, WORKER, "pages"),
    (HEAD, WORKER, "rpc"),
)
"""From, to, port by its name."""
FORBIDDEN = ((ROUTER, WORKER, "pages"), (ROUTER, HEAD, "gcs"), (ROUTER, HEAD, "dashboard"))
_DNS_NAMESPACES = ("kube-system", "openshift-dns")
CLIENTS = (("http", True), ("grpc", True), ("admin", False), ("metrics", False))
"""Ports of routers, and whether anyone may reach them."""


def what_must_get_through_does(bundle: Bundle) -> Iterator[Complaint]:
    for source, target, name, number in _flows(bundle, NEEDED):
        wrong = _blocked(bundle, source, target, number)
        if wrong:
            what = f"policies let no {role_of(source)} reach {role_of(target)} at {name} ({number}): {wrong}"
            yield Complaint(target.where, target.path, what, "open it in a NetworkPolicy, on both sides")
    for pod, name, number in _open_ports(bundle):
        if dict(CLIENTS)[name] and not _anyone_may(bundle, pod, number):
            what = f"clients do not reach port {name} ({number})"
            yield Complaint(pod.where, pod.path, what, "open it in a NetworkPolicy")
    for pod in bundle.pods:
        if not any(_is_dns(rule or {}) for rule in _rules(bundle, pod, "Egress", "egress")):
            todo = "open port 53 to kube-system"
            yield Complaint(pod.where, pod.path, f"{role_of(pod) or 'it'} cannot ask DNS", todo)


def what_is_outside_is_reached(bundle: Bundle) -> Iterator[Complaint]:
    """Redis and the API server by the head, collectors by all who send traces; Prometheus reaches what it scrapes."""
    yield from _kept_from_redis(bundle)
    for item in bundle.of("ServiceMonitor", "PodMonitor"):
        for pod, name, number in _scraped(bundle, item):
            if not _others_may(bundle, pod, number):
                what = f"policies let nobody of another namespace scrape {name} ({number})"
                yield Complaint(pod.where, pod.path, f"{what}, as {where(item)} would", "open it in a NetworkPolicy")
    scaled = {where(item) for item in bundle.of("RayCluster") if item["spec"].get("enableInTreeAutoscaling")}
    for pod in bundle.pods:
        if pod.where in scaled and pod.group == "head" and not any(_out(bundle, pod, one) for one in (443, 6443)):
            what, todo = "the autoscaler does not reach the API server", "open 443 and 6443 in a NetworkPolicy"
            yield Complaint(pod.where, pod.path, what, todo)
    for pod, url in _collectors(bundle):
        matched = re.fullmatch(r"https?://([^/:]+):(\d+)/?", url)
        if matched and not _may_leave(bundle, pod, matched[1], int(matched[2])):
            what = f"policies do not let {role_of(pod) or 'it'} reach {url}"
            yield Complaint(pod.where, pod.path, what, "open the port, to that namespace, in a NetworkPolicy: Egress")


def _kept_from_redis(bundle: Bundle) -> Iterator[Complaint]:
    for item in bundle.of("RayCluster"):
        address = str((item["spec"].get("gcsFaultToleranceOptions") or {}).get("redisAddress", ""))
        name, _, port = address.rpartition("/")[2].rpartition(":")
        service = bundle.find("Service", name.partition(".")[0], namespace_of(item))
        selector = service["spec"].get("selector") if service is not None else None
        for target in bundle.pods_with(selector, namespace_of(item)) if selector else ():
            for head in bundle.pods:
                if head.where != where(item) or head.group != "head" or port not in _declared(target):
                    continue
                for source, name in ((head, "the head"), (redis_clean_up(head), "KubeRay's Redis clean-up pod")):
                    wrong = _blocked(bundle, source, target, int(port))
                    if wrong:
                        what = f"policies do not let {name} reach {target.where} at {port}: {wrong}"
                        yield Complaint(target.where, target.path, what, "open it in a NetworkPolicy, on both sides")


def what_must_not_get_through_does_not(bundle: Bundle) -> Iterator[Complaint]:
    """Whoever it is for closes its door itself: what others may send is not a lock."""
    if not bundle.of("NetworkPolicy"):
        return
    for source, target, name, number in _flows(bundle, FORBIDDEN):
        if _invited(bundle, source, target, number):
            what = f"{role_of(source)} reaches {role_of(target)} at {name} ({number})"
            yield Complaint(target.where, target.path, what, "name the port, or other pods, in the NetworkPolicy")
    for target in _redis(bundle):
        for source in bundle.pods:
            for port in _declared(target) if source.group != "head" and source.where != target.where else ():
                if _invited(bundle, source, target, int(port)):
                    what = f"{role_of(source) or source.where} reaches Redis ({port}), which is the head's"
                    yield Complaint(target.where, target.path, what, "name the head in the NetworkPolicy")
    for pod, name, number in _open_ports(bundle):
        if not dict(CLIENTS)[name] and _strangers_may(bundle, pod, number):
            what = f"anyone reaches port {name} ({number})"
            yield Complaint(pod.where, pod.path, what, "name in the NetworkPolicy who may")


def address_blocks_are_valid(item: Object) -> Iterator[Complaint]:
    for direction, field in (("ingress", "from"), ("egress", "to")) if item.get("kind") == "NetworkPolicy" else ():
        for index, rule in enumerate(item["spec"].get(direction) or []):
            for number, peer in enumerate((rule or {}).get(field) or []):
                block = peer.get("ipBlock") or {}
                place = f"spec.{direction}[{index}].{field}[{number}].ipBlock"
                try:
                    whole = ipaddress.ip_network(block["cidr"]) if block else None
                    if block and "/" not in block["cidr"]:
                        raise ValueError(f"{block['cidr']} has no mask")
                    inside = [ipaddress.ip_network(text) for text in block.get("except") or []]
                except (ValueError, KeyError) as error:
                    yield Complaint(where(item), place, f"no addresses: {error}", "write 10.0.0.0/8")
                    continue
                for one in inside:
                    if whole is None or one.version != whole.version or not one.subnet_of(whole):  # type: ignore[arg-type]
                        yield Complaint(where(item), f"{place}.except", f"{one} is not inside {whole}", "narrow it")


def _is_dns(rule: Object) -> bool:
    numbers = {(port.get("protocol", "TCP"), port.get("port")) for port in rule.get("ports") or []}
    peers = rule.get("to")
    homes = [{NAMESPACE_LABEL: name} for name in _DNS_NAMESPACES]
    elsewhere = not peers or any(selected(peer.get("namespaceSelector"), home) for peer in peers for home in homes)
    return elsewhere and (not numbers or ("UDP", 53) in numbers)


def role_of(pod: PodTemplate) -> str:
    """Returns the role by what the pod runs: the program's router, Ray's head, or workers."""
    if pod.owner == "RayCluster":
        return HEAD if pod.group == "head" else WORKER
    commands = [[*(box.get("command") or []), *(box.get("args") or [])][:2] for _, box in pod.containers]
    return ROUTER if ["twostroke", "router"] in commands else ""


def _flows(
    bundle: Bundle, wanted: tuple[tuple[str, str, str], ...]
) -> Iterator[tuple[PodTemplate, PodTemplate, str, int]]:
    for source_role, target_role, name in wanted:
        for source in bundle.pods:
            for target in bundle.pods:
                if (role_of(source), role_of(target)) == (source_role, target_role):
                    for number in _numbers(target, name):
                        yield source, target, name, number


def _open_ports(bundle: Bundle) -> Iterator[tuple[PodTemplate, str, int]]:
    for pod in bundle.pods if bundle.of("NetworkPolicy") else ():
        for name, _ in CLIENTS:
            for number in _numbers(pod, name) if role_of(pod) == ROUTER else ():
                yield pod, name, number


def _redis(bundle: Bundle) -> list[PodTemplate]:
    """Pods that keep what a RayCluster's head knows."""
    found = []
    for item in bundle.of("RayCluster"):
        address = str((item["spec"].get("gcsFaultToleranceOptions") or {}).get("redisAddress", ""))
        name = address.rpartition("/")[2].rpartition(":")[0].partition(".")[0]
        service = bundle.find("Service", name, namespace_of(item)) or {}
        found += bundle.pods_with((service.get("spec") or {}).get("selector") or {"": ""}, namespace_of(item))
    return found


def _declared(pod: PodTemplate) -> set[str]:
    return {str(port.get("containerPort")) for _, container in pod.containers for port in container.get("ports") or []}


def _numbers(pod: PodTemplate, name: str) -> list[int]:
    ports = [port for _, container in pod.containers for port in container.get("ports") or []]
    return [port["containerPort"] for port in ports if port.get("name") == name]


def _blocked(bundle: Bundle, source: PodTemplate, target: PodTemplate, number: int) -> str:
    """Empty where it gets through; else which side does not let it."""
    if not any(
        _opens(rule or {}, number, target) and _names(rule or {}, "to", target, source.namespace)
        for rule in _rules(bundle, source, "Egress", "egress")
    ):
        return f"not out of {role_of(source)}"
    return f"not into {role_of(target) or target.where}" if _shut(bundle, source, target, number) else ""


def _shut(bundle: Bundle, source: PodTemplate, target: PodTemplate, number: int) -> bool:
    return not any(
        _opens(rule or {}, number, target) and _names(rule or {}, "from", source, target.namespace)
        for rule in _rules(bundle, target, "Ingress", "ingress")
    )


def _invited(bundle: Bundle, source: PodTemplate, target: PodTemplate, number: int) -> bool:
    """Tells whether the target's policies let the source in by its own labels; another check looks at strangers."""
    return any(
        _opens(rule, number, target)
        and peer.get("namespaceSelector") is None
        and selected(peer.get("podSelector"), source.labels)
        and not selected(peer.get("podSelector"), {})
        for rule in _rules(bundle, target, "Ingress", "ingress")
        if rule and source.namespace == target.namespace
        for peer in rule.get("from") or []
    )


def _may_leave(bundle: Bundle, pod: PodTemplate, host: str, number: int) -> bool:
    """To a name of another namespace's Service, or anywhere."""
    parts = host.split(".")
    labels = {NAMESPACE_LABEL: parts[1]} if len(parts) > 2 and parts[2] == "svc" else None
    for rule in _rules(bundle, pod, "Egress", "egress"):
        peers = (rule or {}).get("to") or [{"namespaceSelector": {}}]
        if _opens(rule or {}, number, pod) and any(
            peer.get("ipBlock")
            or (selected(peer.get("namespaceSelector"), labels) if labels else not peer.get("podSelector"))
            for peer in peers
        ):
            return True
    return bundle.find("Service", parts[0], pod.namespace) is not None and len(parts) == 1


def _scraped(bundle: Bundle, monitor: Object) -> Iterator[tuple[PodTemplate, str, int]]:
    """(pod, port, number), of monitors that name ports of pods; Services name theirs alike."""
    field = "endpoints" if monitor["kind"] == "ServiceMonitor" else "podMetricsEndpoints"
    names = {str(one.get("port")) for one in monitor["spec"].get(field) or []}
    chosen = monitor["spec"].get("selector")
    for pod in bundle.pods:
        services = [
            one
            for one in bundle.of("Service")
            if namespace_of(one) == pod.namespace
            and selected(chosen, one["metadata"].get("labels") or {})
            and matches(one["spec"].get("selector") or {"": ""}, pod.labels)
        ]
        if services if monitor["kind"] == "ServiceMonitor" else selected(chosen, pod.labels):
            for name in sorted(names):
                yield from ((pod, name, number) for number in _numbers(pod, name)[:1])


def _others_may(bundle: Bundle, pod: PodTemplate, number: int) -> bool:
    return any(
        _opens(rule or {}, number, pod)
        and any(peer.get("namespaceSelector") is not None or peer.get("ipBlock") for peer in _from(rule or {}))
        for rule in _rules(bundle, pod, "Ingress", "ingress")
    )


def _from(rule: Object) -> list[Object]:
    return rule.get("from") or [{"namespaceSelector": {}}]


def _out(bundle: Bundle, pod: PodTemplate, number: int) -> bool:
    """To somewhere that is not a pod of ours."""
    return any(
        _opens(rule or {}, number, pod)
        and any(peer.get("podSelector") is None for peer in (rule or {}).get("to") or [{}])
        for rule in _rules(bundle, pod, "Egress", "egress")
    )


def _collectors(bundle: Bundle) -> Iterator[tuple[PodTemplate, str]]:
    for pod in bundle.pods:
        for _path, args, _container in started(pod, hooks=False):
            if getattr(args, "otlp_endpoint", None):
                yield pod, args.otlp_endpoint
        for _item, _key, file in files_of(bundle):
            if role_of(pod) == WORKER and file.config.tracing.otlp_endpoint:
                yield pod, file.config.tracing.otlp_endpoint


def _anyone_may(bundle: Bundle, pod: PodTemplate, number: int) -> bool:
    return any(
        _opens(rule or {}, number, pod) and not (rule or {}).get("from")
        for rule in _rules(bundle, pod, "Ingress", "ingress")
    )


def _strangers_may(bundle: Bundle, pod: PodTemplate, number: int) -> bool:
    return any(
        _opens(rule or {}, number, pod) and any(not _chooses(peer) for peer in (rule or {}).get("from") or [{}])
        for rule in _rules(bundle, pod, "Ingress", "ingress")
    )


def _chooses(peer: Object) -> bool:
    """An empty selector takes in whoever comes."""
    return bool(peer.get("ipBlock") or peer.get("namespaceSelector") or peer.get("podSelector"))


def _rules(bundle: Bundle, pod: PodTemplate, kind: str, field: str) -> list[Any]:
    """Returns the rules of all policies that hold the pod in this direction. Without one, a rule lets everything
    through."""
    holders = [
        item
        for item in bundle.of("NetworkPolicy")
        if namespace_of(item) == pod.namespace
        and selected(item["spec"].get("podSelector"), pod.labels)
        and kind in (item["spec"].get("policyTypes") or ["Ingress"])
    ]
    return [rule for item in holders for rule in item["spec"].get(field) or []] if holders else [{}]


def _names(rule: Object, field: str, pod: PodTemplate, namespace: str) -> bool:
    """Peers in other namespaces, or by address, are not pods of ours."""
    peers = rule.get(field)
    if not peers:
        return True
    return any(
        peer.get("podSelector") is not None
        and peer.get("namespaceSelector") is None
        and pod.namespace == namespace
        and selected(peer["podSelector"], pod.labels)
        for peer in peers
    ) or any(peer.get("namespaceSelector") == {} and not peer.get("podSelector") for peer in peers)


def _opens(rule: Object, number: int, target: PodTemplate) -> bool:
    for port in rule.get("ports") or [{}]:
        wanted, last = port.get("port"), port.get("endPort")
        if port.get("protocol", "TCP") != "TCP":
            continue
        if wanted in (None, number) or (isinstance(wanted, str) and number in _numbers(target, wanted)):
            return True
        if isinstance(wanted, int) and isinstance(last, int) and wanted <= number <= last:
            return True
    return False
