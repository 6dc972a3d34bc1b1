"""What one router process is told, and what the command `twostroke router` is told."""

from __future__ import annotations

from pydantic import Field

from twostroke.config.adapters import AdapterConfig
from twostroke.config.endpoints import EndpointsConfig, ListenConfig
from twostroke.config.model import DEFAULT_MODEL, NOT_EMPTY
from twostroke.config.output import OutputConfig
from twostroke.config.routing import PatienceConfig, RoutingConfig
from twostroke.config.security import CertificatesConfig
from twostroke.config.settings import Settings, group, port, setting
from twostroke.config.tracing import TracingConfig
from twostroke.credentials import TOKEN_VARIABLE, TlsConfig


class RouterConfig(Settings):
    listen: ListenConfig = group(ListenConfig, "fleet")
    http_fd: int | None = None
    """Descriptor of the HTTP endpoint's listening socket, where whoever starts the router keeps it over restarts of
    the router. Old and new then share the gRPC port too."""
    is_restart: bool = False
    """A router before this one may still serve: listen only once there are workers (or after a while)."""
    fleet_address: str = ""
    """host:port of the supervisor's Fleet service."""
    peer_host: str = ""
    """The host at which other routers reach this one's admin port. Empty: that of `listen`, or loopback where that is
    every interface."""
    peer_port: int = 0
    """The port for other routers, and for operators, where the cluster has certificates; 0: any free one."""
    cluster_token: str = Field(default="", repr=False)
    tls: TlsConfig | None = None
    """For both endpoints of clients; its CA is for clients' certificates. None: they are plain."""
    cluster_tls: TlsConfig | None = None
    """Certificates for connections between processes of the cluster, as in WorkerConfig."""
    model_dir: str = ""
    """Directory with tokenizer files; empty for a paced model, whose text is bytes."""
    served_model_name: str = DEFAULT_MODEL
    routing: RoutingConfig = group(RoutingConfig, "routing")
    patience: PatienceConfig = group(PatienceConfig, "routing")
    """With workers."""
    rank: int = 0
    """Place among the routers of a cluster: those that see the same do not draw the same."""
    endpoints: EndpointsConfig = group(EndpointsConfig, "security", "endpoints")
    worker_wait_s: float = setting(
        60.0,
        is_hidden=True,
        above=0,
        help="how long a request waits for a decode worker to come (back) before it fails as PeerLost",
    )
    adapters: AdapterConfig = group(AdapterConfig, "adapters")
    output: OutputConfig = group(OutputConfig, "output", "answers")
    tracing: TracingConfig = group(TracingConfig, "tracing")
    drain_grace_s: float = setting(
        3.0, is_hidden=True, least=0, help="time for open requests after SIGTERM; launchers kill after five"
    )
    owns_log_file: bool = False
    """Standard error is a file for this router alone, which it begins anew when it is large."""


class RouterCommand(Settings):
    """What `twostroke router` is told: flags and environment alone."""

    fleet: str = setting(
        ..., section="fleet", unit="HOST:PORT", help="the Fleet service: Ray's head, and `serve --fleet-port`"
    )
    token_file: str | None = setting(
        None,
        section="fleet",
        is_path=True,
        unit="FILE",
        variable=TOKEN_VARIABLE,
        help="file with the secret that workers, routers and supervisor share",
        default_text=f"${TOKEN_VARIABLE}",
    )
    listen: ListenConfig = group(ListenConfig, "fleet")
    peer_host: str = setting(
        "",
        section="fleet",
        unit="HOST",
        help="host where other routers reach this one",
        default_text="--host, or the address that leads to the fleet",
    )
    peer_port: int = port(
        section="fleet", help="port where other routers reach this one over TLS, with --cluster-tls-cert"
    )
    rank: int = setting(0, section="fleet", help="number of this router among those with one --seed")
    drain_grace_s: float = setting(
        25.0, flag="--grace", section="fleet", least=0, help="time for open requests after SIGTERM"
    )
    """Kubernetes kills after thirty, unless it is told otherwise."""
    endpoints: EndpointsConfig = group(EndpointsConfig, "security", "endpoints")
    certificates: CertificatesConfig = group(CertificatesConfig, "security", "certificates")
    model: str = setting(
        DEFAULT_MODEL,
        **NOT_EMPTY,
        section="model",
        help="model, as the fleet's: its tokenizer is needed, or a directory that has it",
    )
    dtype: str = setting("bfloat16", section="model", help="number format, as the fleet's")
    served_model_name: str | None = setting(
        None, section="model", unit="NAME", help="what clients call it", default_text="as --model"
    )
    routing: RoutingConfig = group(RoutingConfig, "routing")
    patience: PatienceConfig = group(PatienceConfig, "routing")
    adapters: AdapterConfig = group(AdapterConfig, "adapters")
    output: OutputConfig = group(OutputConfig, "output", "answers")
    tracing: TracingConfig = group(TracingConfig, "tracing")
