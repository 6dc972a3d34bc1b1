"""Runs a model on the CPU: takes a batch of host data, returns sampled tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from twostroke.config import ModelConfig
from twostroke.engine.cores.borrowing import Borrowing, StepKind
from twostroke.engine.cores.cores import Cores
from twostroke.engine.determinism import EXPANDED, NATIVE, STEADY, TORCH, Determinism, check_deterministic
from twostroke.engine.extras import NO_BRANCHES, NO_EXTRA, RunnerBranches
from twostroke.engine.sampling.prompt_scores import score_prompts
from twostroke.engine.sampling.sampler import sample
from twostroke.kernels.attention.interface import AttentionBackend, RaggedBatch, RaggedPlaces
from twostroke.kernels.choice import choose_attention
from twostroke.kernels.cpu.attention import NativeAttention
from twostroke.kernels.cpu.build import Kernels
from twostroke.kernels.cpu.choice import choose_kernels
from twostroke.kernels.cpu.team import Team
from twostroke.kernels.pools.parted_pool import AnyPool
from twostroke.kernels.products.linear import Linears, TorchLinears
from twostroke.kernels.products.steady import SteadyLinears
from twostroke.kv_cache.memory import PageMemory
from twostroke.models.catalog.places import cache_dir
from twostroke.models.decoders.choice import LoadOptions, load_model
from twostroke.models.decoders.collective import Alone, Collective
from twostroke.models.decoders.native_transformer import NativeTransformer
from twostroke.models.decoders.transformer import Model
from twostroke.models.expert_load import ExpertLoad
from twostroke.models.rope import rope_tables
from twostroke.models.spec import ModelSpec
from twostroke.observability.profiler import ENGINE, KernelRecords, Profiler
from twostroke.request import PromptLogprobs, SampledToken
from twostroke.scheduler.batch import Batch, StepResult
from twostroke.scheduler.lateness import WaitingPrompts


@dataclass(frozen=True, slots=True)
class RunnerResources:
    """What a runner computes with, besides its model and its pages."""

    cores: Cores | ModelRunner
    """The worker's cores, or another runner. That runner's threads then compute the steps of both, one step at a time,
    and it must be closed after this one."""
    profiler: Profiler = field(default_factory=Profiler)
    """Records the parts of its steps."""
    collective: Collective | None = None
    """Connects the worker's processes, each with a shard of the model and of the pages. None where there is one
    process."""
    branches: RunnerBranches = NO_BRANCHES


class ModelRunner:
    """Loads the weights when it is made. Only the engine thread calls `run`. `pool` is a view of `memory`."""

    def __init__(
        self,
        model_dir: Path,
        spec: ModelSpec,
        memory: PageMemory,
        model: ModelConfig,
        *,
        pool: AnyPool,
        resources: RunnerResources,
        with_head: bool,
    ) -> None:
        self._profiler = resources.profiler
        self._code = resources.branches.code
        self._collective = resources.collective or Alone()
        other = resources.cores if isinstance(resources.cores, ModelRunner) else None
        self._owns_threads = other is None
        cores = resources.cores if isinstance(resources.cores, Cores) else resources.cores._cores
        self._cores: Cores = cores
        self._further_groups = len(memory.layout.regions) - 1
        torch.set_num_threads(len(cores.home))
        self._borrowing = Borrowing()
        kind: torch.dtype = getattr(torch, model.dtype)
        kernels = choose_kernels(cache_dir() / "kernels") if other is None else other.kernels
        self.kernels: Kernels | None = kernels
        self._team: Team | None = _team_on(cores, kernels) if other is None else other._team
        backend = choose_attention(
            pool,
            heads=spec.heads,
            rules=spec.rules,
            kernels=kernels,
            dtype=kind,
            team=self._team,
            is_deterministic=model.deterministic,
        )
        self.has_native_pages = isinstance(backend, NativeAttention)
        self._cosines, self._sines = rope_tables(spec.ropes, model.max_model_len or spec.max_position_embeddings)
        try:
            self._model = self._loaded(model_dir, spec, backend, model, resources.collective, with_head=with_head)
            self.is_native = isinstance(self._model, NativeTransformer)
            """Whether native kernels compute the model. They pack its weights, and can use idle cores of other workers.
            """
            linears: Linears | None = SteadyLinears() if model.deterministic else TorchLinears()
            if self.is_native:
                linears = None
            make_extra = resources.branches.extra
            self.extra = NO_EXTRA if make_extra is None else make_extra(model_dir, spec, kind, linears=linears)
            if self.is_native:  # its threads are those of the team
                torch.set_num_threads(1)
            self.determinism = self._tried(memory, model, spec, pool, with_head=with_head)
        except BaseException:
            self._close_team()
            raise

    def _loaded(
        self,
        model_dir: Path,
        spec: ModelSpec,
        backend: AttentionBackend,
        model: ModelConfig,
        collective: Collective | None,
        *,
        with_head: bool,
    ) -> Model:
        options = LoadOptions(
            dtype=getattr(torch, model.dtype),
            is_int8=model.weights == "int8",
            with_head=with_head,
            is_deterministic=model.deterministic,
        )
        if self._code is not None:
            return self._code.load(model_dir, spec, backend, options)
        return load_model(model_dir, spec, backend, self.kernels, options, collective)

    def _tried(
        self, memory: PageMemory, model: ModelConfig, spec: ModelSpec, pool: AnyPool, *, with_head: bool
    ) -> Determinism:
        """Tests the loaded model, and returns how far its results are deterministic. Raises ConfigError where it
        fails."""
        if self._code is not None:
            return self._code.tried(self._model, memory, (self._cosines, self._sines), spec, model, pool)
        is_first = spec.share is None or spec.share.is_first
        if model.deterministic and is_first:  # the other processes compute what the first one tries
            check_deterministic(
                self,
                memory,
                block_size=pool.block,
                vocab=spec.vocab_size,
                longest=len(self._cosines),
                with_head=with_head,
            )
        if isinstance(self._model, NativeTransformer):
            return EXPANDED if self._model.expands_prompts else NATIVE
        return STEADY if model.deterministic else TORCH

    def run(self, batch: Batch) -> StepResult:
        started_s = time.perf_counter()
        torch.get_num_threads()  # a new thread learns of the limit by asking; until then oneDNN takes every core
        with torch.inference_mode(), nullcontext() if self._team is None else self._team_step(self._team, batch):
            logits = self.logits(batch)
            with self._profiler.slice(ENGINE, "sample"):
                tokens, scores = _outputs(logits, batch)
        return StepResult(tokens, time.perf_counter() - started_s, scores)

    @contextmanager
    def _team_step(self, team: Team, batch: Batch) -> Iterator[None]:
        """Runs a step on the worker's cores, and on those of idle workers of this host where that makes it shorter."""
        if self._cores.should_look:
            team.borrow_from(self._cores.neighbours())
        kind = StepKind.of(batch)
        trials = self._borrowing.trials_of(kind)
        started_s = time.perf_counter()
        with team.step(borrows=trials.wanted):
            yield
            borrowed = team.most_borrowed
        trials.observe(kind, time.perf_counter() - started_s, borrowed)

    @property
    def expert_load(self) -> ExpertLoad | None:
        """Tokens that each expert has computed so far; None for a dense model."""
        return self._model.expert_load

    def tell_prompts(self, prompts: WaitingPrompts) -> None:
        """Tells the other workers of this host which prompts wait here. It names none while borrowed cores make no step
        with prompts shorter."""
        self._cores.tell_prompts(prompts if self._borrowing.prompts.wanted else WaitingPrompts())

    def prompts_beside(self) -> WaitingPrompts:
        return self._cores.prompts_beside()

    def measuring(self) -> AbstractContextManager[None]:
        return self._cores.measuring()

    def lend(self) -> None:
        """Lets the other workers of this host borrow this one's cores at once."""
        if self._team is not None:
            self._team.lend()

    def logits(self, batch: Batch) -> torch.Tensor | None:
        """Writes the KV of all tokens. Returns the logits of `batch.logit_rows`, or None where there are none."""
        with self._profiler.slice(ENGINE, "prepare"):
            tokens, ragged, sample_rows = self._prepare(batch)
        with self._collective.step(batch), self._profiler.slice(ENGINE, "forward", kernels=ragged.kernels):
            return self._model.forward(tokens, ragged, sample_rows)

    def _prepare(self, batch: Batch) -> tuple[torch.Tensor, RaggedBatch, torch.Tensor | None]:
        assert len(batch.further) == self._further_groups, "each page group has places of its own"
        positions = torch.from_numpy(batch.positions)
        ragged = RaggedBatch(
            positions=positions,
            query_starts=tuple(batch.query_starts.tolist()),
            context_lens=tuple(batch.context_lens.tolist()),
            block_tables=torch.from_numpy(batch.block_tables).contiguous(),
            write_slots=torch.from_numpy(batch.write_slots),
            cosines=self._cosines[positions],
            sines=self._sines[positions],
            released=batch.released,
            further=tuple(
                RaggedPlaces(torch.from_numpy(own.block_tables).contiguous(), torch.from_numpy(own.write_slots))
                for own in batch.further
            ),
            added=self.extra.of_step(batch),
            kernels=KernelRecords() if self._profiler.is_on else None,
        )
        rows = batch.logit_rows
        return torch.from_numpy(batch.tokens), ragged, torch.tensor(rows) if rows else None

    def close(self) -> None:
        """Drops the weights and the view of the pages, so that the page memory can be unmapped."""
        self._collective.close()
        del self._model
        self._close_team()
        if self._owns_threads:
            self._cores.close()

    def _close_team(self) -> None:
        if self._team is not None and self._owns_threads:
            self._team.close()


def _team_on(cores: Cores, kernels: Kernels | None) -> Team | None:
    return None if kernels is None else Team(kernels, cores.home, cores.neighbours(), cores.folder, pin=cores.pin)


def _outputs(logits: torch.Tensor | None, batch: Batch) -> tuple[tuple[SampledToken, ...], tuple[PromptLogprobs, ...]]:
    if logits is None:
        return (), ()
    count = len(batch.samples)
    tokens = sample(logits[:count], batch.samples) if count else ()
    return tokens, score_prompts(logits[count:], batch.scores) if batch.scores else ()
