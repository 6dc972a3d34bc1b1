"""All checks, and how they are run: an object whose shape is wrong is not asked about its meaning."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tests.deploy.manifests import (
    cel,
    certificates,
    cluster_files,
    forms,
    gateway,
    metadata,
    monitoring,
    network,
    placement,
    pod_security,
    pods,
    process,
    program,
    ray_cluster,
    reach,
    references,
    schemas,
    staying_up,
    values,
    workloads,
)
from tests.deploy.manifests.objects import Bundle, Complaint, Finding, Object, PodTemplate, cluster_of, name_of

SHAPES: tuple[Callable[[Object], Iterator[Complaint]], ...] = (
    schemas.native_schema_holds,
    schemas.custom_schema_holds,
)
OF_OBJECTS: tuple[Callable[[Object], Iterator[Complaint]], ...] = (
    cel.custom_rules_hold,
    metadata.names_are_valid,
    metadata.labels_are_valid,
    metadata.selectors_are_well_formed,
    placement.words_of_objects_are_known,
    workloads.selectors_match_templates,
    workloads.updates_can_proceed,
    workloads.counts_are_valid,
    workloads.claims_are_valid,
    workloads.jobs_are_valid,
    workloads.budgets_are_well_formed,
    workloads.budgets_let_the_unhealthy_go,
    workloads.autoscalers_have_bounds,
    workloads.autoscaler_metrics_are_well_formed,
    workloads.scaling_behaviours_are_valid,
    network.service_ports_are_valid,
    network.network_policies_are_valid,
    reach.address_blocks_are_valid,
    forms.forms_of_objects_are_kept,
    values.data_is_well_formed,
    values.service_kinds_are_consistent,
    values.grants_are_well_formed,
    values.amounts_are_valid,
    gateway.listeners_are_complete,
    certificates.certificates_are_complete,
    monitoring.rules_have_actions,
    monitoring.triggers_are_complete,
    monitoring.scrapes_can_succeed,
    monitoring.dashboards_can_be_read,
    ray_cluster.ray_needs_no_gates,
    ray_cluster.gcs_storage_is_consistent,
    ray_cluster.group_sizes_are_ordered,
    ray_cluster.group_names_are_unique,
    ray_cluster.start_params_are_known,
    ray_cluster.start_params_fit_the_pod,
    staying_up.object_stores_fit_shared_memory,
    ray_cluster.autoscaler_is_v2,
    ray_cluster.ray_version_is_ours,
    ray_cluster.ray_demands_a_token,
)
OF_PODS: tuple[Callable[[PodTemplate], Iterator[Complaint]], ...] = (
    metadata.ray_group_labels_match,
    placement.words_of_pods_are_known,
    placement.pods_have_a_priority,
    placement.spread_cannot_wedge,
    placement.spread_counts_its_own_pods,
    placement.affinity_cannot_wedge,
    placement.names_in_dns_are_valid,
    placement.tolerations_are_well_formed,
    pod_security.pods_are_restricted,
    pod_security.root_is_read_only,
    pods.container_names_are_unique,
    pods.container_ports_are_valid,
    pods.container_ports_are_unique,
    pods.volumes_have_one_source,
    pods.mounts_have_volumes,
    pods.volumes_are_mounted,
    pods.mount_paths_are_unique,
    pods.quantities_are_valid,
    pods.requests_are_within_limits,
    pods.requests_are_made,
    pods.memory_volumes_fit,
    pods.probes_have_one_handler,
    pods.probe_numbers_are_valid,
    pods.commands_are_given,
    pods.probe_ports_are_declared,
    pods.init_containers_end,
    pods.environment_is_well_formed,
    pods.hooks_end_within_the_grace,
    values.modes_are_valid,
    forms.forms_of_pods_are_kept,
    forms.profiles_are_named,
    values.fields_of_pods_exist,
    values.hooks_take_time,
    program.commands_parse,
    program.variables_are_defined,
    program.ports_of_flags_are_declared,
    program.probes_ask_what_is_answered,
    program.graces_cover_the_drain,
    program.drains_end_within_the_grace,
    process.servers_listen_outside,
    process.launchers_are_sidecars,
    process.files_can_be_read,
    process.scratch_can_be_written,
    process.pages_of_probes_are_served,
    staying_up.routers_are_probed,
    staying_up.probes_ask_this_pod,
    staying_up.volumes_can_be_written,
    staying_up.launchers_join_their_pod,
    staying_up.secrets_are_no_text,
)
OF_BUNDLES: tuple[Callable[[Bundle], Iterator[Complaint]], ...] = (
    metadata.namespaces_are_named,
    metadata.objects_are_there_once,
    pod_security.namespace_is_restricted,
    workloads.budgets_allow_evictions,
    workloads.budgets_do_not_overlap,
    workloads.autoscalers_have_a_target,
    workloads.autoscalers_alone_say_how_many,
    workloads.routers_are_several,
    workloads.updates_leave_some,
    workloads.measured_resources_are_requested,
    workloads.claims_can_be_shared,
    workloads.sets_have_a_headless_service,
    network.services_select_pods,
    network.services_select_one_kind_of_pod,
    network.service_targets_exist,
    network.service_ports_lead_to_their_names,
    network.headless_ports_are_those_of_pods,
    network.network_policies_name_pods,
    network.network_policy_ports_exist,
    network.namespaces_are_closed_by_default,
    network.inside_ports_are_closed_to_strangers,
    reach.what_must_get_through_does,
    reach.what_is_outside_is_reached,
    reach.what_must_not_get_through_does_not,
    references.references_exist,
    references.keys_exist,
    references.ports_of_ingresses_exist,
    references.paths_of_the_program_are_mounted,
    gateway.routes_have_a_gateway,
    gateway.routes_have_a_backend,
    gateway.other_namespaces_grant_it,
    gateway.streams_are_not_cut,
    gateway.routes_lead_to_what_is_served,
    gateway.pools_name_pods,
    monitoring.monitors_find_their_targets,
    monitoring.monitored_ports_serve_metrics,
    monitoring.queries_parse,
    monitoring.rules_are_taken,
    monitoring.queries_name_metrics_that_there_are,
    monitoring.queries_match_labels_that_there_are,
    monitoring.rules_file_agrees,
    monitoring.triggers_may_authenticate,
    ray_cluster.head_ports_are_named,
    ray_cluster.redis_clean_up_is_apart,
    ray_cluster.autoscaler_may_speak_with_the_api,
    program.addresses_lead_to_services,
    program.redis_is_reached,
    cluster_files.cluster_files_load,
    cluster_files.cluster_files_fit_the_pods,
    cluster_files.files_of_cluster_files_are_mounted,
    program.routers_serve_the_fleets_model,
    program.images_are_the_same,
    process.variables_are_read,
    process.secrets_are_given,
    process.certificates_agree,
    process.probes_speak_as_their_port,
    process.gateways_speak_as_routers,
    process.models_are_mounted,
    process.memory_has_room_for_pages,
    staying_up.services_lead_to_ready_pods,
    staying_up.pods_are_let_go,
    staying_up.redis_remembers,
    staying_up.secrets_are_used,
    staying_up.settings_of_ray_agree,
    staying_up.homes_are_told,
    workloads.selectors_are_apart,
    metadata.expressions_name_pods,
    metadata.labels_are_the_recommended_ones,
    certificates.cluster_certificates_fit,
    certificates.issuers_exist,
    staying_up.routers_are_counted_once,
)
_NAMES_SOMETHING = re.compile(r"\bno (?:headless )?([A-Z]\w+) is named|\bselects no (pod|Service)")
"""How checks of references put it."""
STUMBLES = (AttributeError, KeyError, TypeError, ValueError, IndexError, StopIteration, RuntimeError)


class Checker:
    """Remembers what it found about each object and pod: of two bundles that differ in one, one is looked at."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], list[Finding]] = {}

    def findings(self, objects: list[Object]) -> list[Finding]:
        malformed = [finding for item in objects for finding in self._about(SHAPES, item, _where(item))]
        malformed += [_nameless(item) for item in objects if not _is_readable(item)]
        readable = [item for item in objects if _is_readable(item)]
        readable = [_without_nulls(item) for item in readable]
        bundle = Bundle([*readable, *(cluster_of(item) for item in readable if item.get("kind") == "RayService")])
        wrong = {finding.where for finding in malformed}
        found = list(malformed)
        for item in bundle.objects:
            if _where(item) not in wrong:
                found += self._about(OF_OBJECTS, item, _where(item))
        for pod in bundle.pods:
            if pod.where not in wrong:
                found += self._about(OF_PODS, pod, pod.where)
        for check in OF_BUNDLES:
            # What has the wrong shape was reported, and may make others stumble.
            found += [one for one in _run(check, bundle, "") if one.where not in wrong and (one.where or not wrong)]
        return [*sorted(set(malformed)), *sorted(set(found) - set(malformed))]

    def _about(self, checks: Iterable[Callable[[Any], Iterator[Complaint]]], subject: Any, thing: str) -> list[Finding]:
        text = json.dumps(subject, default=str)
        found: list[Finding] = []
        for check in checks:
            if (check.__name__, text) not in self._known:
                self._known[check.__name__, text] = _run(check, subject, thing)
            found += self._known[check.__name__, text]
        return found


def kinds_elsewhere(findings: Iterable[Finding], objects: list[Object]) -> dict[Finding, str]:
    """Returns what names, or selects, a kind of which a part of a deployment has nothing. Such a part brings no
    Namespace."""
    bundle = Bundle([item for item in objects if _is_readable(item)])
    if bundle.of("Namespace"):
        return {}
    found = {}
    for finding in findings:
        named = _NAMES_SOMETHING.search(finding.what)
        kind = (named[1] or named[2]) if named else ""
        if kind and not (bundle.pods if kind == "pod" else bundle.of(kind)):
            found[finding] = kind
    return found


def all_checks() -> list[str]:
    return [check.__name__ for group in (SHAPES, OF_OBJECTS, OF_PODS, OF_BUNDLES) for check in group]  # type: ignore[attr-defined]


def _run(check: Callable[[Any], Iterator[Complaint]], subject: Any, thing: str) -> list[Finding]:
    """A check that stumbles hides no other one's findings, and is a finding itself."""
    try:
        return [Finding(check.__name__, *complaint) for complaint in check(subject)]
    except STUMBLES as error:
        what = f"cannot be read ({type(error).__name__}: {error})"
        return [Finding(check.__name__, thing, "", what, "give it the usual shape, or mend the check")]


def _is_readable(item: Object) -> bool:
    return isinstance(item.get("metadata"), dict) and isinstance(item.get("spec", {}), dict) and bool(name_of(item))


def _without_nulls(value: Any) -> Any:
    """Returns the value as the API server reads it: what is null is not there."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _nameless(item: Object) -> Finding:
    what, todo = "no name, or metadata or spec that are not maps", "give it metadata.name"
    return Finding(metadata.names_are_valid.__name__, _where(item), "metadata.name", what, todo)


def _where(item: Object) -> str:
    return f"{item.get('kind', '?')}/{name_of(item)}"
