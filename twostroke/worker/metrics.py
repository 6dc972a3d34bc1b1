"""Metrics of a worker: one registry per process, every series with a `role` label."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from twostroke.base.errors import Overloaded, PeerLost, StaleEpoch, TransferFailed
from twostroke.config import Role
from twostroke.engine.backends.built import KernelsInUse
from twostroke.engine.backends.memory_plan import MemoryUse
from twostroke.engine.determinism import Determinism
from twostroke.kv_cache.events import EventLog
from twostroke.kv_cache.groups.group_pool import GroupPool
from twostroke.kv_cache.groups.page_state import PageState
from twostroke.kv_cache.pool import BlockPool
from twostroke.models.expert_load import ExpertLoad
from twostroke.observability.telemetry import ITL_BUCKETS_S, PULL_BUCKETS_S, family_of, introduce
from twostroke.scheduler.batching import Step
from twostroke.scheduler.scheduler import Scheduler
from twostroke.scheduler.sequence import Sequence as KnownSequence
from twostroke.transfer.base import PageTransport
from twostroke.worker.pull_ends import PageDigests

PULL_TROUBLES = (PeerLost, TransferFailed, StaleEpoch, Overloaded)
"""Error kinds that are exported from 0 on, so that their first occurrence has a rate."""

STEP_OUTCOMES = ("repeated", "request_failed", "engine_lost")
"""Outcomes of a failed step: its parts succeeded; some sequences failed by themselves; the worker's epoch ended."""


class WorkerMetrics:
    def __init__(self, role: Role, block_size: int) -> None:
        self.registry = CollectorRegistry()
        self._block_size = block_size
        self._role = role.value
        self.expiries = introduce(self.registry, role.value)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"twostroke_{name}", text, ("role", *labels), registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"twostroke_{name}", text, ("role", *labels), buckets=buckets, registry=self.registry)

        def own(name: str, text: str) -> Counter:
            return counter(name, text).labels(role.value)

        role_name = role.value
        self._steps = histogram("step_seconds", "Device time of one engine step.", ITL_BUCKETS_S, "kind")
        self._prefill_busy = own("prefill_busy_seconds_total", "Step time spent on prompt tokens.")
        self._computed = own("computed_tokens_total", "Tokens run through the model.")
        self._sampled = own("sampled_tokens_total", "Tokens drawn.")
        self._queries = own("prefix_cache_queries_total", "Tokens looked up in the prefix cache.")
        self.queried_tokens = self.hit_tokens = 0
        """Tokens that were looked up in the prefix cache, and found there, since this epoch began."""
        self._queued = 0, 0.0
        """Known tokens that are to be computed, and the predicted seconds until they are."""
        self._hits = own("prefix_cache_hits_total", "Tokens found in the prefix cache.")
        self.preemptions = own("preemptions_total", "Sequences that gave their pages back.")
        self.local_prefills = own("local_prefills_total", "Prompts computed here instead of waiting.")
        self._pull_bytes = counter("pull_bytes_total", "Page bytes received.", "transport")
        self._pull_seconds = histogram("pull_seconds", "Time on the wire of one transfer.", PULL_BUCKETS_S, "transport")
        self._pull_failures = counter("pull_failures_total", "Pulls that ended in local computation.", "reason")
        self._fallbacks = counter(
            "transport_fallbacks_total",
            "Pulls for which a faster transport of this host could not connect.",
            "transport",
        )
        self._peer_blocks = own("peer_pulled_blocks_total", "Blocks fetched from peers.")
        self._peer_bytes = own("peer_pulled_bytes_total", "Page bytes fetched from peers.")
        self._peer_failures = counter("peer_pull_failures_total", "Pulls from peers given up: computed here.", "reason")
        for reason in PULL_TROUBLES:
            self._pull_failures.labels(role_name, reason.label())
            self._peer_failures.labels(role_name, reason.label())
        self._failed_steps = counter("failed_steps_total", "Steps that raised an error, by what came of it.", "outcome")
        for outcome in STEP_OUTCOMES:
            self._failed_steps.labels(role_name, outcome)
        for kind in ("prefill", "decode"):
            self._steps.labels(role_name, kind)
        self.digest_mismatches = own("digest_mismatches_total", "Pages that arrived damaged.")
        self.stale_epochs = own("stale_epochs_total", "Calls that named another epoch.")
        self.stale_attempts = own("stale_attempts_total", "Calls about a replaced attempt.")
        self.served_pages = own("served_pages_total", "Pages announced to pulling workers.")

    def planned(self, queued_tokens: int, queued_s: float) -> None:
        """Notes what is queued as a step is planned: a scrape, on its own thread, cannot walk through the scheduler."""
        self._queued = queued_tokens, queued_s

    def watch(self, pool: BlockPool, scheduler: Scheduler, log: EventLog) -> None:
        """Reports pages by state, queue lengths and the event log's end at every scrape."""
        self.registry.register(_Gauges(self._role, pool, scheduler, log, lambda: self._queued))

    def computes(self, determinism: Determinism) -> None:
        """Reports whether a stream's bits depend on others, and why."""
        gauge = Gauge(
            "twostroke_deterministic",
            "1 where a stream's tokens and pages depend, to the bit, on no other stream, chunk or thread.",
            ("role", "why"),
            registry=self.registry,
        )
        gauge.labels(self._role, determinism.why).set(determinism.holds)

    def computes_with(self, kernels: KernelsInUse | None) -> None:
        """Reports the kernels of steps on a CPU, and why they were chosen; nothing for a device or a paced model."""
        gauge = Gauge(
            "twostroke_kernels_info",
            "Always 1.",
            ("role", "variant", "reason", "threads", "ranks"),
            registry=self.registry,
        )
        if kernels is not None:
            numbers = str(kernels.threads), str(kernels.ranks)
            gauge.labels(self._role, kernels.variant, kernels.reason, *numbers).set(1)

    def uses_memory(self, memory: Iterable[MemoryUse]) -> None:
        """Reports the bytes that each part of the memory was predicted to take, and those that the system says."""
        billed, measured = (
            Gauge(f"twostroke_memory_{name}_bytes", text, ("role", "part"), registry=self.registry)
            for name, text in (
                ("billed", "Bytes that a part of the memory was predicted to take, as `twostroke bill` counts."),
                ("measured", "Bytes that a part of the memory takes, as the system says."),
            )
        )
        for use in memory:
            billed.labels(self._role, use.part).set(use.billed_bytes)
            if use.measured_bytes is not None:
                measured.labels(self._role, use.part).set(use.measured_bytes)

    def watch_experts(self, load: ExpertLoad | None) -> None:
        """Reports at every scrape how much each expert had to do; nothing for a model without experts."""
        if load is not None:
            self.registry.register(_ExpertLoads(self._role, load))

    def watch_pages(
        self, digests: PageDigests, transports: Sequence[PageTransport], others: Sequence[PageTransport] = ()
    ) -> None:
        """Reports at every scrape the cost of digests and refused page connections, those to `others` too."""
        self.registry.register(_PageCounters(self._role, digests, transports, others))
        for transport in transports:
            self._pull_bytes.labels(self._role, transport.name)
            self._pull_seconds.labels(self._role, transport.name)
        for transport in transports[:-1]:
            self._fallbacks.labels(self._role, transport.name)

    def admitted(self, sequence: KnownSequence) -> None:
        if sequence.preemptions == 0:
            self.queried_tokens += len(sequence.known)
            self.hit_tokens += sequence.hit_blocks * self._block_size
            self._queries.inc(len(sequence.known))
            self._hits.inc(sequence.hit_blocks * self._block_size)

    def stepped(self, step: Step, seconds: float, prompt_fraction: float) -> None:
        self._prefill_busy.inc(seconds * prompt_fraction)
        kind = "prefill" if step.batch.has_prompts else "decode"
        self._steps.labels(self._role, kind).observe(seconds)
        self._computed.inc(len(step.batch.tokens))
        self._sampled.inc(len(step.batch.samples))

    def step_failed(self, outcome: str) -> None:
        """Counts a failed step. `outcome`: one of STEP_OUTCOMES."""
        self._failed_steps.labels(self._role, outcome).inc()

    def pulled(self, transport: str, copied_bytes: int, seconds: float) -> None:
        self._pull_bytes.labels(self._role, transport).inc(copied_bytes)
        self._pull_seconds.labels(self._role, transport).observe(seconds)

    def fell_back(self, transport: str) -> None:
        """Counts a pull for which this transport could not connect although both ends are on one host."""
        self._fallbacks.labels(self._role, transport).inc()

    def pulled_from_peer(self, blocks: int, copied_bytes: int) -> None:
        """Counts a pull from a peer, besides `pulled`, which counts all pulls."""
        self._peer_blocks.inc(blocks)
        self._peer_bytes.inc(copied_bytes)

    def pull_failed(self, reason: str, *, from_peer: bool) -> None:
        (self._peer_failures if from_peer else self._pull_failures).labels(self._role, reason).inc()


class _Gauges(Collector):
    def __init__(
        self,
        role: str,
        pool: BlockPool,
        scheduler: Scheduler,
        log: EventLog,
        queued: Callable[[], tuple[int, float]],
    ) -> None:
        self._role = role
        self._pool = pool
        self._values: tuple[tuple[str, str, Callable[[], float]], ...] = (
            ("requests_running", "Sequences that hold pages.", lambda: scheduler.running),
            ("requests_waiting", "Sequences that wait for pages.", lambda: scheduler.waiting),
            ("queued_tokens", "Known tokens that are to be computed here.", lambda: queued()[0]),
            ("queued_seconds", "Predicted time until queued_tokens are computed.", lambda: queued()[1]),
            (
                "event_sequence",
                "Sequence of the last batch in the event log.",
                lambda: log.sequence,
            ),
        )

    def collect(self) -> Iterable[GaugeMetricFamily]:
        further = "Pages by state of layers that keep the last blocks only, where these lie apart."
        groups: list[tuple[str, str, GroupPool]] = [("pages", "Pages of the pool by state.", self._pool)]
        groups += [("further_pages", further, group) for group in self._pool.others]
        for name, text, group in groups:
            counts = {state.value: group.count(state) for state in PageState}
            yield family_of(GaugeMetricFamily, self._role, name, text, counts)
        for name, text, value in self._values:
            yield family_of(GaugeMetricFamily, self._role, name, text, value())


class _ExpertLoads(Collector):
    def __init__(self, role: str, load: ExpertLoad) -> None:
        self._role = role
        self._load = load

    def collect(self) -> Iterable[CounterMetricFamily | GaugeMetricFamily]:
        tokens = {str(expert): count for expert, count in enumerate(self._load.by_expert())}
        text = "Tokens that an expert was chosen for, over all layers."
        yield family_of(CounterMetricFamily, self._role, "expert_tokens", text, tokens, "expert")
        text = "Tokens of a layer's busiest expert beside the mean of its experts, on average over all layers."
        yield family_of(GaugeMetricFamily, self._role, "expert_imbalance_ratio", text, self._load.imbalance())


class _PageCounters(Collector):
    def __init__(
        self, role: str, digests: PageDigests, transports: Sequence[PageTransport], others: Sequence[PageTransport]
    ) -> None:
        self._role = role
        self._digests = digests
        self._transports = transports
        self._others = others

    def collect(self) -> Iterable[CounterMetricFamily]:
        for name, text, value in (
            ("digest_seconds", "Time spent on digests of pages, served and arrived.", self._digests.seconds),
            ("digest_bytes", "Page bytes that were digested.", self._digests.bytes),
        ):
            yield family_of(CounterMetricFamily, self._role, name, text, value)
        refused = CounterMetricFamily(
            "twostroke_page_connections_refused",
            "Connections to this worker's pages that were refused.",
            labels=("role", "transport", "reason"),
        )
        counts = collections.Counter[tuple[str, str]]()
        for transport in (*self._transports, *self._others):
            counts.update({(transport.name, reason): count for reason, count in transport.refused.items()})
        for (name, reason), count in counts.items():
            refused.add_metric((self._role, name, reason), count)
        yield refused
