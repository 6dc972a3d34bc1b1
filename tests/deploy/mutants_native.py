"""Ways to get pods, workloads, networks and references wrong, each with the one check that notices."""

from __future__ import annotations

from tests.deploy.manifests.objects import Object
from tests.deploy.mutate import Mutant, add, both, drop, insert, put, swap_in_list, twice, without

ROUTER = "Deployment/twostroke-router"
POD = "spec.template.spec"
BOX = f"{POD}.containers[router]"
RAY = "RayCluster/twostroke"
HEAD = "spec.headGroupSpec.template.spec"
PREFILL = "spec.workerGroupSpecs[prefill].template.spec"
WORKER = f"{PREFILL}.containers[worker]"
DECODE = "spec.workerGroupSpecs[decode].template.spec.containers[worker]"
SERVICE = "Service/twostroke-router"
BUDGET = "PodDisruptionBudget/twostroke-decode"
POLICY = "NetworkPolicy/workers"
KEDA = "ScaledObject/twostroke-router"
HPA = "HorizontalPodAutoscaler/twostroke-router"
WITH_HPA = "dev-cpu+hpa"


def _policy(component: str, spec: Object) -> Object:
    """A further one."""
    labels = {"app.kubernetes.io/component": component}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "further", "namespace": "twostroke"},
        "spec": {"podSelector": {"matchLabels": labels}, **spec},
    }


SHAPES = [
    Mutant("unknown field of a Deployment", "native_schema_holds", put(ROUTER, f"{BOX}.livenesProbe", {})),
    Mutant("a count that is text", "native_schema_holds", put(ROUTER, "spec.revisionHistoryLimit", "three")),
    Mutant("no selector at all", "native_schema_holds", drop(ROUTER, "spec.selector")),
    Mutant("an API version of long ago", "native_schema_holds", put(BUDGET, "apiVersion", "policy/v1beta1")),
    Mutant("unknown field of a policy", "native_schema_holds", put(POLICY, "spec.ingres", [])),
    Mutant("unknown field of a RayCluster", "custom_schema_holds", put(RAY, "spec.workerGroups", [])),
    Mutant("unknown field deep in a group", "custom_schema_holds", put(RAY, f"{WORKER}.volumeMount", [])),
    Mutant("a start parameter that is a number", "custom_schema_holds",
           put(RAY, "spec.headGroupSpec.rayStartParams.num-cpus", 0)),
    Mutant("replicas that are text", "custom_schema_holds", put(RAY, "spec.workerGroupSpecs[prefill].replicas", "2")),
    Mutant("an unknown upscaling mode", "custom_schema_holds",
           put(RAY, "spec.autoscalerOptions.upscalingMode", "Fast")),
    Mutant("an unknown way to upgrade", "custom_schema_holds", put(RAY, "spec.upgradeStrategy.type", "RollingUpdate")),
    Mutant("a group without a name", "custom_schema_holds", drop(RAY, "spec.workerGroupSpecs[prefill].groupName")),
    Mutant("a quantity in a Ray pod that is none", "custom_schema_holds",
           put(RAY, f"{WORKER}.resources.limits.memory", "4Gig")),
    Mutant("a path match of an unknown type", "custom_schema_holds",
           put("HTTPRoute/twostroke", "spec.rules[0].matches[0].path.type", "Prefix")),
    Mutant("an interval that is a number", "custom_schema_holds",
           put("ServiceMonitor/twostroke-router", "spec.endpoints[0].interval", 15)),
    Mutant("an interval in no unit", "custom_schema_holds",
           put("PodMonitor/twostroke-workers", "spec.podMetricsEndpoints[0].interval", "15 seconds")),
    Mutant("a trigger's threshold that is a number", "custom_schema_holds",
           put(KEDA, "spec.triggers[0].metadata.threshold", 200)),
    Mutant("a fallback that is unknown", "custom_schema_holds", put(KEDA, "spec.fallback.behavior", "guess")),
    Mutant("a pool without a port", "custom_schema_holds", drop("InferencePool/twostroke", "spec.targetPorts")),
    Mutant("a pool's target port that is text", "custom_schema_holds",
           put("InferencePool/twostroke", "spec.targetPorts[0].number", "8000")),
    Mutant("two listeners of one name", "custom_schema_holds",
           both(put("Gateway/twostroke", "spec.listeners[grpc-api].name", "http-api"),
                put("GRPCRoute/twostroke", "spec.parentRefs[0].sectionName", "http-api"))),
    Mutant("a version of a CRD that is not served", "custom_schema_holds", put(RAY, "apiVersion", "ray.io/v2")),
    Mutant("a backend without a port", "custom_rules_hold",
           drop("GRPCRoute/twostroke", "spec.rules[0].backendRefs[0].port")),
    Mutant("TLS with a listener of HTTP", "custom_rules_hold",
           put("Gateway/twostroke", "spec.listeners[http-api].protocol", "HTTP")),
    Mutant("a backend's timeout above the request's", "custom_rules_hold",
           put("HTTPRoute/twostroke", "spec.rules[0].timeouts", {"request": "1h", "backendRequest": "2h"})),
    Mutant("a Ray pod whose grace is no number for a Pod", "custom_schema_holds",
           put(RAY, f"{PREFILL}.terminationGracePeriodSeconds", "90s")),
]  # fmt: skip

METADATA = [
    Mutant("a name with an underscore", "names_are_valid", put("NetworkPolicy/dns", "metadata.name", "dns_out")),
    Mutant("a label value with a space", "labels_are_valid",
           put(ROUTER, "metadata.labels.version", "v 1")),
    Mutant("a label value that YAML read as a number", "native_schema_holds",
           put(ROUTER, f"{POD}.nodeSelector", {"pool": 1})),
    Mutant("a node selector that is too long", "labels_are_valid",
           put(ROUTER, f"{POD}.nodeSelector", {"pool": "a" * 64})),
    Mutant("a label key with two slashes", "labels_are_valid", put(RAY, "metadata.labels", {"a/b/c": "x"})),
    Mutant("a label of a Ray group with a slash", "labels_are_valid",
           put(RAY, "spec.workerGroupSpecs[prefill].labels.zone", "a/b")),
    Mutant("a label that KubeRay overwrites", "ray_group_labels_match",
           put(RAY, "spec.headGroupSpec.template.metadata.labels.ray[.]io/group", "heads")),
    Mutant("an object in a namespace that is not made", "namespaces_are_named",
           insert({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "notes", "namespace": "strokes"}})),
    Mutant("a namespace in a namespace", "namespaces_are_named",
           put("Namespace/twostroke", "metadata.namespace", "default")),
    Mutant("an object twice", "objects_are_there_once", twice("NetworkPolicy/default-deny")),
    Mutant("a namespace without its level", "namespace_is_restricted",
           put("Namespace/twostroke", "metadata.labels.pod-security[.]kubernetes[.]io/enforce", "baseline")),
]  # fmt: skip

PODS = [
    Mutant("a container's name with a capital", "container_names_are_unique", put(ROUTER, f"{BOX}.name", "Router")),
    Mutant("two containers of one name in a Ray pod", "container_names_are_unique",
           put(RAY, f"{HEAD}.initContainers[launcher].name", "ray-head")),
    Mutant("a port name of sixteen characters", "container_ports_are_valid",
           add(ROUTER, f"{BOX}.ports", {"name": "a-very-long-name", "containerPort": 7000})),
    Mutant("a port number above all", "container_ports_are_valid",
           add(RAY, f"{WORKER}.ports", {"name": "more", "containerPort": 70000})),
    Mutant("two ports of one name", "container_ports_are_unique",
           add(RAY, f"{WORKER}.ports", {"name": "metrics", "containerPort": 8081})),
    Mutant("a volume with two sources", "volumes_have_one_source",
           put(ROUTER, f"{POD}.volumes[tmp].downwardAPI", {"items": []})),
    Mutant("a mount without a volume", "mounts_have_volumes",
           add(ROUTER, f"{BOX}.volumeMounts", {"name": "scratch", "mountPath": "/scratch"})),
    Mutant("a mount without a volume in a Ray pod", "mounts_have_volumes",
           add(RAY, f"{DECODE}.volumeMounts", {"name": "scratch", "mountPath": "/scratch"})),
    Mutant("a volume that nobody mounts", "volumes_are_mounted",
           add(ROUTER, f"{POD}.volumes", {"name": "spare", "emptyDir": {}})),
    Mutant("two mounts at one path", "mount_paths_are_unique", both(
        add(ROUTER, f"{POD}.volumes", {"name": "spare", "emptyDir": {}}),
        add(ROUTER, f"{BOX}.volumeMounts", {"name": "spare", "mountPath": "/tmp"}))),
    Mutant("a quantity with a space", "quantities_are_valid", put(ROUTER, f"{BOX}.resources.limits.memory", "1 Gi")),
    Mutant("a resource that there is not", "quantities_are_valid", put(ROUTER, f"{BOX}.resources.limits.gpu", "1")),
    Mutant("a volume's size that is none", "quantities_are_valid",
           put(ROUTER, f"{POD}.volumes[tmp].emptyDir.sizeLimit", "1GB!")),
    Mutant("a request above its limit", "requests_are_within_limits",
           put(ROUTER, f"{BOX}.resources.requests.memory", "900Gi")),
    Mutant("a request above its limit in a Ray pod", "requests_are_within_limits",
           put(RAY, f"{WORKER}.resources.requests.memory", "900Gi")),
    Mutant("half a device", "requests_are_within_limits",
           put(RAY, f"{WORKER}.resources.requests.nvidia[.]com/gpu", "2")),
    Mutant("a probe with two handlers", "probes_have_one_handler",
           put(ROUTER, f"{BOX}.readinessProbe.tcpSocket", {"port": 8000})),
    Mutant("a probe with two handlers in a Ray pod", "probes_have_one_handler",
           put(RAY, f"{WORKER}.readinessProbe.tcpSocket", {"port": 50052})),
    Mutant("a hook with two handlers", "probes_have_one_handler",
           put(ROUTER, f"{BOX}.lifecycle.preStop.exec", {"command": ["true"]})),
    Mutant("a liveness probe that needs two successes", "probe_numbers_are_valid",
           put(ROUTER, f"{BOX}.livenessProbe.successThreshold", 2)),
    Mutant("a probe every no seconds", "probe_numbers_are_valid",
           put(ROUTER, f"{BOX}.readinessProbe.periodSeconds", -1)),
    Mutant("a probe of a port that is not declared", "probe_ports_are_declared",
           put(ROUTER, f"{BOX}.livenessProbe.grpc.port", 50099)),
    Mutant("a probe of a named port that is not declared", "probe_ports_are_declared",
           put(RAY, f"{DECODE}.readinessProbe.httpGet.port", "worker-metric")),
    Mutant("an init container with a hook", "init_containers_end",
           both(add(ROUTER, f"{POD}.initContainers", {
               "name": "wait", "image": "registry.example.com/busybox:1", "command": ["true"],
               "lifecycle": {"preStop": {"sleep": {"seconds": 1}}},
               "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True,
                                   "capabilities": {"drop": ["ALL"]}},
               "resources": {"requests": {"cpu": "1m", "memory": "1Mi"}},
           }))),
    Mutant("a variable with a value and a source", "environment_is_well_formed",
           put(ROUTER, f"{BOX}.env[POD_IP].value", "10.0.0.1")),
    Mutant("a variable twice", "environment_is_well_formed",
           add(ROUTER, f"{BOX}.env", {"name": "HOME", "value": "/tmp"})),
    Mutant("a hook as long as the grace", "hooks_end_within_the_grace",
           put(ROUTER, f"{BOX}.lifecycle.preStop.sleep.seconds", 600)),
    Mutant("a shell's hook that sleeps too long in a Ray pod", "hooks_end_within_the_grace",
           put(RAY, f"{WORKER}.lifecycle.preStop.exec.command", ["sh", "-c", "sleep 600"])),
    Mutant("an unknown pull policy", "words_of_pods_are_known", put(ROUTER, f"{BOX}.imagePullPolicy", "Sometimes")),
    Mutant("an unknown protocol in a Ray pod", "words_of_pods_are_known",
           put(RAY, f"{WORKER}.ports[pages].protocol", "HTTP")),
    Mutant("an unknown word for what cannot be", "words_of_pods_are_known",
           put(ROUTER, f"{POD}.topologySpreadConstraints[0].whenUnsatisfiable", "ScheduleAnyways")),
    Mutant("a spread that wedges", "spread_cannot_wedge",
           put(ROUTER, f"{POD}.topologySpreadConstraints[0].whenUnsatisfiable", "DoNotSchedule")),
    Mutant("a spread that wedges Ray pods", "spread_cannot_wedge",
           put(RAY, f"{PREFILL}.topologySpreadConstraints[0].whenUnsatisfiable", "DoNotSchedule")),
    Mutant("a spread with no skew", "spread_cannot_wedge",
           put(ROUTER, f"{POD}.topologySpreadConstraints[0].maxSkew", 0)),
    Mutant("a spread over other pods", "spread_counts_its_own_pods",
           put(RAY, f"{PREFILL}.topologySpreadConstraints[0].labelSelector.matchLabels", {"app": "prefill"})),
    Mutant("a toleration without a key", "tolerations_are_well_formed",
           put(ROUTER, f"{POD}.tolerations", [{"effect": "NoSchedule"}])),
    Mutant("a container that may be root", "pods_are_restricted",
           put(ROUTER, f"{POD}.securityContext.runAsNonRoot", False)),
    Mutant("a Ray pod that keeps capabilities", "pods_are_restricted",
           put(RAY, f"{WORKER}.securityContext.capabilities", {})),
    Mutant("a Ray pod without seccomp", "pods_are_restricted", drop(RAY, f"{PREFILL}.securityContext.seccompProfile")),
    Mutant("a pod in the host's network", "pods_are_restricted", put(ROUTER, f"{POD}.hostNetwork", True)),
    Mutant("a volume of the host", "pods_are_restricted",
           put(ROUTER, f"{POD}.volumes[tmp]", {"name": "tmp", "hostPath": {"path": "/tmp"}})),
    Mutant("a root that can be written", "root_is_read_only",
           put(ROUTER, f"{BOX}.securityContext.readOnlyRootFilesystem", False)),
]  # fmt: skip

WORKLOADS = [
    Mutant("a selector that is not the template's", "selectors_match_templates",
           put(ROUTER, "spec.selector.matchLabels.app[.]kubernetes[.]io/component", "routers")),
    Mutant("an update that cannot begin", "updates_can_proceed",
           put(ROUTER, "spec.strategy.rollingUpdate", {"maxSurge": 0, "maxUnavailable": 0})),
    Mutant("an update with a share that is none", "updates_can_proceed",
           put(ROUTER, "spec.strategy.rollingUpdate.maxSurge", "25")),
    Mutant("an unknown strategy", "words_of_objects_are_known", put(ROUTER, "spec.strategy.type", "Rolling")),
    Mutant("a negative count", "counts_are_valid", put(ROUTER, "spec.revisionHistoryLimit", -1)),
    Mutant("a Deployment that does not begin again", "counts_are_valid", put(ROUTER, f"{POD}.restartPolicy", "Never")),
    Mutant("a claim of no size", "claims_are_valid",
           put("PersistentVolumeClaim/twostroke-models", "spec.resources.requests.storage", "200G i")),
    Mutant("a claim with an unknown access", "claims_are_valid",
           put("PersistentVolumeClaim/twostroke-models", "spec.accessModes", ["ReadMany"])),
    Mutant("a budget of both kinds", "budgets_are_well_formed", put(BUDGET, "spec.maxUnavailable", 1)),
    Mutant("a budget of maxUnavailable over Ray pods", "budgets_allow_evictions",
           both(drop(BUDGET, "spec.minAvailable"), put(BUDGET, "spec.maxUnavailable", 1))),
    Mutant("a budget of a share over Ray pods", "budgets_allow_evictions", put(BUDGET, "spec.minAvailable", "50%")),
    Mutant("a budget that keeps all", "budgets_allow_evictions", put(BUDGET, "spec.minAvailable", 2)),
    Mutant("a budget over nobody", "budgets_allow_evictions",
           put(BUDGET, "spec.selector.matchLabels.app[.]kubernetes[.]io/component", "decoder")),
    Mutant("two budgets over one pod", "budgets_do_not_overlap",
           put("PodDisruptionBudget/twostroke-prefill", "spec.selector.matchLabels",
               {"app.kubernetes.io/component": "decode"})),
    Mutant("an autoscaler of nothing", "autoscalers_have_a_target", both(
        put(KEDA, "spec.scaleTargetRef.name", "router"), put(ROUTER, "spec.replicas", 2))),
    Mutant("an autoscaler of a RayCluster", "autoscalers_have_a_target", both(put(KEDA, "spec.scaleTargetRef", {
        "apiVersion": "ray.io/v1", "kind": "RayCluster", "name": "twostroke"}), put(ROUTER, "spec.replicas", 2))),
    Mutant("bounds the wrong way round", "autoscalers_have_bounds", put(HPA, "spec.minReplicas", 9), WITH_HPA),
    Mutant("KEDA's bounds the wrong way round", "custom_rules_hold", put(KEDA, "spec.minReplicaCount", 9)),
    Mutant("a metric without its block", "autoscaler_metrics_are_well_formed",
           put(HPA, "spec.metrics[0].type", "Pods"), WITH_HPA),
    Mutant("a share of what nobody asks for", "measured_resources_are_requested",
           drop(ROUTER, f"{BOX}.resources.requests.cpu"), WITH_HPA),
]  # fmt: skip

NETWORK = [
    Mutant("a Service that selects nobody", "services_select_pods",
           put(SERVICE, "spec.selector.app[.]kubernetes[.]io/component", "routers")),
    Mutant("a Service over several programs", "services_select_one_kind_of_pod",
           insert({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "all", "namespace": "twostroke"},
                   "spec": {"selector": {"ray.io/cluster": "twostroke"},
                            "ports": [{"name": "metrics", "port": 80, "targetPort": "metrics"}]}})),
    Mutant("a target port that no pod has", "service_targets_exist",
           put(SERVICE, "spec.ports[http].targetPort", "htttp")),
    Mutant("a target number that no pod has", "service_targets_exist",
           put("Service/twostroke-router", "spec.ports[http].targetPort", 9099)),
    Mutant("a port twice", "service_ports_are_valid", add(SERVICE, "spec.ports", {
        "name": "again", "port": 8000, "targetPort": "http"})),
    Mutant("a port without a name", "service_ports_are_valid", drop(SERVICE, "spec.ports[grpc].name")),
    Mutant("a Service of an unknown type", "words_of_objects_are_known", put(SERVICE, "spec.type", "ClusterIp")),
    Mutant("an unknown policy type", "words_of_objects_are_known", put("NetworkPolicy/dns", "spec.policyTypes", [
        "Egress", "Out"])),
    Mutant("rules of a type that is not named", "network_policies_are_valid", insert(_policy("router", {
        "policyTypes": ["Ingress"],
        "egress": [{"to": [{"podSelector": {}}], "ports": [{"port": 50055}]}]}))),
    Mutant("a peer that is two things", "network_policies_are_valid",
           put(POLICY, "spec.ingress[0].from[0].ipBlock", {"cidr": "10.0.0.0/8"})),
    Mutant("a policy for nobody", "network_policies_name_pods",
           insert(_policy("heads", {"policyTypes": ["Ingress"]}))),
    Mutant("a policy that admits nobody", "network_policies_name_pods",
           add(POLICY, "spec.ingress[0].from", {"podSelector": {"matchLabels": {"app": "routers"}}})),
    Mutant("a policy that opens a port of nobody", "network_policy_ports_exist",
           add(POLICY, "spec.ingress[0].ports", {"protocol": "TCP", "port": 50059})),
    Mutant("no policy by default", "namespaces_are_closed_by_default", without("NetworkPolicy/default-deny")),
    Mutant("page ports open to everyone", "inside_ports_are_closed_to_strangers",
           insert(_policy("decode", {"policyTypes": ["Ingress"], "ingress": [{"ports": [{"port": 50053}]}]}))),
    Mutant("all ports of Ray pods open to other namespaces", "inside_ports_are_closed_to_strangers",
           add("NetworkPolicy/ray", "spec.ingress[0].from", {"namespaceSelector": {}})),
]  # fmt: skip

REFERENCES = [
    Mutant("a ConfigMap that is not there", "references_exist",
           put(RAY, f"{HEAD}.volumes[cluster].configMap.name", "clusters")),
    Mutant("a Secret that is not there", "references_exist",
           put(ROUTER, f"{POD}.volumes[token].secret.secretName", "twostroke-tokens")),
    Mutant("an account that is not there", "references_exist", put(ROUTER, f"{POD}.serviceAccountName", "router")),
    Mutant("a claim that is not there", "references_exist",
           put(RAY, f"{PREFILL}.volumes[models].persistentVolumeClaim.claimName", "models")),
    Mutant("a Secret without the key", "keys_exist",
           put("StatefulSet/twostroke-redis", f"{POD}.containers[redis].env[0].valueFrom.secretKeyRef.key", "pass")),
    Mutant("a RayCluster's Secret without the key", "keys_exist",
           both(insert({"apiVersion": "v1", "kind": "Secret", "data": {"token": "YQ=="},
                        "metadata": {"name": "other", "namespace": "twostroke"}}),
                put(RAY, "spec.authOptions.secretName", "other"))),
    Mutant("a token file that the Secret has not", "paths_of_the_program_are_mounted",
           put(ROUTER, f"{BOX}.env[TWOSTROKE_TOKEN_FILE].value", "/etc/twostroke/token/secret")),
    Mutant("a cluster file that the ConfigMap has not", "paths_of_the_program_are_mounted",
           swap_in_list(RAY, f"{HEAD}.initContainers[launcher].args", "cluster.yaml", "cluster.yml")),
]  # fmt: skip

VALUES = [
    Mutant("a Secret that is no base64", "data_is_well_formed",
           put("Secret/twostroke-token", "data.token", "no base64!"), "dev-cpu"),
    Mutant("a key with a slash", "data_is_well_formed", put("ConfigMap/ray-env", "data.a/b", "c")),
    Mutant("a mode in decimals", "modes_are_valid", put(ROUTER, f"{POD}.volumes[token].secret.defaultMode", 640)),
    Mutant("a negative user", "users_are_valid", put(RAY, f"{PREFILL}.securityContext.runAsUser", -1)),
    Mutant("a field that pods do not have", "fields_of_pods_exist",
           put(ROUTER, f"{BOX}.env[POD_IP].valueFrom.fieldRef.fieldPath", "status.podIp")),
    Mutant("a sleep of no time", "hooks_take_time", put(ROUTER, f"{BOX}.lifecycle.preStop.sleep.seconds", 0)),
    Mutant("a node's port of a Service inside", "service_kinds_are_consistent",
           put(SERVICE, "spec.ports[http].nodePort", 30080)),
    Mutant("an address that is none", "service_kinds_are_consistent", put(SERVICE, "spec.clusterIP", "none")),
    Mutant("a role that grants nothing", "grants_are_well_formed", insert({
        "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role",
        "rules": [{"resources": ["pods"], "verbs": ["get"]}],
        "metadata": {"name": "reader", "namespace": "twostroke"}})),
    Mutant("a block that is no address", "address_blocks_are_valid",
           add("NetworkPolicy/dns", "spec.egress[0].to", {"ipBlock": {"cidr": "10.0.0.0/33"}})),
    Mutant("workers closed to routers", "what_must_get_through_does",
           both(drop(POLICY, "spec.ingress"), put(POLICY, "spec.ingress", []))),
    Mutant("no way to DNS", "what_must_get_through_does", without("NetworkPolicy/dns")),
    Mutant("a door closed to clients", "what_must_get_through_does",
           put("NetworkPolicy/router", "spec.ingress[0].from", [{"podSelector": {}}])),
    Mutant("page ports open to routers", "what_must_not_get_through_does_not", both(
        add(POLICY, "spec.ingress[0].ports", {"protocol": "TCP", "port": 50053}),
        add("NetworkPolicy/router", "spec.egress[2].ports", {"protocol": "TCP", "port": 50053}))),
    Mutant("the admin port open to everyone", "what_must_not_get_through_does_not",
           add("NetworkPolicy/router", "spec.ingress[0].ports", {"protocol": "TCP", "port": 50055})),
]  # fmt: skip

NATIVE = [*SHAPES, *METADATA, *PODS, *WORKLOADS, *NETWORK, *REFERENCES, *VALUES]
