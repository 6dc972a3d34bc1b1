"""The environment of a router's child processes: they read clients' bytes, so they get no secrets."""

from __future__ import annotations

import os
import re

KEPT = re.compile(r"PATH|PYTHON\w*|VIRTUAL_ENV|LD_\w+|LANG|LC_\w+|TZ|HOME|TMPDIR|MALLOC_\w+")
"""Names of the variables that child processes get."""


def child_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}
