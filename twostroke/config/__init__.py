"""Every setting, declared once: its name, type, default, bounds, unit and one line of help stand on one field.

`settings` has what fields are declared with, `flags` makes a command line of them, `table` the table in the docs, and
`cluster.file` the cluster file. A worker and a router are handed their settings as JSON on standard input. Nothing here
imports torch or ray: routers and launchers read it too.
"""

from twostroke.config.cache import DEVICE_SHARE, HOST_CACHE_BYTES, MIN_PAGES, CacheConfig
from twostroke.config.cluster import ClusterConfig
from twostroke.config.endpoints import EndpointsConfig, ListenConfig
from twostroke.config.model import DEFAULT_MODEL, PACED_PREFIX, ModelConfig
from twostroke.config.placement import RoleConfig, WorkerPorts
from twostroke.config.router import RouterCommand, RouterConfig
from twostroke.config.routing import PatienceConfig, RoutingConfig
from twostroke.config.scaling import Bounds, ScalingConfig
from twostroke.config.schedule import DRAFT_MODEL, DRAFTER_NAMES, SPECULATE_AUTO, SPECULATE_OFF, ScheduleConfig
from twostroke.config.security import CertificatesConfig
from twostroke.config.settings import Settings, group, port, setting
from twostroke.config.tracing import TracingConfig
from twostroke.config.worker import Role, RuntimeConfig, WorkerConfig

__all__ = [
    "DEFAULT_MODEL",
    "DEVICE_SHARE",
    "DRAFTER_NAMES",
    "DRAFT_MODEL",
    "HOST_CACHE_BYTES",
    "MIN_PAGES",
    "PACED_PREFIX",
    "SPECULATE_AUTO",
    "SPECULATE_OFF",
    "Bounds",
    "CacheConfig",
    "CertificatesConfig",
    "ClusterConfig",
    "EndpointsConfig",
    "ListenConfig",
    "ModelConfig",
    "PatienceConfig",
    "Role",
    "RoleConfig",
    "RouterCommand",
    "RouterConfig",
    "RoutingConfig",
    "RuntimeConfig",
    "ScalingConfig",
    "ScheduleConfig",
    "Settings",
    "TracingConfig",
    "WorkerConfig",
    "WorkerPorts",
    "group",
    "port",
    "setting",
]
