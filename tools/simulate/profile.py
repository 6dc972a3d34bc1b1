"""A fleet's shape as a file: what --fit writes and --profile reads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from tools.simulate.fleet.shape import FleetShape
from twostroke.errors import ConfigError
from twostroke.json_values import from_values


def profile_text(shape: FleetShape) -> str:
    return json.dumps(asdict(shape), indent=2) + "\n"


def read_profile(path: Path) -> FleetShape:
    try:
        return from_values(FleetShape, json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"--profile {path}: {error.strerror}", field="profile") from error
    except ValueError as error:
        raise ConfigError(f"--profile {path}: not a JSON file: {error}", field="profile") from error
    except ConfigError as error:
        raise ConfigError(f"--profile {path}: {error.message}", field=error.field) from error
