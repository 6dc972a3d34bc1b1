"""The backend of paced models: page memory of the real sizes, and a runner that waits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from twostroke.base.tokenizer_file import BYTES, FIELD
from twostroke.config import PACED_PREFIX, WorkerConfig
from twostroke.engine.backends.built import BuiltEngine, closed_on_error
from twostroke.engine.backends.facts import LoadedModel, facts_of
from twostroke.engine.backends.memory_plan import MemoryPlan, PlannedPool
from twostroke.engine.backends.paced.runner import PacedRunner, PacedSpec
from twostroke.engine.determinism import PACED
from twostroke.engine.extras import NoExtra, StepExtra
from twostroke.kv_cache.memory import PageMemory
from twostroke.observability.profiler import Profiler


@dataclass(frozen=True, slots=True)
class PacedPlan:
    config: WorkerConfig
    spec: PacedSpec
    memory: MemoryPlan

    def facts(self) -> LoadedModel:
        spec, sizes = self.spec, self.memory.layout.page_sizes
        window = "" if spec.window is None else f"-window-{spec.window}-page-{sizes[1]}"
        return facts_of(
            self.config,
            self.memory,
            model="paced",
            vocab_size=spec.vocab,
            eos_token_ids=spec.eos_token_ids,
            revision=f"vocab-{spec.vocab}-page-{sizes[0]}{window}-weights-{spec.weights};{FIELD}{BYTES}",
        )


class PacedBackend:
    """See `twostroke.engine.backends.interface.Backend`."""

    def __init__(self, extra: Callable[[], StepExtra] = NoExtra) -> None:
        self._extra = extra

    def plan(self, config: WorkerConfig) -> PacedPlan:
        spec = PacedSpec.parse(config.model.model.removeprefix(PACED_PREFIX))
        sizes = spec.page_sizes_for(config.cache.block_size)
        pool = PlannedPool(config=config, groups=spec.page_groups, sizes=sizes, longest_sequence=spec.max_model_len)
        return PacedPlan(config, spec, pool.plan(config.cache.host_bytes))

    def load(self, plan: PacedPlan, profiler: Profiler | None) -> BuiltEngine:
        del profiler  # nothing is computed whose parts it could show
        facts = plan.facts()
        memory = PageMemory(facts.pages, facts.page_bytes, *facts.further)
        with closed_on_error(memory):
            runner = PacedRunner(plan.spec, memory, block_size=facts.block_size, extra=(extra := self._extra()))
        return BuiltEngine(facts, memory, runner, PACED, offers=extra.offers(None))
