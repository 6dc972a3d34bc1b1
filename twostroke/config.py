"""What a cluster is told to be: frozen, composed, validated once. Every default lives here and nowhere else.

No torch and no ray in this module: routers and launchers read it too. A config travels between processes as JSON
(`twostroke.json_values`).
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass, field

from twostroke.doors_config import DoorsConfig
from twostroke.errors import ConfigError
from twostroke.placement_config import RoleConfig, WorkerPorts
from twostroke.scaling_config import ScalingConfig
from twostroke.tls_config import TlsConfig
from twostroke.tracing.config import TracingConfig

DEFAULT_MODEL = "smollm2-135m"
MIN_PAGES = 2
"""Of any worker: a sequence that crosses a block's end holds two."""
HOST_CACHE_BYTES = 1 << 30
"""Page memory of a worker that computes on the CPU, where --kv-cache-memory is not given."""
DEVICE_SHARE = 0.9
"""Of a CUDA device's memory, for weights, pages and working memory of all its workers, where it is not given."""

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
PACED_PREFIX = "paced:"


ORPHAN_GRACE_S = 5.0
"""A client notices that its router is gone, and is at the next one, within seconds; pages wait as long."""
MOST_HELD = 10_000
"""Requests: some ten megabytes of token ids, and hours of work for most fleets."""


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


def _positive(name: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:  # NaN is not, either
        raise ConfigError(f"{name} must be positive and finite, got {value}", field=name)


def _check_admission(slo_ttft_s: float | None, max_held: int) -> None:
    _positive("--slo-ttft", slo_ttft_s)
    _positive("--max-held", max_held)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    model: str = DEFAULT_MODEL
    """A name of the catalogue, a local directory, a hub id, or `paced:SPEC` (see engine.paced_runner)."""
    dtype: str = "bfloat16"
    """Of weights and KV: "bfloat16", "float16" or "float32"."""
    weights: str = "model"
    """"model": as they are, in `dtype`. "int8": rounded when they are loaded, for products that read half as much."""
    max_model_len: int | None = None
    """Tokens of prompt and answer together. None: what the model was made for."""
    served_model_name: str | None = None
    """What clients call the model. None: `model` itself."""
    deterministic: bool = False
    """What a row computes depends neither on the rows beside it nor on how its prompt is cut: kept, or refused at
    start. bfloat16 on a CPU with AVX-512 BF16 keeps it anyway; elsewhere it costs time, and on CUDA it is refused."""
    device: str = "auto"
    """What computes: "cpu", "cuda", "cuda:N", or "auto": CUDA where there is a device, else the CPU."""

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float16", "float32"):
            raise ConfigError(f"--dtype must be bfloat16, float16 or float32, got {self.dtype!r}", field="dtype")
        if self.weights not in ("model", "int8"):
            raise ConfigError(f"--weights must be model or int8, got {self.weights!r}", field="weights")
        if self.weights == "int8" and self.dtype != "bfloat16":
            raise ConfigError(f"--weights int8 needs --dtype bfloat16, got {self.dtype}", field="weights")
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"--device must be auto, cpu, cuda or cuda:N, got {self.device!r}", field="device")
        _positive("--max-model-len", self.max_model_len)

    @property
    def public_name(self) -> str:
        return self.served_model_name or self.model

    @property
    def is_paced(self) -> bool:
        return self.model.startswith(PACED_PREFIX)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    block_size: int = 16
    """Tokens per block. All workers of a cluster must agree on it."""
    kv_cache_memory_bytes: int | None = None
    """Bytes of page memory per worker, allocated at start. None: HOST_CACHE_BYTES on the CPU; on CUDA what
    `device_share` leaves beside the weights."""
    device_share: float = DEVICE_SHARE
    """Of a CUDA device's memory, for all that one worker keeps there. Workers of one device share it out."""

    def __post_init__(self) -> None:
        if self.block_size < 1 or self.block_size.bit_count() != 1 or self.block_size > 256:
            raise ConfigError(
                f"--block-size must be a power of two from 1 to 256, got {self.block_size}", field="block_size"
            )
        _positive("--kv-cache-memory", self.kv_cache_memory_bytes)
        if not 0 < self.device_share <= 1:
            raise ConfigError(f"cache.device_share must be in (0, 1], got {self.device_share}", field="device_share")

    @property
    def host_bytes(self) -> int:
        """Of page memory on a worker that computes on the CPU."""
        return self.kv_cache_memory_bytes or HOST_CACHE_BYTES


CPU_STEP_TOKENS = 128
"""Matrix products of a CPU are at their full rate from 32 rows on."""
GPU_STEP_TOKENS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    max_num_seqs: int = 64
    """Sequences that hold pages at once on one worker."""
    max_num_batched_tokens: int | None = None
    """Tokens in one step. None: see `step_tokens`."""
    step_target_s: float = 0.04
    """Length of a step in which streams run: as many prompt tokens as fit run beside them (and never none)."""
    max_waiting: int = 1024
    """Requests (or pulls) that may wait without pages; one more is refused as Overloaded."""
    max_passes: int = 4
    """How often shorter pulls may be started before a longer one that does not fit yet."""
    takeover: bool = True
    """A decode worker with room computes prompts itself that would wait at their page source."""

    def __post_init__(self) -> None:
        _positive("--max-num-seqs", self.max_num_seqs)
        _positive("--max-num-batched-tokens", self.max_num_batched_tokens)
        _positive("--step-target-ms", self.step_target_s)
        _positive("max_waiting", self.max_waiting)

    def step_tokens(self, *, on_gpu: bool = False) -> int:
        """Tokens in one step: few enough that short prompts are done soon, enough that weights are read seldom."""
        usual = GPU_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS
        return self.max_num_batched_tokens or max(usual, 2 * self.max_num_seqs)

    def check_budget(self) -> None:
        """Raises ConfigError where one token for each sequence would use up a step, so that no prompt ever ran."""
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens <= self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens ({self.max_num_batched_tokens}) must be more than "
                f"--max-num-seqs ({self.max_num_seqs})",
                field="max_num_batched_tokens",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PatienceConfig:
    """With processes that say nothing. Time in which whoever listens was late itself does not count as silence."""

    heartbeat_s: float = 0.5
    """Longest silence of a process that is well."""
    suspect_after_s: float = 1.0
    """A worker that is silent for so long gets no new work."""
    dead_after_s: float = 2.0
    """What a worker has that is silent for so long goes on elsewhere."""

    def __post_init__(self) -> None:
        _positive("patience.heartbeat_s", self.heartbeat_s)
        _positive("--suspect-after", self.suspect_after_s)
        _positive("--dead-after", self.dead_after_s)
        if self.suspect_after_s <= self.heartbeat_s:
            raise ConfigError(
                f"--suspect-after ({self.suspect_after_s:g}) must be more than the {self.heartbeat_s:g} s between two "
                "heartbeats",
                field="suspect_after",
            )
        if self.dead_after_s <= self.suspect_after_s:
            raise ConfigError(
                f"--dead-after ({self.dead_after_s:g}) must be more than --suspect-after ({self.suspect_after_s:g})",
                field="dead_after",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    role: Role
    worker_id: str
    flexible: bool = False
    """It may become the other role without a new process: it loads what either needs."""
    incarnation: int = 1
    """Issued by the supervisor; a higher one is a later life of the same worker."""
    host: str = "127.0.0.1"
    """Interface that rpc, page and metrics ports bind to; also the address given to peers."""
    port: int = 0
    """Of the worker's rpc server; 0 lets the kernel choose."""
    page_port: int = 0
    """Of its network page transport, likewise."""
    metrics_port: int = 0
    cluster_token: str = field(default="", repr=False)
    """Shared secret of all processes of a cluster; sent with every rpc and page connection."""
    cluster_tls: TlsConfig | None = None
    """Of all connections between processes of the cluster (rpc and pages). None: they are plain."""
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    threads: int = 1
    """Compute threads of the engine, each with a core of its own where there are enough."""
    pin: bool = False
    """Keep each thread on its core."""
    borrow: bool = True
    """Run on cores of other workers too while those are idle."""
    transports: tuple[str, ...] | None = None
    """Page transports offered, best first; the first that both ends can use is taken per pair. None: what suits the
    memory that the pages are in (transfer.registry)."""
    orphan_grace_s: float = ORPHAN_GRACE_S
    """How long answers of a broken token stream, and ended ones, wait for a router to attach."""
    pull_timeout_s: float = 300.0
    """Copying the pages that were announced together takes no longer: what is missing then is computed locally."""
    patience: PatienceConfig = field(default_factory=PatienceConfig)
    """With sources of pages; and how often this worker is heard itself."""
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def __post_init__(self) -> None:
        _positive("--threads", self.threads)
        _positive("--orphan-grace", self.orphan_grace_s)
        self.schedule.check_budget()

    @property
    def can_sample(self) -> bool:
        """In this life, or in a later one in the same process."""
        return self.flexible or self.role is Role.DECODE


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 50051
    http_fd: int | None = None
    """Descriptor of the HTTP door's listening socket, where whoever starts the router keeps it over the router's lives.
    Lives then share the gRPC port too."""
    takes_over: bool = False
    """A life before this one may still serve: open the doors only once there are workers (or after a while)."""
    fleet_address: str = ""
    """host:port of the supervisor's Fleet service."""
    peer_host: str = ""
    """At which other routers reach this one's admin port. Empty: `host`, or loopback where that is every interface."""
    peer_port: int = 0
    """For other routers, and for operators, where the cluster has certificates; 0: any free one."""
    cluster_token: str = field(default="", repr=False)
    tls: TlsConfig | None = None
    """Of both doors; its CA is for clients' certificates. None: the doors are plain."""
    cluster_tls: TlsConfig | None = None
    """As in WorkerConfig."""
    model_dir: str = ""
    """Directory with tokenizer files; empty for a paced model, whose text is bytes."""
    served_model_name: str = DEFAULT_MODEL
    public_prefixes: tuple[str, ...] = ()
    """Files with beginnings of prompts that tenants may share (router.frontend.public_prefixes)."""
    policy: str = "kv"
    seed: int | None = None
    """Of tie draws and of the seeds of requests that bring none; the same for all routers of a cluster. None: ties are
    drawn from the operating system, seeds follow from the cluster's token."""
    rank: int = 0
    """Among the routers of a cluster: those that see the same do not draw the same."""
    doors: DoorsConfig = field(default_factory=DoorsConfig)
    worker_wait_s: float = 60.0
    """How long a request waits for a decode worker to come (back) before it fails as PeerLost."""
    slo_ttft_s: float | None = None
    """Refuse requests whose first token is predicted later than this. None: nobody is refused for being late, unless
    it has a deadline of its own."""
    max_held: int = MOST_HELD
    """Requests that may wait in a router for their turn; one more is refused as Overloaded."""
    patience: PatienceConfig = field(default_factory=PatienceConfig)
    """With workers."""
    tracing: TracingConfig = field(default_factory=TracingConfig)
    drain_grace_s: float = 3.0
    """For open requests after SIGTERM. Launchers kill after five."""
    owns_log_file: bool = False
    """Standard error is a file for this router alone, which it begins anew when it is large."""
    request_log: str | None = None
    """File to which a line is appended for every answer (twostroke.request_log). None: no log."""
    event_faults: str = ""
    """For tests: "drop:0.01,duplicate:0.01,reorder:0.01,seed:1" spoils that share of the event batches that come in."""

    def __post_init__(self) -> None:
        ports = {"--http-port": self.http_port, "--grpc-port": self.grpc_port, "--peer-port": self.peer_port}
        for name, port in ports.items():
            if not 0 <= port < 65536:
                raise ConfigError(f"{name} must be from 0 to 65535, got {port}", field=name)
        if not 0 <= self.drain_grace_s < math.inf:
            raise ConfigError(f"--grace must be seconds, 0 or more, got {self.drain_grace_s}", field="grace")
        _check_admission(self.slo_ttft_s, self.max_held)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """What `twostroke serve` starts."""

    prefill: int = 1
    decode: int = 1
    routers: int = 1
    """Each on ports of its own: `http_port` and `grpc_port` are the first one's, the others count up. 0: they run
    elsewhere (`twostroke router`)."""
    address: str | None = None
    """HOST:PORT of a running Ray cluster to join, or "auto": the one that this node is in. None: a local Ray that ends
    with the launcher."""
    ray_wait_s: float = 0.0
    """How long to wait for a Ray cluster to join, and for nodes in it that the workers fit on."""
    token_file: str | None = None
    """With the shared secret of all processes of the cluster. None: the launcher draws one, and nobody else joins."""
    fleet_port: int = 0
    """Of the Fleet service, beside Ray's head. 0: any free one."""
    ports: WorkerPorts = field(default_factory=WorkerPorts)
    prefill_role: RoleConfig = field(default_factory=RoleConfig)
    decode_role: RoleConfig = field(default_factory=RoleConfig)
    host: str = "127.0.0.1"
    http_port: int = 8000
    grpc_port: int = 50051
    threads: int = 1
    pin: bool = False
    borrow: bool = True
    transports: tuple[str, ...] | None = None
    tls: TlsConfig | None = None
    """Of the routers' doors."""
    cluster_tls: TlsConfig | None = None
    """Of all connections between processes; the files are on every host."""
    unencrypted_nixl: bool = False
    """nixl is taken beside certificates, although nothing encrypts its pages."""
    policy: str = "kv"
    seed: int | None = None
    slo_ttft_s: float | None = None
    """Refuse requests whose first token is predicted later than this. None: nobody is refused for being late, unless
    it has a deadline of its own."""
    max_held: int = MOST_HELD
    """Requests that may wait in a router for their turn; one more is refused as Overloaded."""
    request_log: str | None = None
    orphan_grace_s: float = ORPHAN_GRACE_S
    """How long decode workers keep the answers of a router that is gone, for another one to go on with."""
    public_prefixes: tuple[str, ...] = ()
    """Files with beginnings of prompts that tenants may share (router.frontend.public_prefixes)."""
    doors: DoorsConfig = field(default_factory=DoorsConfig)
    """Of the first router; ports of the others count up, as those for clients do."""
    patience: PatienceConfig = field(default_factory=PatienceConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    scaling: ScalingConfig = field(default_factory=ScalingConfig)
    tracing: TracingConfig = field(default_factory=TracingConfig)

    def __post_init__(self) -> None:
        if self.prefill < 0:
            raise ConfigError(f"--prefill must be 0 (colocated) or more, got {self.prefill}", field="prefill")
        if self.decode < 1:
            raise ConfigError(f"--decode must be at least 1, got {self.decode}", field="decode")
        if self.routers < 0:
            raise ConfigError(f"--routers must be 0 (they run elsewhere) or more, got {self.routers}", field="routers")
        if not 0 <= self.ray_wait_s < math.inf:
            raise ConfigError(f"--ray-wait must be seconds, 0 or more, got {self.ray_wait_s}", field="ray_wait")
        if not 0 <= self.fleet_port < 1 << 16:
            raise ConfigError(f"--fleet-port must be from 0 to 65535, got {self.fleet_port}", field="fleet_port")
        if self.cluster_tls is not None and "nixl" in (self.transports or ()) and not self.unencrypted_nixl:
            raise ConfigError(
                "--transports nixl does not go with --cluster-tls-cert, as nothing can encrypt its pages: "
                "leave it out, or say --unencrypted-nixl where their network is trusted",
                field="transports",
            )
        _positive("--threads", self.threads)
        _positive("--orphan-grace", self.orphan_grace_s)
        _check_admission(self.slo_ttft_s, self.max_held)
        self.schedule.check_budget()
        self.scaling.scales(self.prefill, self.decode)  # raises where a count lies outside its bounds

    @property
    def counts(self) -> tuple[tuple[Role, int], ...]:
        return (Role.PREFILL, self.prefill), (Role.DECODE, self.decode)

    def role(self, role: Role) -> RoleConfig:
        return self.prefill_role if role is Role.PREFILL else self.decode_role
