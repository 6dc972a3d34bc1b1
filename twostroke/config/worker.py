"""The settings of one worker process."""

from __future__ import annotations

import enum
from typing import Any

from pydantic import Field

from twostroke.base.credentials import TlsConfig
from twostroke.base.errors import ConfigError
from twostroke.config.adapters import AdapterConfig
from twostroke.config.cache import CacheConfig, check_exact_layers, form_name
from twostroke.config.model import ModelConfig
from twostroke.config.placement import MOST_THREADS, WorkerPorts
from twostroke.config.routing import PatienceConfig
from twostroke.config.schedule import ScheduleConfig
from twostroke.config.settings import Settings, group, setting
from twostroke.config.tracing import TracingConfig


class Role(enum.StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


class RuntimeConfig(Settings):
    """How each worker process computes, sends its pages, and treats answers of a router that is gone."""

    threads: int = setting(
        1, least=1, most=MOST_THREADS, help="compute threads of each worker, each with a core of its own if possible"
    )
    pin: bool = setting(False, help="keep each compute thread on its core")
    borrow: bool = setting(True, help="compute on cores of other workers too while those are idle")
    transports: tuple[str, ...] | None = setting(
        None,
        commas=True,
        unit="NAMES",
        help="how pages travel, best first, of cuda_ipc, shm, nixl, tcp",
        default_text="shm,tcp, or cuda_ipc,tcp on GPUs",
    )
    """The first that both ends can use is taken per pair of workers."""
    orphan_grace_s: float = setting(
        5.0, above=0, help="how long decode workers keep answers whose router is gone, and ended ones"
    )
    """A client notices that its router is gone, and is at the next one, within seconds; pages wait as long."""


class WorkerConfig(Settings):
    role: Role = Field(strict=False)
    worker_id: str
    flexible: bool = False
    """Whether it may become the other role without a new process: it loads what either needs."""
    incarnation: int = 1
    """The supervisor issues it; a higher one is a later epoch of the same worker."""
    host: str = "127.0.0.1"
    """Interface that rpc, page and metrics ports bind to; also the address given to peers."""
    ports: WorkerPorts = group(WorkerPorts, "ports")
    cluster_token: str = Field(default="", repr=False)
    """Shared secret of all processes of a cluster; sent with every rpc and page connection."""
    cluster_tls: TlsConfig | None = None
    """For all connections between processes of the cluster (rpc and pages). None: they are plain."""
    model: ModelConfig = group(ModelConfig, "model")
    cache: CacheConfig = group(CacheConfig, "cache")
    schedule: ScheduleConfig = group(ScheduleConfig, "schedule")
    adapters: AdapterConfig = group(AdapterConfig, "adapters")
    runtime: RuntimeConfig = group(RuntimeConfig, "workers")
    slo_ttft_s: float | None = None
    """Time to the first token that the cluster promises: streams are slowed down for prompts that would miss it."""
    slo_itl_s: float | None = None
    """Time between two tokens that the cluster promises: steps are not longer while prompts wait."""
    pull_timeout_s: float = setting(
        300.0,
        is_hidden=True,
        above=0,
        help="copying the pages that were announced together takes no longer; what is missing then is computed locally",
    )
    patience: PatienceConfig = group(PatienceConfig, "routing")
    """With sources of pages; and how often this worker is heard itself."""
    tracing: TracingConfig = group(TracingConfig, "tracing")

    def model_post_init(self, _context: Any) -> None:
        self.schedule.check(self.model)
        check_kv_formats(self.cache, self.model, may_switch=self.flexible)
        if self.model.names_gpu:
            check_gpu_adapters(self.model, self.adapters, self.role)

    @property
    def kv_format(self) -> str:
        """The form of its pages."""
        return kv_format_of(self.cache, self.model, self.role)

    @property
    def peer_kv_format(self) -> str:
        """The form of the other role's pages."""
        other = Role.PREFILL if self.role is Role.DECODE else Role.DECODE
        return kv_format_of(self.cache, self.model, other)

    @property
    def ranks(self) -> int:
        """Processes of this worker that compute together."""
        return ranks_of(self.model, self.role)

    @property
    def can_sample(self) -> bool:
        """Whether it decodes now, or may in a later epoch in the same process."""
        return self.flexible or self.role is Role.DECODE


def kv_format_of(cache: CacheConfig, model: ModelConfig, role: Role) -> str:
    """Returns the name of the form of the pages of a role's workers."""
    number_format = _number_format(cache, model, role)
    return form_name(number_format, cache.kv_exact_layers, model.dtype, ranks_of(model, role))


def ranks_of(model: ModelConfig, role: Role) -> int:
    """Returns the ranks of a role's workers."""
    own = model.prefill_tp if role is Role.PREFILL else model.decode_tp
    return own or model.tp


def ranks_flag(model: ModelConfig, role: Role) -> str:
    """Returns the flag that says how many ranks a role's workers have."""
    own = model.prefill_tp if role is Role.PREFILL else model.decode_tp
    return "--tp" if own is None else f"--{role.value}-tp"


def check_gpu_adapters(model: ModelConfig, adapters: AdapterConfig, role: Role) -> None:
    """Raises ConfigError where a role's ranks on GPUs would have to share out adapters."""
    flag, ranks = ranks_flag(model, role), ranks_of(model, role)
    if ranks > 1 and adapters.are_served:
        raise ConfigError(
            f"{flag} {ranks}: adapters are shared out over ranks on CPUs only: give --device cpu", field=flag
        )


def as_decode_workers(model: ModelConfig, cache: CacheConfig) -> tuple[ModelConfig, CacheConfig]:
    """Returns both with prefill workers that have the ranks and page form of decode workers."""
    own_tp, own_format = ranks_of(model, Role.DECODE), _number_format(cache, model, Role.DECODE)
    if own_tp != ranks_of(model, Role.PREFILL):
        model = model.replace(prefill_tp=own_tp)
    if own_format != _number_format(cache, model, Role.PREFILL):
        cache = cache.replace(prefill_kv_format=own_format)
    return model, cache


def _number_format(cache: CacheConfig, model: ModelConfig, role: Role) -> str:
    own = cache.prefill_kv_format if role is Role.PREFILL else cache.decode_kv_format
    return own or cache.kv_format or model.dtype


def check_kv_formats(cache: CacheConfig, model: ModelConfig, *, may_switch: bool) -> None:
    """Raises ConfigError where exact layers, or different forms of the two roles, do not go with something else.

    `may_switch`: workers may become the other role with the pages that they have.
    """
    formats = (_number_format(cache, model, role) for role in (Role.PREFILL, Role.DECODE))
    check_exact_layers(cache.kv_exact_layers, *formats)
    if kv_format_of(cache, model, Role.PREFILL) == kv_format_of(cache, model, Role.DECODE):
        return
    differ, same, field = _difference(cache, model)
    if model.is_paced:
        raise ConfigError(f"{differ}: a paced model has no numbers to convert; give both {same}", field=field)
    if model.deterministic:
        raise ConfigError(
            f"{differ}: an answer then depends on which worker computed its prompt, so --deterministic cannot be kept; "
            f"give both {same}, or leave --deterministic away",
            field=field,
        )
    if may_switch:
        raise ConfigError(
            f"{differ}: no worker can switch its role; give both {same}, or leave --flexible away and bound "
            "only one role's count",
            field=field,
        )


def _difference(cache: CacheConfig, model: ModelConfig) -> tuple[str, str, str]:
    """Returns how the forms of the roles differ, what both should have the same of, and a flag of one."""
    roles, found = (Role.PREFILL, Role.DECODE), []
    prefill, decode = (f"{ranks} rank{'s' * (ranks > 1)}" for ranks in (ranks_of(model, role) for role in roles))
    if prefill != decode:
        flag = "--decode-tp" if model.decode_tp else "--prefill-tp"
        found.append((f"prefill workers have {prefill} and decode workers {decode}", "--tp", flag))
    formats = (_number_format(cache, model, role) for role in roles)
    prefill, decode = (form_name(each, cache.kv_exact_layers, model.dtype) for each in formats)
    if prefill != decode:
        flag = "--decode-kv-format" if cache.decode_kv_format else "--prefill-kv-format"
        found.append((f"prefill workers' pages hold {prefill} and decode workers' {decode}", "format", flag))
    differ, same, flags = zip(*found, strict=True)
    return ", ".join(differ), f"the same {' and '.join(same)}", flags[0]
