"""Services and network policies: they reach pods, by ports that are there, and leave no door open."""

from __future__ import annotations

from collections.abc import Iterator

from tests.deploy.manifests.objects import (
    NAMESPACE_LABEL,
    Bundle,
    Complaint,
    Object,
    PodTemplate,
    name_of,
    namespace_of,
    selected,
    where,
)
from tests.deploy.manifests.words import LABEL, is_port_name, is_port_number

INSIDE_PORTS = frozenset({50050, 50052, 50053, 6379, 8265, 10001})
"""Fleet service, worker rpc, pages, Ray's GCS, dashboard and client server: of our own pods alone."""

_ALMOST_NAMES = frozenset({"name", "namespace", "metadata.name"})


def service_ports_are_valid(item: Object) -> Iterator[Complaint]:
    if item.get("kind") != "Service":
        return
    ports = item["spec"].get("ports") or []
    seen: set[tuple[object, object]] = set()
    names: set[str] = set()
    if not ports and item["spec"].get("clusterIP") != "None" and item["spec"].get("type") != "ExternalName":
        yield Complaint(where(item), "spec.ports", "no port", "give at least one")
    for index, port in enumerate(ports):
        place, name = f"spec.ports[{index}]", port.get("name", "")
        if not is_port_number(port.get("port")):
            yield Complaint(where(item), f"{place}.port", f"{port.get('port')!r} is not a port", "use 1 to 65535")
        if (len(ports) > 1 and not name) or (name and not LABEL.fullmatch(name)):
            yield Complaint(where(item), f"{place}.name", f"{name!r} is not a name of a port", "use a-z, 0-9 and -")
        number = (port.get("port"), port.get("protocol", "TCP"))
        if number in seen or (name and name in names):
            what = f"{name or number[0]} is there twice"
            yield Complaint(where(item), place, what, "each port and each name once")
        seen.add(number)
        names.add(name)


def services_select_pods(bundle: Bundle) -> Iterator[Complaint]:
    for item in bundle.of("Service"):
        selector = item["spec"].get("selector")
        if item["spec"].get("type") == "ExternalName":
            continue
        if not selector:
            yield Complaint(where(item), "spec.selector", "none: it would have no endpoints", "select pods")
        elif not bundle.pods_with(selector, namespace_of(item)):
            what = f"{selector} selects no pod of this overlay"
            yield Complaint(where(item), "spec.selector", what, "use labels of the pods it is for")


def services_select_one_kind_of_pod(bundle: Bundle) -> Iterator[Complaint]:
    """Endpoints of different programs behind one port answer different things."""
    for item in bundle.of("Service"):
        selector = item["spec"].get("selector")
        pods = bundle.pods_with(selector, namespace_of(item)) if selector else []
        owners = {(pod.where, pod.group == "head") for pod in pods}
        if len(owners) > 1:
            what = f"{selector} selects pods of {', '.join(sorted({pod.where + ' ' + pod.group for pod in pods}))}"
            yield Complaint(where(item), "spec.selector", what, "select one of them")


def service_targets_exist(bundle: Bundle) -> Iterator[Complaint]:
    for item, place, port, pod in _service_ports(bundle):
        target = _target(port)
        if not _has_port(pod, target):
            what = f"pods of {pod.where} {pod.group} have no port {target}"
            todo = f"use one of: {', '.join(port_words(pod)) or 'none declared'}"
            yield Complaint(where(item), f"{place}.targetPort", what.replace("  ", " "), todo)


def headless_ports_are_those_of_pods(bundle: Bundle) -> Iterator[Complaint]:
    """The name leads to the pods themselves: nobody translates a port."""
    for item, place, port, pod in _service_ports(bundle):
        number = _numbers_by_name(pod).get(str(_target(port)), str(_target(port)))
        if item["spec"].get("clusterIP") == "None" and number != str(port.get("port")):
            what = f"{port.get('port')}, and clients reach pods of {pod.where} at {number}"
            yield Complaint(where(item), f"{place}.port", what, "make them equal")


def service_ports_lead_to_their_names(bundle: Bundle) -> Iterator[Complaint]:
    """A port that is named as one of the pods' leads there."""
    for item, place, port, pod in _service_ports(bundle):
        target, meant = _target(port), _numbers_by_name(pod).get(str(port.get("name")))
        if meant is not None and str(target) not in (meant, port.get("name")) and _has_port(pod, target):
            what = f"{target}, and pods of {pod.where} have {port['name']} at {meant}"
            yield Complaint(where(item), f"{place}.targetPort", what, f"use {port['name']}")


def _service_ports(bundle: Bundle) -> Iterator[tuple[Object, str, Object, PodTemplate]]:
    """Each port of each Service with each pod behind it: (Service, path of the port, port, pod)."""
    for item in bundle.of("Service"):
        selector = item["spec"].get("selector")
        pods = bundle.pods_with(selector, namespace_of(item)) if selector else []
        for index, port in enumerate(item["spec"].get("ports") or []):
            for pod in pods:
                yield item, f"spec.ports[{index}]", port, pod


def _target(port: Object) -> object:
    return port.get("targetPort", port.get("port"))


def _numbers_by_name(pod: PodTemplate) -> dict[str, str]:
    """Returns the numbers of the pod's ports, by name."""
    return dict(word.split("=") for word in port_words(pod))


def network_policies_are_valid(item: Object) -> Iterator[Complaint]:
    if item.get("kind") != "NetworkPolicy":
        return
    spec = item["spec"]
    types = spec.get("policyTypes")
    for direction, kind in (("ingress", "Ingress"), ("egress", "Egress")):
        if spec.get(direction) is not None and types is not None and kind not in types:
            yield Complaint(where(item), "spec.policyTypes", f"{direction} rules, but no {kind}", f"add {kind}")
        for index, rule in enumerate(spec.get(direction) or []):
            yield from _rule_complaints(item, f"spec.{direction}[{index}]", direction, rule or {})
    if types is not None and len(types) != len(set(types)):
        yield Complaint(where(item), "spec.policyTypes", f"{types}: one is there twice", "name each once")


def network_policies_name_pods(bundle: Bundle) -> Iterator[Complaint]:
    """A policy, or a peer of one, that matches no pod of ours protects or admits nothing."""
    for item in bundle.of("NetworkPolicy"):
        inside = [pod for pod in bundle.pods if pod.namespace == namespace_of(item)]
        if not any(selected(item["spec"].get("podSelector"), pod.labels) for pod in inside):
            what = f"{item['spec'].get('podSelector')} selects no pod of this overlay"
            yield Complaint(where(item), "spec.podSelector", what, "use labels of the pods it is for")
        for path, peer in _peers(item):
            local = peer.get("podSelector") is not None and peer.get("namespaceSelector") is None
            if local and not any(selected(peer["podSelector"], pod.labels) for pod in inside):
                what = f"{peer['podSelector']} selects no pod of this overlay"
                yield Complaint(where(item), f"{path}.podSelector", what, "use labels of the pods it is for")


def network_policy_ports_exist(bundle: Bundle) -> Iterator[Complaint]:
    """An opened port that no selected pod has is a slip; what else has no port is closed to no purpose."""
    for item in bundle.of("NetworkPolicy"):
        inside = [pod for pod in bundle.pods if pod.namespace == namespace_of(item)]
        pods = [pod for pod in inside if selected(item["spec"].get("podSelector"), pod.labels)]
        for index, rule in enumerate(item["spec"].get("ingress") or []):
            for number, port in enumerate((rule or {}).get("ports") or []):
                target = port.get("port")
                if pods and target is not None and not any(_in_range(pod, port) for pod in pods):
                    place = f"spec.ingress[{index}].ports[{number}].port"
                    yield Complaint(where(item), place, f"no selected pod has port {target}", "open what they have")


def namespaces_are_closed_by_default(bundle: Bundle) -> Iterator[Complaint]:
    """A policy for all pods, those of tomorrow too, that admits nothing: others add to it."""
    for name in sorted({name_of(item) for item in bundle.of("Namespace")} | _spaces(bundle)):
        closed: set[str] = set()
        for policy in bundle.of("NetworkPolicy"):
            spec = policy["spec"]
            if namespace_of(policy) == name and not spec.get("podSelector"):
                rules = {"Ingress": spec.get("ingress"), "Egress": spec.get("egress")}
                closed |= {kind for kind in spec.get("policyTypes") or ["Ingress"] if not rules.get(kind)}
        for kind in sorted({"Ingress", "Egress"} - closed):
            what, todo = f"{kind} is open by default", f"add a NetworkPolicy of all pods, type {kind}, without rules"
            yield Complaint(f"Namespace/{name}", "", what, todo)


def _spaces(bundle: Bundle) -> set[str]:
    """Namespaces where pods run that policies speak of."""
    told = {namespace_of(policy) for policy in bundle.of("NetworkPolicy")}
    return told & {pod.namespace for pod in bundle.pods} - {""}


def inside_ports_are_closed_to_strangers(bundle: Bundle) -> Iterator[Complaint]:
    """Page and worker ports, the fleet's and Ray's: from pods of this namespace alone, and named ones."""
    for item in bundle.of("NetworkPolicy"):
        inside = [pod for pod in bundle.pods if pod.namespace == namespace_of(item)]
        pods = [pod for pod in inside if selected(item["spec"].get("podSelector"), pod.labels)]
        numbers = {number for pod in pods for number in _numbers(pod)} & INSIDE_PORTS
        for index, rule in enumerate(item["spec"].get("ingress") or []):
            opened = sorted(number for number in numbers if _opens(rule or {}, number, pods))
            if not opened:
                continue
            peers = (rule or {}).get("from") or [{}]
            for peer in peers:
                stranger = selected(peer.get("podSelector"), {})
                if peer.get("podSelector") is None or peer.get("namespaceSelector") is not None or stranger:
                    what = f"ports {opened} are open to more than our own pods of this namespace"
                    yield Complaint(where(item), f"spec.ingress[{index}].from", what, "name our own pods there")


def port_words(pod: PodTemplate) -> list[str]:
    return [
        f"{port.get('name', '-')}={port.get('containerPort')}"
        for _, container in pod.containers
        for port in container.get("ports") or []
    ]


def _numbers(pod: PodTemplate) -> set[int]:
    return {port.get("containerPort") for _, container in pod.containers for port in container.get("ports") or []}


def _names(pod: PodTemplate) -> set[str]:
    ports = [port for _, container in pod.containers for port in container.get("ports") or []]
    return {port["name"] for port in ports if "name" in port}


def _has_port(pod: PodTemplate, target: object) -> bool:
    return target in _numbers(pod) or target in _names(pod)


def _in_range(pod: PodTemplate, port: Object) -> bool:
    if port.get("endPort") is None:
        return _has_port(pod, port["port"])
    return True  # a range is of ports that Ray draws: nobody declares them


def _opens(rule: Object, number: int, pods: list[PodTemplate]) -> bool:
    ports = rule.get("ports")
    if not ports:
        return True
    for port in ports:
        target, last = port.get("port"), port.get("endPort")
        if port.get("protocol", "TCP") != "TCP":
            continue
        if target is None or target == number:
            return True
        if isinstance(target, int) and last is not None and target <= number <= last:
            return True
        if isinstance(target, str):
            declared = [one for pod in pods for _, container in pod.containers for one in container.get("ports") or []]
            if any(one.get("name") == target and one.get("containerPort") == number for one in declared):
                return True
    return False


def _peers(item: Object) -> Iterator[tuple[str, Object]]:
    for direction, field in (("ingress", "from"), ("egress", "to")):
        for index, rule in enumerate(item["spec"].get(direction) or []):
            for number, peer in enumerate((rule or {}).get(field) or []):
                yield f"spec.{direction}[{index}].{field}[{number}]", peer


def _rule_complaints(item: Object, path: str, direction: str, rule: Object) -> Iterator[Complaint]:
    field = "from" if direction == "ingress" else "to"
    for number, peer in enumerate(rule.get(field) or []):
        place = f"{path}.{field}[{number}]"
        if not peer or (peer.get("ipBlock") and len(peer) > 1):
            yield Complaint(where(item), place, "a peer is an ipBlock, or selectors", "give one of them")
        for key in ((peer or {}).get("namespaceSelector") or {}).get("matchLabels") or {}:
            if key.rpartition("/")[2] in _ALMOST_NAMES and key != NAMESPACE_LABEL:
                what, todo = f"no namespace has a label {key} by itself", f"use {NAMESPACE_LABEL}"
                yield Complaint(where(item), f"{place}.namespaceSelector", what, todo)
    for number, port in enumerate(rule.get("ports") or []):
        target, last = port.get("port"), port.get("endPort")
        place = f"{path}.ports[{number}]"
        if target is not None and not is_port_number(target) and not is_port_name(target):
            yield Complaint(where(item), f"{place}.port", f"{target!r} is not a port", "use a number or a port's name")
        if last is not None and (not isinstance(target, int) or last < target):
            yield Complaint(where(item), f"{place}.endPort", f"{last} does not follow {target}", "a range of numbers")
