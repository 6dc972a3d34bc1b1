"""What is simulated: a fleet's workers, wires, delays and faults. `simulate` plays a trace against it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

from twostroke.base.errors import ConfigError
from twostroke.base.ids import WorkerId
from twostroke.config import CacheConfig, PatienceConfig, Role, ScheduleConfig
from twostroke.config.schedule import GPU_STEP_TOKENS
from twostroke.kv_cache.form import KvForm
from twostroke.kv_cache.tier import Tier
from twostroke.scheduler.cost import StepCost
from twostroke.scheduler.step_target import USUAL_S
from twostroke.speculation.speculation import MOST_DRAFTED

GPU_LIKE = StepCost(
    step_s=0.015,
    stream_s=1.5e-4,
    context_token_s=2e-8,
    prompt_token_s=1e-4,
    prompt_step_s=0.0,
    prompt_pair_s=1.9e-9,
)
"""About 10,000 prompt tokens a second and decode steps from 15 ms on: a group of large GPUs with a model of 70B. Its
attention to one token costs 1.9e-5 of all other work for a token (80 layers of 8192, 4 operations each, over 2 * 70B).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delays:
    """One way each, in seconds, by default."""

    frontend_s: float = 0.002
    """From the client to the router's decision: parsing, tokenizing, naming."""
    open_s: float = 0.001
    """Open: to the decode worker, and its answer back."""
    pull_s: float = 0.001
    """Pull: to the page source; its announcements back."""
    token_s: float = 0.001
    """From the decode worker through the router to the client."""
    event_s: float = 0.002
    """Delay of an event batch, in seconds."""
    event_jitter_s: float = 0.0
    """Added to it: uniform from 0 to this."""
    reservation_s: float = 0.002
    """Among routers."""
    detection_s: float = 0.1
    """Seconds until the peers of a dead worker know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker dies and comes back with nothing."""

    worker: WorkerId
    at_s: float
    back_at_s: float | None = None
    """None: never."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterRestart:
    router: int
    at_s: float
    """The router forgets everything; its clients ask again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Shares of all event batches, and who dies when."""

    event_drop: float = 0.0
    event_duplicate: float = 0.0
    event_reorder: float = 0.0
    deaths: tuple[Death, ...] = ()
    router_restarts: tuple[RouterRestart, ...] = ()

    def __post_init__(self) -> None:
        for name in ("event_drop", "event_duplicate", "event_reorder"):
            _share(name, getattr(self, name))


HOST_BYTES_PER_S = 25e9
"""Rate of loading pages from host memory where no seconds per page are known: that of a GPU's bus."""
DISK_BYTES_PER_S = 3e9
"""Rate of loading pages from disk where no seconds per page are known: that of one NVMe disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierShape:
    """The tiers below the pages of each worker; none without bytes."""

    host_bytes: int = 0
    disk_bytes: int = 0
    host_page_s: float | None = None
    """Seconds to load one page of a decode worker; None: its bytes at `HOST_BYTES_PER_S`."""
    disk_page_s: float | None = None
    prefill_host_page_s: float | None = None
    """Seconds to load one page of a prefill worker; None: by the bytes of its pages, as on decode workers."""
    prefill_disk_page_s: float | None = None
    disk_write_bytes_per_s: float = 1e6 * CacheConfig().disk_write_mb_s
    """Budget of written bytes, as `--disk-write-mb-s` of a worker."""

    def scaled(self, scale: float) -> TierShape:
        """Returns the same with pages of this many times the size."""
        times = ("host_page_s", "disk_page_s", "prefill_host_page_s", "prefill_disk_page_s")
        known = {name: seconds for name in times if (seconds := asdict(self)[name]) is not None}
        return replace(self, **{name: seconds * scale for name, seconds in known.items()})

    def of_prefill(self, scale: float) -> TierShape:
        """Returns those of prefill workers, whose pages have this many times the size."""
        own = self.scaled(scale)
        host_s, disk_s = self.prefill_host_page_s or own.host_page_s, self.prefill_disk_page_s or own.disk_page_s
        return replace(own, host_page_s=host_s, disk_page_s=disk_s)

    def check(self, page_bytes: int) -> None:
        """Raises ConfigError naming a field that no worker has."""
        for name, size in (("host", self.host_bytes), ("disk", self.disk_bytes)):
            _at_least(f"tiers.{name}_bytes", size, 0)
            least = (2 if name == "disk" else 1) * page_bytes
            if 0 < size < least:
                raise ConfigError(
                    f"--{name}-cache {size} is less than the {least} bytes of the pages that it must hold",
                    field=f"tiers.{name}_bytes",
                )
        _positive(self, "host_page_s", "disk_page_s", "prefill_host_page_s", "prefill_disk_page_s", where="tiers.")
        _positive(self, "disk_write_bytes_per_s", where="tiers.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSpeeds:
    """How long a step takes on cores that others use too, relative to one thread on an idle host."""

    borrowed: float = 0.6
    """Share of that time which it takes with two threads, one of them on a borrowed core."""
    beside: float = 1.1
    """Times as long while another worker of the host computes, and shares its memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCores:
    """The cores of a host, one for each worker, which workers lend each other while they idle."""

    streams: CoreSpeeds = field(default_factory=CoreSpeeds)
    """Speeds of what a step does for its streams."""
    prompts: CoreSpeeds = field(default_factory=CoreSpeeds)
    between_s: float = 0.001
    """Seconds between two steps of a worker that has more to do: tokens are sent, the next step is planned."""
    borrows: bool = True
    step_target_s: float | None = None
    """The operator's `--step-target-ms`; None: what the worker's measured costs say."""

    def check(self) -> None:
        """Raises ConfigError naming a field that no host has."""
        for name, speeds in (("streams", self.streams), ("prompts", self.prompts)):
            _positive(speeds, "borrowed", where=f"cores.{name}.")
            _at_least(f"cores.{name}.beside", speeds.beside, 1)
        _at_least("cores.between_s", self.between_s, 0)
        _positive(self, "step_target_s", where="cores.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """What decode workers draft, in shares of all steps of a stream. Drafting itself takes no time."""

    proposed: tuple[float, ...]
    """Share of steps for which drafters propose at least one token, two, and so on; none beyond these."""
    right: tuple[float, ...]
    """Share of steps in which at least the first of them would be right, the first two, and so on."""

    @classmethod
    def of_chances(cls, acceptance: Sequence[float], share: float = 1.0) -> DraftShape:
        """Returns drafts of the greatest length, in a share of all steps. Each chance is that of one token to be right
        where those before it are. The last chance holds for all later tokens.
        """
        chances = (acceptance[min(index, len(acceptance) - 1)] for index in range(MOST_DRAFTED))
        right = tuple(itertools.accumulate(chances, lambda all_of, one: all_of * one, initial=share))
        return cls(proposed=(share,) * MOST_DRAFTED, right=right[1:])

    def check(self) -> None:
        """Raises ConfigError for what are not shares of steps."""
        for name, shares in (("drafts.proposed", self.proposed), ("drafts.right", self.right)):
            if not shares or any(not 0 <= share <= 1 for share in shares):
                raise ConfigError(f"{name} must be shares from 0 to 1, got {list(shares[:4])}", field=name)
            if any(later > earlier for earlier, later in itertools.pairwise(shares)):
                raise ConfigError(f"{name} must not rise: who drafts two tokens drafts one", field=name)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetShape:
    prefill: int = 8
    decode: int = 8
    block_size: int = 512
    """Tokens; a trace's blocks must be of this size."""
    prefill_pages: int = 6000
    """3M tokens: memory of the host, counted as one pool."""
    decode_pages: int = 1200
    tiers: TierShape = field(default_factory=TierShape)
    page_bytes: int = 512 * 312_500
    """With `link_bytes_per_s`, 40,000 tokens move in a second."""
    prefill_page_bytes: int | None = None
    """Bytes of prefill workers' pages, where these have another form than decode workers'."""
    conversion_page_s: float = 0.0
    """Seconds in which a prefill worker converts one page for decode workers, where these have another form."""
    link_bytes_per_s: float = 12.5e9
    """Rate of each worker's link, in and out."""
    cost: StepCost = GPU_LIKE
    """Cost of a step: of prompts as on prefill workers, of streams as on decode workers."""
    decode_cost: StepCost | None = None
    """Cost of a decode worker's step, where prompts cost it something else than a prefill worker."""
    step_tokens: int = GPU_STEP_TOKENS
    decode_step_tokens: int | None = None
    """Most tokens of a decode worker's step, where that is another number than a prefill worker's."""
    step_target_s: float = USUAL_S
    """Target length of a decode worker's steps in which streams run."""
    local_prefill: bool = False
    """Whether decode workers compute prompts that would wait at their page source, as real ones do by default. It is
    off here, so that a policy's choices are what is seen."""
    max_num_seqs: int = ScheduleConfig().max_num_seqs
    """Most sequences that hold pages at once on one worker, as `--max-num-seqs`."""
    drafts: DraftShape | None = None
    """What decode workers draft. None: each step makes one token of a stream known."""
    cores: SharedCores | None = None
    """All workers compute on the cores of one host. None: each has a device of its own."""
    noise: float = 0.0
    """Sigma of a step's length, log-normal."""
    heartbeat_s: float = PatienceConfig().heartbeat_s
    routers: int = 1
    routers_by_turn: bool = True
    """Whether requests go to the routers round robin. Otherwise each goes to a random one."""
    delays: Delays = field(default_factory=Delays)
    faults: Faults = field(default_factory=Faults)
    slo_ttft_s: float | None = None
    slo_itl_s: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("prefill", "noise", "conversion_page_s"):
            _at_least(name, getattr(self, name), 0)
        for name in ("decode", "routers", "block_size", "step_tokens", "prefill_pages", "decode_pages", "max_num_seqs"):
            _at_least(name, getattr(self, name), 1)
        _positive(self, "decode_step_tokens", "page_bytes", "prefill_page_bytes", "link_bytes_per_s")
        _positive(self, "step_target_s", "heartbeat_s", "slo_ttft_s", "slo_itl_s")
        costs = (self.cost,) if self.decode_cost is None else (self.cost, self.decode_cost)
        for part in (*costs, self.delays):
            for name, seconds in asdict(part).items():
                _at_least(name, seconds, 0)
        if not all(cost.of_prompt(1, 0, 1) and cost.of_streams(1, 1) for cost in costs):
            raise ConfigError("a simulated fleet's steps must take time", field="cost")
        if self.cores is not None:
            self.cores.check()
        if self.drafts is not None:
            self.drafts.check()
        self.tiers.check(self.page_bytes)
        for death in self.faults.deaths:
            _one_of("faults.deaths: worker", death.worker, self.workers)
            _at_least("faults.deaths: at_s", death.at_s, 0)
        for restart in self.faults.router_restarts:
            _one_of("faults.router_restarts: router", restart.router, range(self.routers))
            _at_least("faults.router_restarts: at_s", restart.at_s, 0)

    @property
    def decode_pool_tokens(self) -> int:
        return self.decode_pages * self.block_size

    def of_role(self, role: Role) -> FleetShape:
        """Returns the same with the costs, steps and pages of one role's workers."""
        if role is Role.DECODE:
            step_tokens = self.decode_step_tokens or self.step_tokens
            return replace(self, cost=self.decode_cost or self.cost, step_tokens=step_tokens)
        page_bytes = self.prefill_page_bytes or self.page_bytes
        return replace(self, page_bytes=page_bytes, tiers=self.tiers.of_prefill(page_bytes / self.page_bytes))

    def kv_form(self, role: Role) -> KvForm:
        """Returns the form of a role's pages; what numbers they hold is of no account here."""
        if self.prefill_page_bytes is None:
            return KvForm("one")
        return KvForm("prefill") if role is Role.PREFILL else KvForm("decode", "prefill")

    def tier_page_s(self, tier: Tier) -> float:
        """Returns seconds to load one page from a lower tier."""
        if tier is Tier.HOST:
            return self.tiers.host_page_s or self.page_bytes / HOST_BYTES_PER_S
        return self.tiers.disk_page_s or self.page_bytes / DISK_BYTES_PER_S

    @property
    def workers(self) -> tuple[WorkerId, ...]:
        return (
            *(WorkerId(f"prefill-{number}") for number in range(self.prefill)),
            *(WorkerId(f"decode-{number}") for number in range(self.decode)),
        )


def _at_least(name: str, value: float, least: float) -> None:
    if not least <= value < float("inf"):
        raise ConfigError(f"a simulated fleet needs {name} of {least} or more, got {value}", field=name)


def _positive(shape: object, *names: str, where: str = "") -> None:
    """Refuses fields that are given, and are not positive and finite."""
    for name in names:
        value = getattr(shape, name)
        if value is not None and not 0 < value < float("inf"):
            problem = f"a simulated fleet's {where}{name} must be positive and finite, got {value}"
            raise ConfigError(problem, field=where + name)


def _one_of(name: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        raise ConfigError(f"{name} {value} is not in the simulated fleet", field="faults")


def _share(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"{name} must be a share from 0 to below 1, got {value}", field=name)
