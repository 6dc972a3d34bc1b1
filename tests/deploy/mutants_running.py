"""Mistakes that an API server takes and that show when pods run, or never: each with the one check that notices."""

from __future__ import annotations

from tests.deploy.manifests.objects import Object
from tests.deploy.mutants_native import (
    BOX,
    DECODE,
    HEAD,
    HPA,
    KEDA,
    POD,
    POLICY,
    PREFILL,
    RAY,
    ROUTER,
    SERVICE,
    WITH_HPA,
    WORKER,
)
from tests.deploy.mutate import Mutant, add, both, drop, insert, put, swap, swap_in_list

FILE = "data.cluster[.]yaml"
REDIS = "StatefulSet/twostroke-redis"
HTTP, GRPC, GATE = "HTTPRoute/twostroke", "GRPCRoute/twostroke", "Gateway/twostroke"
BOARD = "ConfigMap/twostroke-dashboards"
MODELS = "PersistentVolumeClaim/twostroke-models"
LAUNCHER = f"{HEAD}.initContainers[launcher]"
ROUTER_TLS = "dev-cpu+router-tls"
SECURITY = "".join(
    ["security:\n", *(f"  cluster_tls_{part}: /etc/twostroke/cluster-tls/{file}\n"
                      for part, file in (("cert", "tls.crt"), ("key", "tls.key"), ("ca", "ca.crt")))]
)  # fmt: skip


def _object(api_version: str, kind: str, namespace: str = "twostroke", **fields: Object) -> Object:
    """A further one."""
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {"name": "further", **({"namespace": namespace} if namespace else {})},
        **fields,
    }


def _ingress(service: str, port: Object) -> Object:
    backend = {"service": {"name": service, "port": port}}
    rule = {"http": {"paths": [{"path": "/v1", "pathType": "Prefix", "backend": backend}]}}
    return _object("networking.k8s.io/v1", "Ingress", spec={"rules": [rule]})


def _route(backend: str) -> Object:
    rules = [{"backendRefs": [{"name": backend, "port": 8000}]}]
    return {
        **_object("gateway.networking.k8s.io/v1", "HTTPRoute", "twostroke-dev"),
        "spec": {"parentRefs": [{"name": "further"}], "rules": rules},
    }


def _rule(rule: Object) -> Object:
    return _object(
        "monitoring.coreos.com/v1", "PrometheusRule", spec={"groups": [{"name": "further", "rules": [rule]}]}
    )


def _cron(schedule: str, restart: str) -> Object:
    box = {
        "name": "report",
        "image": "registry.example.com/report:1",
        "resources": {"requests": {"memory": "64Mi"}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }
    job = {"template": {"spec": {"restartPolicy": restart, "containers": [box]}}}
    return _object("batch/v1", "CronJob", spec={"schedule": schedule, "jobTemplate": {"spec": job}})


PODS = [
    Mutant("a container that asks for nothing", "requests_are_made", drop(ROUTER, f"{BOX}.resources")),
    Mutant("a tenth of a byte", "quantities_are_valid",
           put(ROUTER, f"{BOX}.resources", {"requests": {"cpu": 1, "memory": "100m"}})),
    Mutant("two seconds to start", "probe_numbers_are_valid", put(ROUTER, f"{BOX}.startupProbe.failureThreshold", 1)),
    Mutant("files for root alone", "files_can_be_read", put(ROUTER, f"{POD}.volumes[token].secret.defaultMode", 0o400)),
    Mutant("files for a group that nobody has", "files_can_be_read", drop(ROUTER, f"{POD}.securityContext.fsGroup")),
    Mutant("a home that is read-only", "scratch_can_be_written",
           put(ROUTER, f"{BOX}.volumeMounts[tmp].readOnly", True)),
    Mutant("a home where nothing is mounted", "scratch_can_be_written",
           put(RAY, f"{DECODE}.env[HOME].value", "/home/twostroke")),
    Mutant("a page of health that there is not", "pages_of_probes_are_served",
           put(ROUTER, f"{BOX}.livenessProbe", {"httpGet": {"path": "/healthz", "port": "metrics"}})),
    Mutant("an autoscaler that may gain privileges", "pods_are_restricted",
           put(RAY, "spec.autoscalerOptions.securityContext.allowPrivilegeEscalation", True)),
    Mutant("an autoscaler that asks for more than it may have", "requests_are_within_limits",
           put(RAY, "spec.autoscalerOptions.resources.limits.memory", "256Mi")),
    Mutant("an autoscaler that mounts what there is not", "mounts_have_volumes",
           add(RAY, "spec.autoscalerOptions.volumeMounts", {"name": "scratch", "mountPath": "/scratch"})),
]  # fmt: skip

KINDS = [
    Mutant("a size of a set's volume that is none", "claims_are_valid",
           put(REDIS, "spec.volumeClaimTemplates[0].spec.resources.requests.storage", "1GB")),
    Mutant("an access mode of a set's volume that is none", "claims_are_valid",
           put(REDIS, "spec.volumeClaimTemplates[0].spec.accessModes", ["ReadWriteOnc"])),
    Mutant("a volume of one node for many pods", "claims_can_be_shared",
           put(MODELS, "spec.accessModes", ["ReadWriteOnce"])),
    Mutant("a set without names in DNS", "sets_have_a_headless_service", put(REDIS, "spec.serviceName", "redis")),
    Mutant("a window of ten hours", "scaling_behaviours_are_valid",
           put(HPA, "spec.behavior.scaleDown.stabilizationWindowSeconds", 36000), WITH_HPA),
    Mutant("a policy of no pods", "scaling_behaviours_are_valid",
           put(KEDA, "spec.advanced.horizontalPodAutoscalerConfig.behavior.scaleDown.policies[0].value", 0)),
    Mutant("a metric type that is unknown", "words_of_objects_are_known",
           put(KEDA, "spec.triggers[0].metricType", "Average")),
    Mutant("a share of what has no whole", "triggers_are_complete",
           put(KEDA, "spec.triggers[0].metricType", "Utilization")),
    Mutant("a time that there is not", "jobs_are_valid", insert(_cron("0 25 * * *", "Never"))),
    Mutant("a job that never ends", "jobs_are_valid", insert(_cron("0 3 * * *", "Always"))),
    Mutant("a quota below zero", "amounts_are_valid",
           insert(_object("v1", "ResourceQuota", spec={"hard": {"pods": "-1"}}))),
    Mutant("a group that is a version", "grants_are_well_formed",
           insert({**_object("rbac.authorization.k8s.io/v1", "Role"),
                   "rules": [{"apiGroups": ["v1"], "resources": ["pods"], "verbs": ["get"]}]})),
    Mutant("a router that owns the cluster", "grants_are_well_formed", insert({
        **_object("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", ""),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
        "subjects": [{"kind": "ServiceAccount", "name": "twostroke-router", "namespace": "twostroke"}]})),
    Mutant("a name that leads nowhere", "service_kinds_are_consistent",
           insert(_object("v1", "Service", spec={"type": "ExternalName"}))),
    Mutant("an Ingress to no Service", "references_exist", insert(_ingress("router", {"number": 8000}))),
    Mutant("an Ingress to no port", "ports_of_ingresses_exist", insert(_ingress("twostroke-router", {"number": 80}))),
    Mutant("an expression with values that it does not take", "selectors_are_well_formed", add(
        "NetworkPolicy/ray", "spec.podSelector.matchExpressions",
        {"key": "app.kubernetes.io/component", "operator": "Exists", "values": ["head"]})),
    Mutant("a port that leads to another one", "service_ports_lead_to_their_names",
           put(SERVICE, "spec.ports[http].targetPort", "metrics")),
]  # fmt: skip

NETWORK = [
    Mutant("page ports open to routers, who may not go there yet", "what_must_not_get_through_does_not",
           add(POLICY, "spec.ingress[0].ports", {"protocol": "TCP", "port": 50053})),
    Mutant("worker ports open to the whole namespace", "inside_ports_are_closed_to_strangers",
           add("NetworkPolicy/ray", "spec.ingress[0].from", {"podSelector": {}})),
    Mutant("a block without a mask", "address_blocks_are_valid",
           put("NetworkPolicy/dns", "spec.egress[0].to[1].ipBlock.cidr", "169.254.20.10")),
    Mutant("a label that namespaces do not have", "network_policies_are_valid", put(
        "NetworkPolicy/monitoring", "spec.ingress[0].from[0].namespaceSelector.matchLabels", {"name": "monitoring"})),
    Mutant("DNS in a namespace that has none", "what_must_get_through_does", put(
        "NetworkPolicy/dns", "spec.egress[0].to[0].namespaceSelector",
        {"matchLabels": {"kubernetes.io/metadata.name": "dns"}})),
    Mutant("a Redis that the head does not reach", "what_is_outside_is_reached",
           put("NetworkPolicy/redis", "spec.ingress[0].from[0].podSelector.matchLabels",
               {"app.kubernetes.io/component": "redis"})),
    Mutant("a collector at a closed port", "what_is_outside_is_reached",
           put("NetworkPolicy/tracing", "spec.egress[0].ports[0].port", 4318)),
    Mutant("HTTPS without a certificate", "listeners_are_complete",
           drop(GATE, "spec.listeners[http-api].tls")),
    Mutant("routes of namespaces that nobody selects", "listeners_are_complete",
           put(GATE, "spec.listeners[http-api].allowedRoutes.namespaces.from", "Selector")),
    Mutant("a certificate of another namespace", "other_namespaces_grant_it",
           put(GATE, "spec.listeners[http-api].tls.certificateRefs[0].namespace", "certificates")),
    Mutant("streams of half a minute", "streams_are_not_cut", put(HTTP, "spec.rules[0].timeouts", {"request": "30s"})),
    Mutant("a pool of another group", "routes_have_a_backend",
           put(HTTP, "spec.rules[0].backendRefs[0].group", "inference.networking.x-k8s.io")),
    Mutant("a plain gateway before routers with TLS", "gateways_speak_as_routers", both(
        insert({**_object("gateway.networking.k8s.io/v1", "Gateway", "twostroke-dev"), "spec": {
            "gatewayClassName": "any", "listeners": [{"name": "http", "port": 80, "protocol": "HTTP"}]}}),
        insert(_route("twostroke-router"))), ROUTER_TLS),
]  # fmt: skip

MONITORING = [
    Mutant("a scrape that may last longer than its turn", "scrapes_can_succeed",
           put("ServiceMonitor/twostroke-router", "spec.endpoints[0].scrapeTimeout", "30s")),
    Mutant("a scrape by TLS", "scrapes_can_succeed",
           put("PodMonitor/twostroke-workers", "spec.podMetricsEndpoints[0].scheme", "https")),
    Mutant("a template of no function", "rules_are_taken", insert(_rule({
        "alert": "A", "expr": "up == 0", "annotations": {"summary": "{{ $value | humanise }}", "action": "look"}}))),
    Mutant("a name with dashes", "rules_are_taken", insert(_rule({"record": "a-b", "expr": "up"}))),
    Mutant("a dashboard that is no JSON", "dashboards_can_be_read", put(BOARD, "data.router[.]json", "{")),
    Mutant("a dashboard of no metric", "queries_name_metrics_that_there_are",
           swap(BOARD, "data.fleet[.]json", "twostroke_fleet_workers", "twostroke_fleet_worker")),
    Mutant("a dashboard's variable of no metric", "queries_name_metrics_that_there_are",
           swap(BOARD, "data.worker[.]json", "label_values(twostroke_pages,", "label_values(twostroke_page,")),
]  # fmt: skip

RAYS = [
    Mutant("an empty field behind a gate", "ray_needs_no_gates", put(RAY, "spec.tlsOptions", {})),
    Mutant("an object store that Ray refuses", "start_params_fit_the_pod",
           put(RAY, "spec.headGroupSpec.rayStartParams.object-store-memory", "8000000")),
    Mutant("shared memory that is smaller than the object store", "object_stores_fit_shared_memory",
           put(RAY, f"{PREFILL}.volumes[shared-mem].emptyDir.sizeLimit", "64Mi")),
    Mutant("shared memory on disk", "object_stores_fit_shared_memory",
           drop(RAY, f"{PREFILL}.volumes[shared-mem].emptyDir.medium")),
    Mutant("an autoscaler without a token", "autoscaler_may_speak_with_the_api",
           put(RAY, f"{HEAD}.automountServiceAccountToken", False)),
]  # fmt: skip

OURS = [
    Mutant("a variable that the program does not read", "variables_are_read",
           add(ROUTER, f"{BOX}.env", {"name": "TWOSTROKE_FLEET", "value": "a:1"})),
    Mutant("a setting that Ray does not read", "variables_are_read",
           put("ConfigMap/ray-env", "data.RAY_health_check_failure_treshold", "3")),
    Mutant("a setting in seconds that is not a number", "variables_are_read",
           put("ConfigMap/ray-env", "data.RAY_health_check_period_ms", "1s")),
    Mutant("a router for itself", "servers_listen_outside",
           swap_in_list(ROUTER, f"{BOX}.args", "--host=0.0.0.0", "--host=127.0.0.1")),
    Mutant("a launcher that Kubernetes waits for", "launchers_are_sidecars", drop(RAY, f"{LAUNCHER}.restartPolicy")),
    Mutant("a launcher at another port of its pod", "addresses_lead_to_services",
           swap_in_list(RAY, f"{LAUNCHER}.args", ":6379", ":6380")),
    Mutant("a launcher without the fleet's secret", "secrets_are_given",
           put(RAY, f"{LAUNCHER}.env[TWOSTROKE_TOKEN_FILE].name", "TOKEN_FILE")),
    Mutant("a launcher without Ray's token", "secrets_are_given",
           put(RAY, f"{LAUNCHER}.env[RAY_AUTH_TOKEN_PATH].name", "RAY_TOKEN_PATH")),
    Mutant("a certificate without its key", "commands_parse",
           swap_in_list(ROUTER, f"{BOX}.args", "--cluster-tls-key=/etc/twostroke/cluster-tls/tls.key", "--seed=9")),
    Mutant("routers at a port of their own that is not declared", "ports_of_flags_are_declared",
           swap_in_list(ROUTER, f"{BOX}.args", "--peer-port=50056", "--peer-port=50057")),
    Mutant("workers that speak plainly", "certificates_agree",
           swap("ConfigMap/cluster", FILE, SECURITY, "# not /etc/twostroke/cluster-tls\n")),
    Mutant("a probe that speaks no TLS", "probes_speak_as_their_port",
           put(RAY, f"{WORKER}.readinessProbe", {"grpc": {"port": 50052, "service": "ready"}})),
    Mutant("a model that is mounted elsewhere", "models_are_mounted",
           put(RAY, f"{WORKER}.volumeMounts[models].mountPath", "/model")),
    Mutant("pages that the pod has no memory for", "memory_has_room_for_pages",
           swap("ConfigMap/cluster", FILE, "256M", "64G"), "dev-cpu"),
    Mutant("a model that clients know by two names", "routers_serve_the_fleets_model",
           swap_in_list(ROUTER, f"{BOX}.args", "model-name=llama-3.1-8b-instruct", "model-name=llama")),
    Mutant("more workers than there will be pods", "cluster_files_fit_the_pods",
           swap("ConfigMap/cluster", FILE, "max_decode: 8", "max_decode: 16")),
    Mutant("a resource that no pod has", "cluster_files_fit_the_pods",
           swap("ConfigMap/cluster", FILE, "num_cpus: 1", "num_cpus: 1, nvme: 1"), "dev-cpu"),
    Mutant("an image in capitals", "images_are_the_same", put(REDIS, f"{POD}.containers[redis].image", "Redis:7")),
]  # fmt: skip

RUNNING = [*PODS, *KINDS, *NETWORK, *MONITORING, *RAYS, *OURS]
