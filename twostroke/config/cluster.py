"""The settings of a whole cluster: what `twostroke serve` starts."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from twostroke.base.credentials import TOKEN_VARIABLE
from twostroke.base.errors import ConfigError
from twostroke.config.adapters import AdapterConfig
from twostroke.config.cache import CacheConfig
from twostroke.config.endpoints import EndpointsConfig, ListenConfig
from twostroke.config.model import ModelConfig
from twostroke.config.output import OutputConfig
from twostroke.config.placement import RoleConfig, WorkerPorts
from twostroke.config.routing import PatienceConfig, RoutingConfig
from twostroke.config.scaling import ScalingConfig
from twostroke.config.schedule import ScheduleConfig
from twostroke.config.security import CertificatesConfig
from twostroke.config.settings import Settings, group, port, setting
from twostroke.config.tracing import TracingConfig
from twostroke.config.worker import Role, RuntimeConfig, as_decode_workers, check_gpu_adapters, check_kv_formats

DRAWN_TOKEN = f"${TOKEN_VARIABLE}, or a drawn one that only what this command starts knows"


class ClusterConfig(Settings):
    prefill: int = setting(
        1, least=0, zero="decode workers do both", section="fleet", key="prefill.count", help="prefill workers"
    )
    decode: int = setting(1, least=1, section="fleet", key="decode.count", help="decode workers")
    fleet_port: int = port(
        section="fleet",
        key="fleet.port",
        help="port of the Fleet service, on the node of Ray's head; routers elsewhere need it",
    )
    token_file: str | None = setting(
        None,
        section="fleet",
        key="security.token_file",
        is_path=True,
        unit="FILE",
        variable=TOKEN_VARIABLE,
        help="file with the secret that workers, routers and supervisor share",
        default_text=DRAWN_TOKEN,
    )
    runtime: RuntimeConfig = group(RuntimeConfig, "workers")
    ports: WorkerPorts = group(WorkerPorts, "ports", "workers' ports")
    routers: int = setting(
        1,
        least=0,
        zero="they run elsewhere",
        section="routers",
        key="routers.count",
        help="routers, which share --http-port and --grpc-port; other ports count up from the first router's",
    )
    listen: ListenConfig = group(ListenConfig, "routers")
    """Ports for clients, which all routers share."""
    address: str | None = setting(
        None,
        section="ray",
        unit="HOST:PORT",
        help="join this Ray cluster, with the token of RAY_AUTH_TOKEN; auto: the one that this node is in",
        default_text="a local Ray that ends with it",
    )
    ray_wait_s: float = setting(
        0.0,
        least=0,
        section="ray",
        key="ray.wait",
        help="how long to wait for that Ray cluster, and for nodes that workers fit on",
    )
    model: ModelConfig = group(ModelConfig, "model")
    routing: RoutingConfig = group(RoutingConfig, "routing")
    patience: PatienceConfig = group(PatienceConfig, "routing")
    cache: CacheConfig = group(CacheConfig, "cache", "memory")
    schedule: ScheduleConfig = group(ScheduleConfig, "schedule")
    adapters: AdapterConfig = group(AdapterConfig, "adapters")
    output: OutputConfig = group(OutputConfig, "output", "answers")
    scaling: ScalingConfig = group(ScalingConfig, "scaling")
    endpoints: EndpointsConfig = group(EndpointsConfig, "security", "endpoints")
    """Endpoints of the first router. The ports of the others count up."""
    certificates: CertificatesConfig = group(CertificatesConfig, "security", "certificates")
    tracing: TracingConfig = group(TracingConfig, "tracing")
    prefill_role: RoleConfig = Field(default_factory=RoleConfig, strict=False)
    decode_role: RoleConfig = Field(default_factory=RoleConfig, strict=False)

    def model_post_init(self, _context: Any) -> None:
        self.certificates.check_transports(self.runtime.transports or ())
        self.schedule.check(self.model)
        may_switch = self.scaling.may_switch(self.prefill, self.decode)  # raises where a count is out of its bounds
        model, cache = self.of_workers
        check_kv_formats(cache, model, may_switch=may_switch)
        if model.names_gpu:
            for role, _ in self.counts:
                check_gpu_adapters(model, self.adapters, role)

    @property
    def of_workers(self) -> tuple[ModelConfig, CacheConfig]:
        """Returns the settings of the model and of pages that workers get. Raises ConfigError for flags of a role
        without workers.

        If no prefill worker is planned, one that an operator adds later has the settings of decode workers.
        """
        if self.scaling.prefill_bounds(self.prefill).most:
            return self.model, self.cache
        by_flag = {"--prefill-tp": self.model.prefill_tp, "--prefill-kv-format": self.cache.prefill_kv_format}
        for flag, value in by_flag.items():
            if value is not None:
                raise ConfigError(
                    f"{flag} {value} would be ignored: --prefill 0 starts no prefill worker; leave it away, "
                    "or let some start by --max-prefill",
                    field=flag,
                )
        return as_decode_workers(self.model, self.cache)

    @property
    def counts(self) -> tuple[tuple[Role, int], ...]:
        return (Role.PREFILL, self.prefill), (Role.DECODE, self.decode)

    def role(self, role: Role) -> RoleConfig:
        return self.prefill_role if role is Role.PREFILL else self.decode_role
