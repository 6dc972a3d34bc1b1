"""The settings of one router process, and those of the command `twostroke router` gets."""

from __future__ import annotations

from pydantic import Field

from twostroke.base.credentials import TOKEN_VARIABLE, TlsConfig
from twostroke.config.adapters import AdapterConfig
from twostroke.config.endpoints import EndpointsConfig, ListenConfig
from twostroke.config.model import DEFAULT_MODEL, NOT_EMPTY
from twostroke.config.output import OutputConfig
from twostroke.config.routing import PatienceConfig, RoutingConfig
from twostroke.config.security import CertificatesConfig
from twostroke.config.settings import Settings, group, port, setting
from twostroke.config.tracing import TracingConfig


class RouterConfig(Settings):
    listen: ListenConfig = group(ListenConfig, "fleet")
    http_fd: int | None = None
    """Descriptor of the HTTP endpoint's listening socket, if the process that starts the router keeps the socket over
    its restarts, for it alone or for several routers. They then share the gRPC port too."""
    grpc_fd: int | None = None
    """The same of the gRPC endpoint, for a router that is alone. None: it listens by itself, as several do."""
    shared_fd: int | None = None
    """Descriptor of the memory that all routers of a launcher share. None: this router has no others beside it."""
    is_restart: bool = False
    """Whether a router before this one may still serve: listen only once there are workers (or after a while)."""
    fleet_address: str = ""
    """host:port of the supervisor's Fleet service."""
    peer_host: str = setting(
        "",
        section="fleet",
        unit="HOST",
        help="host where other routers reach this one",
        default_text="--host, or the address that leads to the fleet",
    )
    """The host of this one's admin port. Empty: that of `listen`, or loopback where that is every interface."""
    peer_port: int = port(
        section="fleet", help="port where other routers reach this one over TLS, with --cluster-tls-cert"
    )
    """Operators reach it there, too."""
    cluster_token: str = Field(default="", repr=False)
    tls: TlsConfig | None = None
    """For both endpoints of clients; its CA is for clients' certificates. None: they are plain."""
    cluster_tls: TlsConfig | None = None
    """Certificates for connections between processes of the cluster, as in WorkerConfig."""
    model_dir: str = ""
    """Directory with tokenizer files; empty for a paced model, where text is bytes."""
    served_model_name: str = DEFAULT_MODEL
    routing: RoutingConfig = group(RoutingConfig, "routing")
    patience: PatienceConfig = group(PatienceConfig, "routing")
    """With workers."""
    number: int = setting(
        0, flag="--router-number", section="fleet", help="number of this router among those with one --seed"
    )
    """Routers that see the same do not draw the same."""
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
        25.0, flag="--grace", section="fleet", least=0, help="time for open requests after SIGTERM"
    )
    """Kubernetes kills after thirty, unless it is told otherwise. A launcher kills sooner, and says so."""
    owns_log_file: bool = False
    """Whether standard error is a file of this router only. The router begins it anew when it is large."""


class RouterCommand(Settings):
    """What flags and environment tell `twostroke router`; from this the command makes a RouterConfig."""

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
    router: RouterConfig = group(RouterConfig, "")
    """The part of it that flags say."""
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
