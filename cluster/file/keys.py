"""The keys of a cluster file: every setting of `ClusterConfig` is one, and what has no flag is listed here."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Mapping

from twostroke.config import ClusterConfig
from twostroke.config.leaves import Leaf, leaves_of

ROLES = ("prefill", "decode")
ROLE_KEYS = ("count", "threads", "resources", "labels", "prefer_labels")
"""The keys of each role's section; `count` is a setting of its own."""
FIXED_RESOURCES = ("num_cpus", "num_gpus", "memory")
"""What Ray has names of its own for. Any other key there is a custom resource."""


@functools.cache
def leaves() -> Mapping[str, Leaf]:
    """The settings by path of their key."""
    return {leaf.key: leaf for leaf in leaves_of(ClusterConfig)}


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
        return [path.partition(".")[2] for path in leaves() if path.partition(".")[0] == prefix]
    return sorted({path.partition(".")[0] for path in leaves()} | set(ROLES))


def in_words_of_the_file(message: str) -> str:
    """An error about a flag as one about the key."""
    by_flag = {leaf.flag: path for path, leaf in leaves().items()}
    return re.sub(r"--[a-z][a-z-]*", lambda matched: by_flag.get(matched[0], matched[0]), message)


def path_of(field: str) -> str:
    """The key that an error's field means, which may be a flag, its name or a path; else the field itself."""
    name = field.removeprefix("--").replace("-", "_")
    return next((path for path, leaf in leaves().items() if name in (path, leaf.name)), field)
