"""Pod Security, level "restricted": what the namespace's label makes the API server refuse pods for."""

from __future__ import annotations

from collections.abc import Iterator

from tests.deploy.manifests.objects import Bundle, Complaint, Object, PodTemplate, where

_VOLUMES = frozenset({
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected", "secret"
})  # fmt: skip
_SECCOMP = ("RuntimeDefault", "Localhost")
_SAFE_SYSCTLS = frozenset({
    "kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_rmem", "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem", "net.ipv4.ip_local_reserved_ports",
})  # fmt: skip
_WORDS: dict[str, tuple[object, ...]] = {
    "procMount": ("Default",),
    "appArmorProfile.type": ("RuntimeDefault", "Localhost"),
    "windowsOptions.hostProcess": (False,),
    "seLinuxOptions.type": ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"),
    "seLinuxOptions.user": ("",),
    "seLinuxOptions.role": ("",),
}
_LABEL = "pod-security.kubernetes.io/enforce"
_LEVELS = ("privileged", "baseline", "restricted")


def pods_are_restricted(pod: PodTemplate) -> Iterator[Complaint]:
    spec = pod.spec
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(field):
            yield Complaint(pod.where, f"{pod.path}.spec.{field}", "is not restricted", "leave it out")
    context = spec.get("securityContext") or {}
    for setting in context.get("sysctls") or []:
        if setting.get("name") not in _SAFE_SYSCTLS:
            place = f"{pod.path}.spec.securityContext.sysctls"
            yield Complaint(pod.where, place, f"{setting.get('name')} is not restricted", "leave it out")
    for path, one in [(f"{pod.path}.spec", context), *((path, _context(box)) for path, box in pod.containers)]:
        for field, allowed in _WORDS.items():
            outer, _, inner = field.partition(".")
            told = one.get(outer) if not inner else (one.get(outer) or {}).get(inner)
            if told is not None and told not in allowed:
                place = f"{path}.securityContext.{field}"
                yield Complaint(pod.where, place, f"{told!r} is not restricted", "leave it out")
    for index, volume in enumerate(spec.get("volumes") or []):
        for source in sorted(set(volume) - _VOLUMES - {"name"}):
            place = f"{pod.path}.spec.volumes[{index}]"
            yield Complaint(pod.where, place, f"volumes of kind {source} are refused", "use emptyDir or a claim")
    for path, container in pod.containers:
        yield from _restricted(pod, path, container)


def root_is_read_only(pod: PodTemplate) -> Iterator[Complaint]:
    """Checks our own images: nothing in them may change while they run."""
    for path, container in pod.containers:
        if (container.get("securityContext") or {}).get("readOnlyRootFilesystem") is not True:
            place, what = f"{path}.securityContext.readOnlyRootFilesystem", "the root file system can be written"
            yield Complaint(pod.where, place, what, "set it true and mount an emptyDir where it writes")


def namespace_is_restricted(bundle: Bundle) -> Iterator[Complaint]:
    for item in bundle.of("Namespace"):
        labels = (item.get("metadata") or {}).get("labels") or {}
        if labels.get(_LABEL) != "restricted":
            what = f"pods are held to {labels.get(_LABEL, 'nothing')}"
            yield Complaint(where(item), f"metadata.labels.{_LABEL}", what, "label it restricted")
        for mode in ("audit", "warn"):
            level = labels.get(f"pod-security.kubernetes.io/{mode}", "restricted")
            if level not in _LEVELS:
                place = f"metadata.labels.pod-security.kubernetes.io/{mode}"
                yield Complaint(where(item), place, f"{level!r} is not a level", f"use one of {', '.join(_LEVELS)}")


def _context(container: Object) -> Object:
    return container.get("securityContext") or {}


def _restricted(pod: PodTemplate, path: str, container: Object) -> Iterator[Complaint]:
    own, shared = container.get("securityContext") or {}, pod.spec.get("securityContext") or {}
    place = f"{path}.securityContext"

    def effective(field: str) -> object:
        return own.get(field, shared.get(field))

    if effective("runAsNonRoot") is not True:
        yield Complaint(pod.where, f"{place}.runAsNonRoot", "may run as root", "set runAsNonRoot: true")
    if effective("runAsUser") == 0:
        yield Complaint(pod.where, f"{place}.runAsUser", "runs as root", "use 1000, the image's user")
    if (effective("seccompProfile") or {}).get("type") not in _SECCOMP:  # type: ignore[attr-defined]
        todo = "set seccompProfile: {type: RuntimeDefault}"
        yield Complaint(pod.where, f"{place}.seccompProfile", "no seccomp profile", todo)
    if own.get("allowPrivilegeEscalation") is not False:
        todo = "set allowPrivilegeEscalation: false"
        yield Complaint(pod.where, f"{place}.allowPrivilegeEscalation", "may gain privileges", todo)
    if own.get("privileged"):
        yield Complaint(pod.where, f"{place}.privileged", "is privileged", "leave it out")
    capabilities = own.get("capabilities") or {}
    if "ALL" not in (capabilities.get("drop") or []):
        todo = "set capabilities: {drop: [ALL]}"
        yield Complaint(pod.where, f"{place}.capabilities.drop", "keeps capabilities", todo)
    if set(capabilities.get("add") or []) - {"NET_BIND_SERVICE"}:
        yield Complaint(pod.where, f"{place}.capabilities.add", "adds capabilities", "add none")
    for index, port in enumerate(container.get("ports") or []):
        if port.get("hostPort"):
            yield Complaint(pod.where, f"{path}.ports[{index}].hostPort", "uses a port of the host", "leave it out")
