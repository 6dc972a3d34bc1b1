"""Deployments, budgets and autoscalers: what the API says beyond schemas, and what would wedge them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from tests.deploy.manifests.objects import Bundle, Complaint, Object, name_of, namespace_of, selected, where
from tests.deploy.manifests.program import started
from tests.deploy.manifests.words import is_schedule, quantity, share

SCALABLE = frozenset({"Deployment", "StatefulSet", "ReplicaSet"})
"""Kinds with a scale subresource. RayCluster has none."""
ACCESS_MODES = frozenset({"ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"})
_SMALLEST_CLAIM = 1 << 20
_LONGEST_WINDOW_S = 3600
_LONGEST_PERIOD_S = 1800


def selectors_match_templates(item: Object) -> Iterator[Complaint]:
    if item.get("kind") not in ("Deployment", "StatefulSet", "DaemonSet", "ReplicaSet"):
        return
    spec = item["spec"]
    selector = spec.get("selector") or {}
    labels = ((spec.get("template") or {}).get("metadata") or {}).get("labels") or {}
    if not selector.get("matchLabels") and not selector.get("matchExpressions"):
        yield Complaint(where(item), "spec.selector", "selects nothing", f"use some of the template's {labels}")
    elif not selected(selector, labels):
        what = f"{selector.get('matchLabels')} does not match the template's labels {labels}"
        yield Complaint(where(item), "spec.selector", what, "make them equal")


def selectors_are_apart(bundle: Bundle) -> Iterator[Complaint]:
    """What counts, or spreads, the pods of others counts wrongly."""
    for pod in bundle.pods:
        others = [one for one in bundle.pods if one.namespace == pod.namespace and one.where != pod.where]
        for index, rule in enumerate(pod.spec.get("topologySpreadConstraints") or []):
            taken = [one.where for one in others if selected(rule.get("labelSelector"), one.labels)]
            if taken:
                place = f"{pod.path}.spec.topologySpreadConstraints[{index}].labelSelector"
                yield Complaint(pod.where, place, f"counts pods of {taken[0]} too", "name what is these pods' own")
    for item in bundle.of("Deployment", "StatefulSet", "DaemonSet"):
        for pod in bundle.pods:
            foreign = pod.namespace == namespace_of(item) and pod.where != where(item)
            if foreign and selected(item["spec"].get("selector"), pod.labels):
                what = f"selects pods of {pod.where} too"
                yield Complaint(where(item), "spec.selector", what, "name what is these pods' own")


def updates_can_proceed(item: Object) -> Iterator[Complaint]:
    if item.get("kind") != "Deployment":
        return
    if item["spec"].get("paused"):
        yield Complaint(where(item), "spec.paused", "nothing would be rolled out", "leave it out")
    strategy = item["spec"].get("strategy") or {}
    rolling = strategy.get("rollingUpdate") or {}
    place = "spec.strategy.rollingUpdate"
    if strategy.get("type") == "Recreate" and rolling:
        yield Complaint(where(item), place, "Recreate rolls nothing", "leave out rollingUpdate")
    surge, missing = share(rolling.get("maxSurge", "25%")), share(rolling.get("maxUnavailable", "25%"))
    if surge is None or missing is None:
        yield Complaint(where(item), place, f"{rolling}: neither numbers nor percentages", 'write 1 or "25%"')
    elif surge == 0 and missing == 0:
        yield Complaint(where(item), place, "maxSurge and maxUnavailable are both 0", "allow one of them")
    elif surge < 0 or missing < 0 or (isinstance(rolling.get("maxUnavailable"), str) and missing > 1):
        yield Complaint(where(item), place, f"{rolling} is out of bounds", "use 0 or more, at most 100%")


def updates_leave_some(bundle: Bundle) -> Iterator[Complaint]:
    for pod in bundle.pods:
        item = bundle.find(pod.owner, pod.where.partition("/")[2], pod.namespace) or {"spec": {}}
        away = ((item["spec"].get("strategy") or {}).get("rollingUpdate") or {}).get("maxUnavailable")
        if pod.owner == "Deployment" and isinstance(away, int) and away >= pod.replicas > 1:
            what = f"of {pod.replicas} pods {away} may be away at once"
            yield Complaint(pod.where, "spec.strategy.rollingUpdate.maxUnavailable", what, "keep some: 0 or 1")


def counts_are_valid(item: Object) -> Iterator[Complaint]:
    """Numbers that must not be negative, and those that must be below others."""
    spec = item.get("spec") or {}
    if item.get("kind") not in ("Deployment", "StatefulSet"):
        return
    for field in ("replicas", "minReadySeconds", "revisionHistoryLimit", "progressDeadlineSeconds"):
        if (spec.get(field) or 0) < 0:
            yield Complaint(where(item), f"spec.{field}", f"{spec[field]} is negative", "use 0 or more")
    deadline = spec.get("progressDeadlineSeconds", 600)
    if item["kind"] == "Deployment" and (spec.get("minReadySeconds") or 0) >= deadline:
        todo = f"minReadySeconds must be below {deadline}"
        yield Complaint(where(item), "spec.progressDeadlineSeconds", "no rollout could be ready in time", todo)
    restart = ((spec.get("template") or {}).get("spec") or {}).get("restartPolicy", "Always")
    if restart in ("Never", "OnFailure"):
        place = "spec.template.spec.restartPolicy"
        yield Complaint(where(item), place, f"{restart} in a {item['kind']}", "leave it out: Always")


def jobs_are_valid(item: Object) -> Iterator[Complaint]:
    if item.get("kind") not in ("Job", "CronJob"):
        return
    path, spec = "spec", item["spec"]
    if item["kind"] == "CronJob":
        if not is_schedule(str(spec.get("schedule", ""))):
            what, todo = f"{spec.get('schedule')!r} is not a schedule", "write minute hour day month weekday: 0 3 * * *"
            yield Complaint(where(item), "spec.schedule", what, todo)
        path, spec = "spec.jobTemplate.spec", (spec.get("jobTemplate") or {}).get("spec") or {}
    restart = ((spec.get("template") or {}).get("spec") or {}).get("restartPolicy")
    if restart not in ("Never", "OnFailure"):
        place = f"{path}.template.spec.restartPolicy"
        yield Complaint(where(item), place, f"{restart} in a {item['kind']}", "Never or OnFailure")


def claims_are_valid(item: Object) -> Iterator[Complaint]:
    for path, spec in _claims(item):
        modes = spec.get("accessModes") or []
        if not modes or not set(modes) <= ACCESS_MODES:
            what, todo = f"{modes or 'none'}", f"use some of {', '.join(sorted(ACCESS_MODES))}"
            yield Complaint(where(item), f"{path}.accessModes", what, todo)
        told = (spec.get("resources") or {}).get("requests") or {}
        for name in sorted(set(told) - {"storage"}):
            yield Complaint(where(item), f"{path}.resources.requests.{name}", "a claim has no such", "use storage")
        size = told.get("storage")
        number = quantity(size)
        if number is None or number < _SMALLEST_CLAIM:
            yield Complaint(where(item), f"{path}.resources.requests.storage", f"{size!r} is not a size", "write 10Gi")


def claims_can_be_shared(bundle: Bundle) -> Iterator[Complaint]:
    """A volume that one node may mount holds up every pod on another one."""
    for item in bundle.of("PersistentVolumeClaim"):
        modes = set(item["spec"].get("accessModes") or [])
        pods = [
            pod
            for pod in bundle.pods
            for volume in pod.spec.get("volumes") or []
            if (volume.get("persistentVolumeClaim") or {}).get("claimName") == name_of(item)
            and pod.namespace == namespace_of(item)
        ]
        count = sum(pod.replicas for pod in pods)
        if count > 1 and modes and modes <= {"ReadWriteOnce", "ReadWriteOncePod"}:
            what = f"{count} pods mount it, and {', '.join(sorted(modes))} is for one node"
            yield Complaint(where(item), "spec.accessModes", what, "use ReadOnlyMany or ReadWriteMany")


def sets_have_a_headless_service(bundle: Bundle) -> Iterator[Complaint]:
    """A StatefulSet's pods have names in DNS by it."""
    for item in bundle.of("StatefulSet"):
        name = item["spec"].get("serviceName")
        service = bundle.find("Service", str(name), namespace_of(item)) if name else None
        if name and (service is None or service["spec"].get("clusterIP") != "None"):
            known = [name_of(one) for one in bundle.of("Service") if one["spec"].get("clusterIP") == "None"]
            what = f"no headless Service is named {name}"
            yield Complaint(where(item), "spec.serviceName", what, f"use one of: {', '.join(known) or 'none here'}")


def budgets_are_well_formed(item: Object) -> Iterator[Complaint]:
    if item.get("kind") != "PodDisruptionBudget":
        return
    spec = item["spec"]
    given = [field for field in ("minAvailable", "maxUnavailable") if spec.get(field) is not None]
    if len(given) != 1:
        yield Complaint(where(item), "spec", f"{len(given)} of minAvailable and maxUnavailable", "give exactly one")
    for field in given:
        number = share(spec[field])
        if number is None or number < 0 or (isinstance(spec[field], str) and number > 1):
            yield Complaint(where(item), f"spec.{field}", f"{spec[field]!r} is not a count", "write an integer")


def budgets_allow_evictions(bundle: Bundle) -> Iterator[Complaint]:
    for item in bundle.of("PodDisruptionBudget"):
        spec, place = item["spec"], where(item)
        if spec.get("minAvailable") is not None and spec.get("maxUnavailable") is not None:
            continue  # said by budgets_are_well_formed
        pods = [
            pod
            for pod in bundle.pods
            if pod.namespace == namespace_of(item) and selected(spec.get("selector"), pod.labels)
        ]
        if not pods:
            yield Complaint(place, "spec.selector", "selects no pod of this overlay", "use labels of the pods")
            continue
        replicas = sum(pod.replicas for pod in pods)
        if any(pod.owner == "RayCluster" for pod in pods) and not isinstance(spec.get("minAvailable"), int):
            what = "a RayCluster has no scale subresource: every eviction would be refused"
            yield Complaint(place, "spec", what, "use an integer minAvailable below the count")
        elif isinstance(spec.get("minAvailable"), int) and spec["minAvailable"] >= max(replicas, 1) and replicas != 1:
            what = f"minAvailable {spec['minAvailable']} of {replicas} pods: nothing could ever be evicted"
            yield Complaint(place, "spec.minAvailable", what, f"at most {max(replicas - 1, 0)}")
        elif isinstance(spec.get("minAvailable"), int) and replicas == 1 and spec["minAvailable"] >= 1:
            what = "one pod, and it may never be evicted"
            yield Complaint(place, "spec.minAvailable", what, "minAvailable: 0, or a second replica")
        elif _kept(spec, replicas) >= replicas:
            yield Complaint(place, "spec", f"of {replicas} pods nothing could ever be evicted", "allow one")


def budgets_let_the_unhealthy_go(item: Object) -> Iterator[Complaint]:
    """Checks that a budget lets unready pods go. By default they are kept if it has no room, and their node is never
    drained."""
    if item.get("kind") == "PodDisruptionBudget" and item["spec"].get("unhealthyPodEvictionPolicy") != "AlwaysAllow":
        what = "a pod that never gets ready holds up every drain of its node"
        yield Complaint(where(item), "spec.unhealthyPodEvictionPolicy", what, "AlwaysAllow")


def _kept(spec: Object, replicas: int) -> int:
    """How many must stay, as the controller counts: shares are rounded up."""
    field = "minAvailable" if spec.get("minAvailable") is not None else "maxUnavailable"
    told = share(spec.get(field))
    if told is None or (isinstance(spec[field], str) and told > 1):
        return 0  # said by budgets_are_well_formed
    number = math.ceil(told * replicas) if isinstance(spec[field], str) else int(told)
    return number if field == "minAvailable" else replicas - number


def budgets_do_not_overlap(bundle: Bundle) -> Iterator[Complaint]:
    """With two budgets over one pod the eviction API refuses every eviction."""
    for pod in bundle.pods:
        holders = [
            item
            for item in bundle.of("PodDisruptionBudget")
            if namespace_of(item) == pod.namespace and selected(item["spec"].get("selector"), pod.labels)
        ]
        if len(holders) > 1:
            names = ", ".join(name_of(item) for item in holders)
            what = f"pods of {pod.where} {pod.group} are in several budgets ({names})"
            yield Complaint(where(holders[1]), "spec.selector", what, "select each pod once")


def autoscalers_have_a_target(bundle: Bundle) -> Iterator[Complaint]:
    targets: dict[tuple[str, str, str], str] = {}
    for item in bundle.of("HorizontalPodAutoscaler", "ScaledObject"):
        reference = item["spec"].get("scaleTargetRef") or {}
        kind, name = reference.get("kind", "Deployment"), str(reference.get("name"))
        place = "spec.scaleTargetRef"
        if kind not in SCALABLE:
            todo = "scale the router's Deployment; Ray's autoscaler scales the worker groups"
            yield Complaint(where(item), place, f"a {kind} cannot be scaled", todo)
        elif bundle.find(kind, name, namespace_of(item)) is None:
            known = ", ".join(name_of(one) for one in bundle.of(*SCALABLE))
            yield Complaint(where(item), place, f"no {kind} is named {name}", f"use one of: {known}")
        elif reference.get("apiVersion", "apps/v1" if item["kind"] == "ScaledObject" else "") != "apps/v1":
            what = f"{reference.get('apiVersion') or 'none'} has no {kind}"
            yield Complaint(where(item), f"{place}.apiVersion", what, "apps/v1")
        identity = (kind, namespace_of(item), name)
        if identity in targets:
            what = f"{targets[identity]} scales {kind}/{name} already"
            yield Complaint(where(item), place, what, "keep one of HPA and KEDA")
        targets[identity] = where(item)


def autoscalers_alone_say_how_many(bundle: Bundle) -> Iterator[Complaint]:
    for item in bundle.of("HorizontalPodAutoscaler", "ScaledObject"):
        reference = item["spec"].get("scaleTargetRef") or {}
        target = bundle.find(reference.get("kind", "Deployment"), str(reference.get("name")), namespace_of(item))
        told = ((target or {}).get("spec") or {}).get("replicas")
        if told is not None:
            what = f"{where(item)} scales it, and each apply would set it to {told} again"
            yield Complaint(where(target or {}), "spec.replicas", what, "leave it out")


def routers_are_several(bundle: Bundle) -> Iterator[Complaint]:
    """From the first moment, and whichever autoscaler is switched on or off later."""
    for pod in bundle.pods:
        if pod.owner != "Deployment" or not any(args.command == "router" for _, args, _ in started(pod, hooks=False)):
            continue
        if pod.replicas < 2:
            what = f"{pod.replicas}: while it is replaced nobody answers"
            yield Complaint(
                pod.where, "spec.replicas", what, "an autoscaler with minReplicas: 2, as base/autoscaling.yaml"
            )


def autoscalers_have_bounds(item: Object) -> Iterator[Complaint]:
    """KEDA's CRD has a rule for most of its own."""
    if item.get("kind") == "ScaledObject":
        idle, fewest = item["spec"].get("idleReplicaCount"), item["spec"].get("minReplicaCount", 0)
        if idle is not None and idle >= fewest:
            what = f"{idle} is not below minReplicaCount {fewest}"
            yield Complaint(where(item), "spec.idleReplicaCount", what, "leave it out")
    if item.get("kind") != "HorizontalPodAutoscaler":
        return
    fewest, most = item["spec"].get("minReplicas", 1), item["spec"].get("maxReplicas", 0)
    if not 1 <= fewest <= most:
        what = f"from {fewest} to {most}"
        yield Complaint(where(item), "spec.minReplicas", what, "use 1 or more, at most maxReplicas")


def autoscaler_metrics_are_well_formed(item: Object) -> Iterator[Complaint]:
    if item.get("kind") != "HorizontalPodAutoscaler":
        return
    for index, metric in enumerate(item["spec"].get("metrics") or []):
        place = f"spec.metrics[{index}]"
        kind = str(metric.get("type"))
        field = kind[:1].lower() + kind[1:]
        if field not in metric or len([key for key in metric if key != "type"]) != 1:
            yield Complaint(where(item), place, f"type {kind} without exactly its own block", f"give {field}")
            continue
        target = metric[field].get("target") or {}
        wanted = {"Utilization": "averageUtilization", "AverageValue": "averageValue", "Value": "value"}
        given = wanted.get(str(target.get("type")))
        amount = quantity(target.get(given)) if given else None
        if amount is None or amount <= Decimal(0):
            todo = f"{given or 'one of ' + ', '.join(wanted.values())} above 0"
            yield Complaint(where(item), f"{place}.{field}.target", f"{target} asks for nothing", todo)
        elif field == "resource" and metric[field].get("name") not in ("cpu", "memory"):
            yield Complaint(where(item), f"{place}.resource.name", "is not a resource metric", "use cpu or memory")


def measured_resources_are_requested(bundle: Bundle) -> Iterator[Complaint]:
    """Utilization is a share of requests: without them an HPA measures nothing."""
    for item in bundle.of("HorizontalPodAutoscaler"):
        reference = item["spec"].get("scaleTargetRef") or {}
        for metric in item["spec"].get("metrics") or []:
            resource = (metric.get("resource") or {}).get("name")
            for pod in bundle.pods:
                is_target = pod.where == f"{reference.get('kind')}/{reference.get('name')}"
                for path, container in pod.containers if resource and is_target else ():
                    told = container.get("resources") or {}
                    if resource not in {**(told.get("requests") or {}), **(told.get("limits") or {})}:
                        what = f"no request of {resource}, which {where(item)} measures"
                        yield Complaint(pod.where, f"{path}.resources.requests", what, f"request {resource}")


def scaling_behaviours_are_valid(item: Object) -> Iterator[Complaint]:
    """Checks the scaling behaviours of an HPA, or of the one that KEDA makes."""
    spec: Any = item.get("spec") or {}
    behaviour, base = spec.get("behavior"), "spec.behavior"
    if item.get("kind") == "ScaledObject":
        behaviour = ((spec.get("advanced") or {}).get("horizontalPodAutoscalerConfig") or {}).get("behavior")
        base = "spec.advanced.horizontalPodAutoscalerConfig.behavior"
    elif item.get("kind") != "HorizontalPodAutoscaler":
        return
    for direction, rules in (behaviour or {}).items():
        window = rules.get("stabilizationWindowSeconds")
        if window is not None and not 0 <= window <= _LONGEST_WINDOW_S:
            place = f"{base}.{direction}.stabilizationWindowSeconds"
            yield Complaint(where(item), place, f"{window} is out of bounds", f"0 to {_LONGEST_WINDOW_S}")
        if rules.get("policies") == []:
            yield Complaint(where(item), f"{base}.{direction}.policies", "an empty list", "leave it out, or give one")
        for index, policy in enumerate(rules.get("policies") or []):
            place, period = f"{base}.{direction}.policies[{index}]", policy.get("periodSeconds", 0)
            if not 0 < period <= _LONGEST_PERIOD_S or policy.get("value", 0) < 1:
                todo = f"value of 1 or more, periodSeconds 1 to {_LONGEST_PERIOD_S}"
                yield Complaint(where(item), place, f"{policy} is out of bounds", todo)


def _claims(item: Object) -> Iterator[tuple[str, Object]]:
    if item.get("kind") == "PersistentVolumeClaim":
        yield "spec", item["spec"]
    elif item.get("kind") == "StatefulSet":
        for index, claim in enumerate(item["spec"].get("volumeClaimTemplates") or []):
            yield f"spec.volumeClaimTemplates[{index}].spec", claim.get("spec") or {}
