"""The keys of a cluster file: every flag of `twostroke serve` is one, and what has no flag is listed here."""

from __future__ import annotations

import argparse
import difflib
import functools
import re
from collections.abc import Mapping

from cluster.commands import serve
from cluster.flags.parser import Parser

ROLES = ("prefill", "decode")
ROLE_KEYS = ("count", "threads", "resources", "labels", "prefer_labels")
"""Of each role's section; `count` is a flag."""
FIXED_RESOURCES = ("num_cpus", "num_gpus", "memory")
"""What Ray has names of its own for. Any other key there is a custom resource."""
LISTS = ("workers.transports",)
"""Keys whose flag takes several words with commas between them; in a file they may be a list."""

_PATHS = {
    "prefill": "prefill.count",
    "decode": "decode.count",
    "routers": "routers.count",
    "fleet_port": "fleet.port",
    "ray_wait": "ray.wait",
    "worker_rpc_port": "ports.rpc",
    "worker_pages_port": "ports.pages",
    "worker_metrics_port": "ports.metrics",
    "token_file": "security.token_file",
    "admin_port": "routers.admin_port",
    "metrics_port": "routers.metrics_port",
    "metrics_host": "routers.metrics_host",
    "max_request_bytes": "routers.max_request_bytes",
    "cors_origin": "routers.cors_origin",
    "allowed_host": "routers.allowed_host",
}
"""Flags whose names say what their section says already. All others are SECTION.NAME."""


@functools.cache
def actions() -> Mapping[str, argparse.Action]:
    """By path of the key."""
    found: dict[str, argparse.Action] = {}
    for section, add in serve.SECTIONS.items():
        parser = Parser(add_help=False)
        add(parser)
        for action in parser._actions:
            found[_PATHS.get(action.dest, f"{section}.{action.dest}")] = action
    return found


def fixed_resource_meant(name: str) -> str | None:
    """`cpus`, `GPU` or `num_cpu` would be custom resources that no node has; Ray refuses some of them itself."""
    if name in FIXED_RESOURCES:
        return None
    plain = name.lower().removesuffix("s")
    named = {"cpu": "num_cpus", "gpu": "num_gpus"}
    near = difflib.get_close_matches(name.lower(), FIXED_RESOURCES, n=1, cutoff=0.85)
    return named.get(plain) or (near[0] if near else None)


def known(prefix: str = "") -> list[str]:
    """Keys directly below `prefix`; of the whole file without one."""
    if prefix in ROLES:
        return list(ROLE_KEYS)
    if prefix:
        return [path.partition(".")[2] for path in actions() if path.partition(".")[0] == prefix]
    return sorted({path.partition(".")[0] for path in actions()} | set(ROLES))


def in_words_of_the_file(message: str) -> str:
    """An error about a flag as one about the key."""
    by_flag = {flag: path for path, action in actions().items() for flag in action.option_strings}
    return re.sub(r"--[a-z][a-z-]*", lambda matched: by_flag.get(matched[0], matched[0]), message)


def path_of(field: str) -> str:
    """Of the key that an error's field means, which may be a flag, its name or a path; else the field itself."""
    name = field.removeprefix("--").replace("-", "_")
    for path, action in actions().items():
        if name in (path, action.dest):
            return path
    return field
