"""What observes a fleet and changes it, as the objects that work together on it share it."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.supervisor.backend import FleetBackend
from cluster.supervisor.fleet import Changes, SupervisedFleet
from cluster.supervisor.reconcile.desired import DesiredFleet
from cluster.supervisor.reconcile.drains import Drains
from cluster.supervisor.reconcile.reloads import Reloads
from cluster.values.spec import FleetSpec


@dataclass(frozen=True, slots=True)
class FleetParts:
    spec: FleetSpec
    fleet: SupervisedFleet
    backend: FleetBackend
    desired: DesiredFleet
    drains: Drains
    changes: Changes
    reloads: Reloads
