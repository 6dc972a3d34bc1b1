"""The backend of paced models: page memory of the real sizes, and a runner that waits."""

from __future__ import annotations

from dataclasses import dataclass

from twostroke.base.tokenizer_file import BYTES, FIELD
from twostroke.config import PACED_PREFIX, WorkerConfig
from twostroke.engine.backends.built import BuiltEngine, closed_on_error
from twostroke.engine.backends.facts import LoadedModel, facts_of, shared_pool
from twostroke.engine.backends.paced.runner import PacedRunner, PacedSpec
from twostroke.engine.determinism import PACED
from twostroke.kv_cache.memory import PageMemory
from twostroke.observability.profiler import Profiler


@dataclass(frozen=True, slots=True)
class PacedPlan:
    spec: PacedSpec
    facts: LoadedModel


class PacedBackend:
    """See `twostroke.engine.backends.interface.Backend`."""

    def plan(self, config: WorkerConfig) -> PacedPlan:
        spec = PacedSpec.parse(config.model.model.removeprefix(PACED_PREFIX))
        groups, sizes = spec.page_groups, spec.page_sizes_for(config.cache.block_size)
        window = "" if spec.window is None else f"-window-{spec.window}-page-{sizes[1]}"
        facts = facts_of(
            config,
            model="paced",
            layout=shared_pool(config, groups, sizes, spec.max_model_len).layout(config.cache.host_bytes),
            groups=groups,
            vocab_size=spec.vocab,
            eos_token_ids=spec.eos_token_ids,
            longest_sequence=spec.max_model_len,
            revision=f"vocab-{spec.vocab}-page-{sizes[0]}{window}-weights-{spec.weights};{FIELD}{BYTES}",
        )
        return PacedPlan(spec, facts)

    def load(self, plan: PacedPlan, profiler: Profiler | None) -> BuiltEngine:
        del profiler  # nothing is computed whose parts it could show
        facts = plan.facts
        memory = PageMemory(facts.pages, facts.page_bytes, *facts.windows)
        with closed_on_error(memory):
            runner = PacedRunner(plan.spec, memory, block_size=facts.block_size)
        return BuiltEngine(facts, memory, runner, PACED, adapters=runner.adapters)
