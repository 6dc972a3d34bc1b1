"""Checks of where pods may go, and of the words that the API has for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.deploy.manifests.objects import Complaint, Object, PodTemplate, selected, where
from tests.deploy.manifests.program import started
from tests.deploy.manifests.words import LABEL, is_slip

_TOPOLOGIES = ("kubernetes.io/hostname", "topology.kubernetes.io/zone", "topology.kubernetes.io/region")
_WORDS: dict[str, tuple[str, ...]] = {
    r"(initContainers|containers)\.imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    r"(initContainers|containers)\.terminationMessagePolicy": ("File", "FallbackToLogsOnError"),
    r"(initContainers|containers)\.ports\.protocol": ("TCP", "UDP", "SCTP"),
    r"(initContainers|containers)\.\w+(\.\w+)?\.httpGet\.scheme": ("HTTP", "HTTPS"),
    r"(initContainers|containers)\.volumeMounts\.mountPropagation": ("None", "HostToContainer", "Bidirectional"),
    r"initContainers\.restartPolicy": ("Always", "Never", "OnFailure"),
    r"restartPolicy": ("Always", "OnFailure", "Never"),
    r"dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    r"preemptionPolicy": ("PreemptLowerPriority", "Never"),
    r"(.*\.)?seccompProfile\.type": ("RuntimeDefault", "Localhost", "Unconfined"),
    r"securityContext\.fsGroupChangePolicy": ("Always", "OnRootMismatch"),
    r"volumes\.emptyDir\.medium": ("", "Memory", "HugePages", "HugePages-2Mi", "HugePages-1Gi"),
    r"tolerations\.operator": ("Exists", "Equal", "Lt", "Gt"),
    r"tolerations\.effect": ("NoSchedule", "PreferNoSchedule", "NoExecute", ""),
    r"topologySpreadConstraints\.whenUnsatisfiable": ("ScheduleAnyway", "DoNotSchedule"),
    r"topologySpreadConstraints\.node(Taints|Affinity)Policy": ("Honor", "Ignore"),
    r"affinity\.nodeAffinity\..*\.operator": ("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"),
    r"affinity\.pod(Anti)?Affinity\..*\.operator": ("In", "NotIn", "Exists", "DoesNotExist"),
}
"""Path inside a pod's spec: what may stand there. Published schemas of native kinds name no enumerations."""
_OBJECT_WORDS: dict[str, dict[str, tuple[str, ...]]] = {
    "Service": {
        r"spec\.type": ("ClusterIP", "NodePort", "LoadBalancer", "ExternalName"),
        r"spec\.sessionAffinity": ("None", "ClientIP"),
        r"spec\.ports\.protocol": ("TCP", "UDP", "SCTP"),
        r"spec\.ipFamilies": ("IPv4", "IPv6"),
        r"spec\.ipFamilyPolicy": ("SingleStack", "PreferDualStack", "RequireDualStack"),
        r"spec\.(internal|external)TrafficPolicy": ("Cluster", "Local"),
    },
    "RayCluster": {
        r"spec\.headGroupSpec\.serviceType": ("ClusterIP", "NodePort", "LoadBalancer"),
        r"spec\.autoscalerOptions\.imagePullPolicy": ("Always", "IfNotPresent", "Never"),
    },
    "Deployment": {r"spec\.strategy\.type": ("RollingUpdate", "Recreate")},
    "StatefulSet": {
        r"spec\.updateStrategy\.type": ("RollingUpdate", "OnDelete"),
        r"spec\.podManagementPolicy": ("OrderedReady", "Parallel"),
    },
    "PodDisruptionBudget": {r"spec\.unhealthyPodEvictionPolicy": ("IfHealthyBudget", "AlwaysAllow")},
    "NetworkPolicy": {
        r"spec\.policyTypes": ("Ingress", "Egress"),
        r"spec\.(ingress|egress)\.ports\.protocol": ("TCP", "UDP", "SCTP"),
    },
    "PersistentVolumeClaim": {r"spec\.volumeMode": ("Filesystem", "Block")},
    "ScaledObject": {
        r"spec\.triggers\.metricType": ("AverageValue", "Value", "Utilization"),
        r"spec\.advanced\..*\.selectPolicy": ("Max", "Min", "Disabled"),
        r"spec\.advanced\..*\.policies\.type": ("Pods", "Percent"),
    },
    "HorizontalPodAutoscaler": {
        r"spec\.metrics\.type": ("Resource", "Pods", "Object", "External", "ContainerResource"),
        r"spec\.metrics\.\w+\.target\.type": ("Utilization", "Value", "AverageValue"),
        r"spec\.behavior\.scale(Up|Down)\.selectPolicy": ("Max", "Min", "Disabled"),
        r"spec\.behavior\.scale(Up|Down)\.policies\.type": ("Pods", "Percent"),
    },
    "RoleBinding": {r"roleRef\.kind": ("Role", "ClusterRole"), r"subjects\.kind": ("ServiceAccount", "User", "Group")},
    "ClusterRoleBinding": {r"roleRef\.kind": ("ClusterRole",), r"subjects\.kind": ("ServiceAccount", "User", "Group")},
}


def words_of_pods_are_known(pod: PodTemplate) -> Iterator[Complaint]:
    yield from _unknown_words(_WORDS, pod.spec, pod.where, f"{pod.path}.spec.")


def words_of_objects_are_known(item: Object) -> Iterator[Complaint]:
    words = _OBJECT_WORDS.get(str(item.get("kind")))
    if words is not None:
        yield from _unknown_words(words, item, where(item), "")


def pods_have_a_priority(pod: PodTemplate) -> Iterator[Complaint]:
    """Checks that pods of a RayCluster and of our program have a priority: a batch job that came first would keep the
    node."""
    if (pod.owner == "RayCluster" or any(True for _ in started(pod, hooks=False))) and not pod.spec.get(
        "priorityClassName"
    ):
        place, what = f"{pod.path}.spec.priorityClassName", "none: batch jobs are as important"
        yield Complaint(pod.where, place, what, "twostroke-control, or twostroke-workers")


def spread_cannot_wedge(pod: PodTemplate) -> Iterator[Complaint]:
    seen = set()
    for index, rule in enumerate(pod.spec.get("topologySpreadConstraints") or []):
        place = f"{pod.path}.spec.topologySpreadConstraints[{index}]"
        if rule.get("maxSkew", 0) < 1 or not rule.get("topologyKey"):
            yield Complaint(pod.where, place, "maxSkew below 1 or no topologyKey", "give maxSkew: 1 and a key")
        if rule.get("whenUnsatisfiable") == "DoNotSchedule" and rule.get("nodeTaintsPolicy") != "Honor":
            what = "a node that is down would keep its replacement Pending"
            todo = "whenUnsatisfiable: ScheduleAnyway, or nodeTaintsPolicy: Honor"
            yield Complaint(pod.where, f"{place}.whenUnsatisfiable", what, todo)
        if rule.get("minDomains") is not None and rule.get("whenUnsatisfiable") != "DoNotSchedule":
            yield Complaint(pod.where, f"{place}.minDomains", "needs DoNotSchedule", "leave it out")
        near = [key for key in _TOPOLOGIES if is_slip(str(rule.get("topologyKey")), key)]
        if near:
            what = f"nodes have no label {rule.get('topologyKey')}"
            yield Complaint(pod.where, f"{place}.topologyKey", what, f"use {near[0]}")
        identity = (rule.get("topologyKey"), rule.get("whenUnsatisfiable"))
        if identity in seen:
            yield Complaint(pod.where, place, f"{identity} is there twice", "spread once per key")
        seen.add(identity)


def affinity_cannot_wedge(pod: PodTemplate) -> Iterator[Complaint]:
    base = f"{pod.path}.spec.affinity"
    for kind in ("podAffinity", "podAntiAffinity", "nodeAffinity"):
        preferred = "preferredDuringSchedulingIgnoredDuringExecution"
        for index, one in enumerate(((pod.spec.get("affinity") or {}).get(kind) or {}).get(preferred) or []):
            if not 1 <= one.get("weight", 0) <= 100:
                place = f"{base}.{kind}.{preferred}[{index}].weight"
                yield Complaint(pod.where, place, f"{one.get('weight')} is out of bounds", "use 1 to 100")
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    rules = ((pod.spec.get("affinity") or {}).get("podAntiAffinity") or {}).get(required) or []
    for index, one in enumerate(rules if pod.replicas > 1 else []):
        if selected(one.get("labelSelector"), pod.labels):
            what = f"{pod.replicas} pods, and no two on one node: with fewer nodes, or one down, some stay Pending"
            yield Complaint(pod.where, f"{base}.podAntiAffinity.{required}[{index}]", what, "prefer it, or spread")


def names_in_dns_are_valid(pod: PodTemplate) -> Iterator[Complaint]:
    for field in ("hostname", "subdomain"):
        if pod.spec.get(field) is not None and not LABEL.fullmatch(str(pod.spec[field])):
            what = f"{pod.spec[field]!r} is no DNS label"
            yield Complaint(pod.where, f"{pod.path}.spec.{field}", what, "use a-z, 0-9 and -")
    if pod.spec.get("dnsPolicy") == "None" and not (pod.spec.get("dnsConfig") or {}).get("nameservers"):
        what = "nobody is asked for names"
        yield Complaint(pod.where, f"{pod.path}.spec.dnsPolicy", what, "name dnsConfig.nameservers, or leave it out")


def spread_counts_its_own_pods(pod: PodTemplate) -> Iterator[Complaint]:
    for index, rule in enumerate(pod.spec.get("topologySpreadConstraints") or []):
        if not selected(rule.get("labelSelector"), pod.labels):
            place = f"{pod.path}.spec.topologySpreadConstraints[{index}].labelSelector"
            yield Complaint(pod.where, place, "does not select these pods", f"select some of {pod.labels}")
    affinity = pod.spec.get("affinity") or {}
    for kind in ("podAntiAffinity",):
        for place, term in _terms(affinity.get(kind) or {}):
            if not selected(term.get("labelSelector"), pod.labels):
                full = f"{pod.path}.spec.affinity.{kind}.{place}.labelSelector"
                yield Complaint(pod.where, full, "does not select these pods", f"select some of {pod.labels}")


def tolerations_are_well_formed(pod: PodTemplate) -> Iterator[Complaint]:
    for index, toleration in enumerate(pod.spec.get("tolerations") or []):
        place, exists = f"{pod.path}.spec.tolerations[{index}]", toleration.get("operator") == "Exists"
        devices = {name for _, box in pod.containers for name in (box.get("resources") or {}).get("limits") or {}}
        near = [name for name in sorted(devices) if "/" in name and is_slip(str(toleration.get("key", "")), name)]
        if near:
            yield Complaint(pod.where, f"{place}.key", f"{toleration['key']} taints no node", f"use {near[0]}")
        if exists and toleration.get("value"):
            yield Complaint(pod.where, f"{place}.value", "Exists takes no value", "leave out the value or use Equal")
        if not toleration.get("key") and not exists:
            yield Complaint(pod.where, place, "no key", "name the taint's key, or operator: Exists for all")
        if toleration.get("tolerationSeconds") is not None and toleration.get("effect") != "NoExecute":
            yield Complaint(pod.where, place, "tolerationSeconds needs effect NoExecute", "set it or leave it out")


def _terms(affinity: Object) -> Iterator[tuple[str, Object]]:
    for index, term in enumerate(affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or []):
        yield f"requiredDuringSchedulingIgnoredDuringExecution[{index}]", term
    for index, weighted in enumerate(affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or []):
        yield f"preferredDuringSchedulingIgnoredDuringExecution[{index}].podAffinityTerm", weighted["podAffinityTerm"]


def _unknown_words(words: dict[str, tuple[str, ...]], value: Any, thing: str, prefix: str) -> Iterator[Complaint]:
    for path, plain, leaf in leaves(value, "", ""):
        for pattern, known in words.items():
            if re.fullmatch(pattern, plain) and leaf not in known:
                what = f"{leaf!r} is not known"
                yield Complaint(thing, prefix + path, what, f"use one of: {', '.join(filter(None, known))}")


def leaves(value: Any, path: str, plain: str) -> Iterator[tuple[str, str, Any]]:
    """(path with indices, path without, value) of all that is not a container."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, f"{path}.{key}".strip("."), f"{plain}.{key}".strip("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from leaves(inner, f"{path}[{index}]", plain)
    else:
        yield path, plain, value
