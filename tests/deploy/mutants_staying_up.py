"""Ways to have pods that wait for ever, are ended for nothing or lose what they had; who notices."""

from __future__ import annotations

from tests.deploy.manifests.objects import Object
from tests.deploy.mutants_native import BOX, DECODE, HEAD, HPA, KEDA, POD, POLICY, PREFILL, RAY, ROUTER
from tests.deploy.mutate import Mutant, add, both, drop, insert, put, swap, swap_in_list, without

REDIS = "StatefulSet/twostroke-redis"
HEADLESS = "Service/twostroke-router-headless"
BUDGET = "PodDisruptionBudget/twostroke-router"
MONITOR, PODS_MONITOR = "ServiceMonitor/twostroke-router", "PodMonitor/twostroke-workers"
HTTP, GATE, POOL = "HTTPRoute/twostroke", "Gateway/twostroke", "InferencePool/twostroke"
FILE = "data.cluster[.]yaml"
ROUTERS = {"matchLabels": {"app.kubernetes.io/component": "router"}}
LAUNCHER = f"{HEAD}.initContainers[launcher]"
NODE = "kubernetes.io/hostname"


def _certificate(**changes: object) -> Object:
    spec = {
        "secretName": "twostroke-cluster-tls",
        "dnsNames": ["twostroke.cluster"],
        "usages": ["server auth", "client auth"],
        "issuerRef": {"name": "ca", "kind": "ClusterIssuer"},
    }
    return {
        "apiVersion": "cert-manager.io/v1",
        "kind": "Certificate",
        "metadata": {"name": "further", "namespace": "twostroke"},
        "spec": {**spec, **changes},
    }


PLACES = [
    Mutant("no two routers on one node", "affinity_cannot_wedge", put(ROUTER, f"{POD}.affinity", {"podAntiAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": NODE, "labelSelector": ROUTERS}]}})),
    Mutant("a preference of no weight", "affinity_cannot_wedge", put(ROUTER, f"{POD}.affinity", {"podAntiAffinity": {
        "preferredDuringSchedulingIgnoredDuringExecution": [
            {"weight": 0, "podAffinityTerm": {"topologyKey": NODE, "labelSelector": ROUTERS}}]}})),
    Mutant("a topology that nodes do not have", "spread_cannot_wedge",
           put(ROUTER, f"{POD}.topologySpreadConstraints[0].topologyKey", "kubernetes.io/hostnam")),
    Mutant("a host's name with capitals", "names_in_dns_are_valid", put(ROUTER, f"{POD}.hostname", "Router")),
    Mutant("names that nobody knows", "names_in_dns_are_valid", put(ROUTER, f"{POD}.dnsPolicy", "None")),
    Mutant("an autoscaler's image that is pulled sometimes", "words_of_objects_are_known",
           put(RAY, "spec.autoscalerOptions.imagePullPolicy", "Sometimes")),
    Mutant("addresses of an unknown family", "words_of_objects_are_known", put(HEADLESS, "spec.ipFamilies", ["IPV4"])),
]  # fmt: skip

SECURITY = [
    Mutant("a setting of the kernel", "pods_are_restricted",
           put(ROUTER, f"{POD}.securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}])),
    Mutant("an unmasked /proc", "pods_are_restricted", put(ROUTER, f"{BOX}.securityContext.procMount", "Unmasked")),
    Mutant("a type of SELinux", "pods_are_restricted",
           put(RAY, f"{PREFILL}.securityContext.seLinuxOptions", {"type": "spc_t"})),
    Mutant("a password as text", "secrets_are_no_text",
           put(REDIS, f"{POD}.containers[redis].env[0]", {"name": "REDISCLI_AUTH", "value": "hunter2"})),
    Mutant("a Secret of certificates without a key", "data_is_well_formed", insert({
        "apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "data": {"tls.crt": "YQ=="},
        "metadata": {"name": "further", "namespace": "twostroke"}})),
]  # fmt: skip

CERTIFICATES = [
    Mutant("a certificate for nobody", "certificates_are_complete",
           insert(_certificate(secretName="further", dnsNames=[]))),
    Mutant("a certificate with an unknown field", "certificates_are_complete", insert(_certificate(dnsName="a"))),
    Mutant("a certificate for no usage", "certificates_are_complete",
           insert(_certificate(usages=["server auth", "client auth", "server"]))),
    Mutant("a certificate that is renewed before it is made", "certificates_are_complete",
           insert(_certificate(duration="24h", renewBefore="48h"))),
    Mutant("a certificate for another cluster", "cluster_certificates_fit",
           insert(_certificate(dnsNames=["cluster.local"]))),
    Mutant("a certificate for servers alone", "cluster_certificates_fit",
           insert(_certificate(usages=["server auth"]))),
    Mutant("a certificate by nobody", "issuers_exist",
           insert(_certificate(issuerRef={"name": "ca", "kind": "Issuer"}))),
]  # fmt: skip

PROBES = [
    Mutant("a second to live", "probe_numbers_are_valid", put(
        ROUTER, f"{BOX}.livenessProbe",
        {"grpc": {"port": 50055, "service": "live"}, "periodSeconds": 1, "failureThreshold": 1})),
    Mutant("a router that nobody asks", "routers_are_probed", drop(ROUTER, f"{BOX}.livenessProbe")),
    Mutant("a probe of another host", "probes_ask_this_pod", put(
        ROUTER, f"{BOX}.livenessProbe", {"httpGet": {"port": "metrics", "path": "/live", "host": "127.0.0.1"}})),
    Mutant("a probe by TLS", "probes_ask_this_pod", put(
        ROUTER, f"{BOX}.livenessProbe", {"httpGet": {"port": "metrics", "path": "/live", "scheme": "HTTPS"}})),
    Mutant("a Service of pods that may not be ready", "services_lead_to_ready_pods",
           drop(REDIS, f"{POD}.containers[redis].readinessProbe")),
    Mutant("a router that leaves at once", "pods_are_let_go", drop(ROUTER, f"{BOX}.lifecycle")),
    Mutant("a worker that leaves at once", "pods_are_let_go", drop(RAY, f"{DECODE}.lifecycle")),
    Mutant("a rollout that waits", "updates_can_proceed", put(ROUTER, "spec.paused", True)),
    Mutant("three quarters of two", "budgets_allow_evictions", both(
        drop(BUDGET, "spec.maxUnavailable"), put(BUDGET, "spec.minAvailable", "75%"))),
    Mutant("twice all", "budgets_are_well_formed", put(BUDGET, "spec.minAvailable", "200%"), "dev-cpu"),
    Mutant("idle ones as many as the fewest", "autoscalers_have_bounds", put(KEDA, "spec.idleReplicaCount", 2)),
    Mutant("more in memory than there is", "memory_volumes_fit",
           put(RAY, f"{HEAD}.volumes[shared-mem].emptyDir.sizeLimit", "128Gi")),
    Mutant("a volume of root's", "volumes_can_be_written", drop(REDIS, f"{POD}.securityContext.fsGroup")),
    Mutant("three memories", "redis_remembers", put(REDIS, "spec.replicas", 3)),
    Mutant("routers in two places", "routers_are_counted_once",
           swap("ConfigMap/cluster", FILE, "routers:\n  count: 0", "routers:\n  count: 2")),
    Mutant("a limit below none", "commands_parse", add(ROUTER, f"{BOX}.args", "--max-queued-requests=-1")),
    Mutant("a prompt where nothing is mounted", "paths_of_the_program_are_mounted",
           add(ROUTER, f"{BOX}.args", "--public-prefix=/run/prefix.txt")),
]  # fmt: skip

WAYS = [
    Mutant("a port that nobody translates", "headless_ports_are_those_of_pods",
           put(HEADLESS, "spec.ports[grpc].port", 80)),
    Mutant("rpc by UDP", "what_must_get_through_does", put(POLICY, "spec.ingress[0].ports[0].protocol", "UDP")),
    Mutant("routers that do not reach each other", "what_must_get_through_does", without("NetworkPolicy/peers")),
    Mutant("metrics that nobody reaches", "what_is_outside_is_reached", without("NetworkPolicy/monitoring")),
    Mutant("an autoscaler without the API server", "what_is_outside_is_reached", without("NetworkPolicy/autoscaler")),
    Mutant("a route to nowhere", "routes_have_a_backend", put(HTTP, "spec.rules[0].backendRefs", [])),
    Mutant("a certificate in a ConfigMap", "listeners_are_complete",
           put(GATE, "spec.listeners[http-api].tls.certificateRefs[0].kind", "ConfigMap")),
    Mutant("a pool of the admin port", "pools_name_pods", put(POOL, "spec.targetPorts[0].number", 50055)),
    Mutant("a monitor of nothing", "scrapes_can_succeed", put(MONITOR, "spec.endpoints", [])),
    Mutant("a monitor of no number", "monitors_find_their_targets",
           put(PODS_MONITOR, "spec.podMetricsEndpoints[0]", {"portNumber": 9099})),
    Mutant("a monitor with the password of nobody", "references_exist",
           put(MONITOR, "spec.endpoints[0].basicAuth", {"username": {"name": "nobody", "key": "user"}})),
    Mutant("a Prometheus without a scheme", "triggers_are_complete",
           put(KEDA, "spec.triggers[0].metadata.serverAddress", "prometheus:9090")),
    Mutant("a query of many numbers", "triggers_are_complete",
           put(KEDA, "spec.triggers[0].metadata.query", "twostroke_open_requests")),
    Mutant("a window that ends at once", "autoscaler_is_v2", put(RAY, "spec.autoscalerOptions.idleTimeoutSeconds", 0)),
    Mutant("resources that are no JSON", "start_params_are_known",
           put(RAY, "spec.headGroupSpec.rayStartParams.resources", "{fast: 1}")),
    Mutant("metrics of a worker at another port", "head_ports_are_named",
           put(RAY, "spec.workerGroupSpecs[prefill].rayStartParams.metrics-export-port", "9999")),
    Mutant("groups that are labelled as each other", "ray_group_labels_match", both(
        put(RAY, "spec.workerGroupSpecs[prefill].labels.role", "decode"),
        put(RAY, "spec.workerGroupSpecs[decode].labels.role", "prefill"))),
]  # fmt: skip

LAUNCHERS = [
    Mutant("a launcher that starts while Redis is cleaned up", "redis_clean_up_is_apart", both(
        put(RAY, f"{LAUNCHER}.command", ["twostroke"]), drop(RAY, f"{LAUNCHER}.args[0]"))),
    Mutant("a launcher that waits in the head's pod alone", "redis_clean_up_is_apart",
           swap_in_list(RAY, f"{LAUNCHER}.command", "= head", "= redis-cleanup")),
    Mutant("a launcher that asks another label", "redis_clean_up_is_apart",
           put(RAY, f"{LAUNCHER}.env[NODE_TYPE].valueFrom.fieldRef.fieldPath", "metadata.labels['ray.io/group']")),
    Mutant("a Service that leads to the clean-up pod", "redis_clean_up_is_apart",
           drop("Service/twostroke-fleet", "spec.selector.ray[.]io/node-type")),
    Mutant("a monitor of the clean-up pod", "redis_clean_up_is_apart",
           drop("PodMonitor/twostroke-ray", "spec.selector.matchExpressions[1]")),
    Mutant("a policy that lets others into the clean-up pod", "redis_clean_up_is_apart",
           drop("NetworkPolicy/fleet", "spec.podSelector.matchLabels.ray[.]io/node-type")),
    Mutant("a Redis that the clean-up pod does not reach", "what_is_outside_is_reached",
           put("NetworkPolicy/redis", "spec.ingress[0].from[0].podSelector.matchLabels.ray[.]io/node-type", "head")),
    Mutant("routers without a priority", "pods_have_a_priority", drop(ROUTER, f"{POD}.priorityClassName")),
    Mutant("workers without a priority", "pods_have_a_priority", drop(RAY, f"{PREFILL}.priorityClassName")),
    Mutant("a priority that nobody made", "references_exist", put(ROUTER, f"{POD}.priorityClassName", "twostroke")),
    Mutant("a budget that keeps broken pods", "budgets_let_the_unhealthy_go",
           drop(BUDGET, "spec.unhealthyPodEvictionPolicy")),
    Mutant("one router", "routers_are_several", put(HPA, "spec.minReplicas", 1), "prod-gpu"),
    Mutant("one router by KEDA", "routers_are_several", put(KEDA, "spec.minReplicaCount", 1)),
    Mutant("an object of nobody", "labels_are_the_recommended_ones",
           drop(HEADLESS, "metadata.labels.app[.]kubernetes[.]io/name")),
    Mutant("an object of another version", "labels_are_the_recommended_ones",
           put(RAY, "metadata.labels.app[.]kubernetes[.]io/version", "0.0.1")),
    Mutant("an object of no part", "labels_are_the_recommended_ones",
           drop(RAY, "metadata.labels.app[.]kubernetes[.]io/component")),
    Mutant("a launcher with a Ray of its own", "launchers_join_their_pod",
           drop(RAY, f"{LAUNCHER}.args[3]")),
    Mutant("a launcher that takes its workers along", "launchers_join_their_pod",
           drop(RAY, f"{LAUNCHER}.args[4]")),
    Mutant("a launcher that sees no process", "launchers_join_their_pod", drop(RAY, f"{HEAD}.shareProcessNamespace")),
    Mutant("a launcher with other files than Ray's", "launchers_join_their_pod",
           drop(RAY, f"{LAUNCHER}.volumeMounts[ray-logs]")),
    Mutant("a launcher without the certificates", "files_of_cluster_files_are_mounted",
           put(RAY, f"{LAUNCHER}.volumeMounts[cluster-tls].mountPath", "/etc/tls")),
    Mutant("a worker with other settings than the head", "settings_of_ray_agree", drop(RAY, f"{DECODE}.envFrom")),
    Mutant("a worker without a home", "homes_are_told", drop(RAY, f"{DECODE}.env[HOME]")),
    Mutant("keys that nobody asks for", "secrets_are_used",
           swap_in_list(ROUTER, f"{BOX}.args", "--api-keys=/etc/twostroke/api-keys/keys.yaml", "--seed=9")),
    Mutant("a hook without a command", "commands_are_given", drop(RAY, f"{DECODE}.lifecycle.preStop.exec.command")),
    Mutant("a hook of a program that the image has not", "commands_parse",
           put(RAY, f"{DECODE}.lifecycle.preStop.exec.command[0]", "twostrokes")),
    Mutant("a variable without a value", "environment_is_well_formed",
           drop(ROUTER, f"{BOX}.env[POD_IP].valueFrom")),
    Mutant("room for two workers with one port", "cluster_files_fit_the_pods",
           put(RAY, "spec.workerGroupSpecs[prefill].rayStartParams.num-cpus", "4"), "dev-cpu"),
    Mutant("an admin port of the kernel's choice", "ports_of_flags_are_declared",
           swap_in_list(ROUTER, f"{BOX}.args", "--admin-port=50055", "--max-queued-requests=9")),
    Mutant("a start that waits for workers", "probes_ask_what_is_answered",
           put(ROUTER, f"{BOX}.startupProbe.grpc.service", "ready")),
    Mutant("a worker of which nobody knows whether it serves", "pods_are_let_go",
           drop(RAY, f"{DECODE}.readinessProbe")),
    Mutant("a password that the head does not know", "redis_remembers",
           drop(RAY, "spec.gcsFaultToleranceOptions.redisPassword")),
    Mutant("a Redis for routers too", "what_must_not_get_through_does_not", put(
        "NetworkPolicy/redis", "spec.ingress[0].from[0].podSelector",
        {"matchLabels": {"app.kubernetes.io/part-of": "twostroke"}})),
    Mutant("an admin port for the namespace", "what_must_not_get_through_does_not",
           put("NetworkPolicy/router", "spec.ingress[1].from", [{"podSelector": {}}])),
    Mutant("a selector of everybody's pods", "selectors_are_apart",
           put(ROUTER, "spec.selector.matchLabels", {"app.kubernetes.io/part-of": "twostroke"})),
    Mutant("a spread that counts everybody's pods", "selectors_are_apart",
           put(ROUTER, f"{POD}.topologySpreadConstraints[0].labelSelector",
               {"matchLabels": {"app.kubernetes.io/part-of": "twostroke"}})),
    Mutant("a label's value that no pod has", "expressions_name_pods",
           add("NetworkPolicy/monitoring", "spec.podSelector.matchExpressions[0].values", "workers")),
    Mutant("a rollout that takes all away", "updates_leave_some",
           put(ROUTER, "spec.strategy.rollingUpdate.maxUnavailable", 2), "dev-cpu"),
    Mutant("a taint that is misspelt", "tolerations_are_well_formed",
           put(RAY, f"{PREFILL}.tolerations[0].key", "nvidia.com/gpus")),
    Mutant("an object without a name", "names_are_valid", insert({
        "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "spec": {"minAvailable": 1}})),
]  # fmt: skip

STAYING_UP = [*LAUNCHERS, *PLACES, *SECURITY, *CERTIFICATES, *PROBES, *WAYS]
