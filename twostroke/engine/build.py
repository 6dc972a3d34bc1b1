"""From a worker's config to what computes its steps: page memory, runner, and the facts that the rest must know."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from twostroke.config import PACED_PREFIX, ModelConfig, Role, WorkerConfig
from twostroke.config.worker import kv_format_of
from twostroke.engine.adapter_slots import AdapterSlots, NoSlots
from twostroke.engine.determinism import DEVICE, PACED, Determinism
from twostroke.engine.memory_use import MemoryUse, pages_use
from twostroke.engine.paced_runner import PacedRunner, PacedSpec
from twostroke.errors import ConfigError, EngineLost
from twostroke.ids import PageId
from twostroke.kv_cache.block import HASH_SCHEME
from twostroke.kv_cache.form import LAYOUT_VERSION, Conversion, KvForm, PageShape, page_form
from twostroke.kv_cache.groups import PageGroup, groups_apart
from twostroke.kv_cache.layout import PageRegion, PoolLayout
from twostroke.kv_cache.memory import PageMemory, Pages
from twostroke.kv_cache.pool_share import SharedPool
from twostroke.kv_cache.pool_size import PoolSize
from twostroke.kv_cache.window_parts import WindowShape
from twostroke.models.expert_load import ExpertLoad
from twostroke.models.memory_needs import packed_weights, plain_weights, stored_weights
from twostroke.models.revision import revision_of
from twostroke.models.weights.digest import weights_digest
from twostroke.models.weights.stored.model_files import layouts_in
from twostroke.profiler import Profiler
from twostroke.scheduler.batch import Runner
from twostroke.scheduler.lateness import WaitingPrompts

if TYPE_CHECKING:  # torch, which a fleet of paced workers does without
    import torch

    from twostroke.engine.host_build import HostPlan
    from twostroke.models.spec import ModelSpec

Memory = TypeVar("Memory", bound=Pages)

PIECE_TOKENS = 16
"""Tokens of a piece of the native order: blocks of a multiple of them are cut into pieces."""
GROUPS_APART = ";groups=apart"
"""Added to the fingerprint where the layers of a block lie in a page of each page group."""
NATIVE_ORDER = ";order=pieces"
"""Added to the fingerprint where the native kernel keeps tokens in an order of its own: native/page.h."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """Facts about the loaded model and its page pool, for everybody but the engine."""

    name: str
    """The name by which clients call it."""
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    kv_form: KvForm
    """The form of its pages."""
    conversion: Conversion | None = None
    """How pages of prefill workers become those of decode workers, where these have another form."""
    block_size: int
    page_bytes: int
    """Bytes of a page of the first page group."""
    pages: int
    """Pages of the first group: one for each block that a pool holds."""
    advice: str
    """Advice to the operator about the size of the page pool, or empty."""
    fingerprint: str
    """Workers whose fingerprints differ hold different KV and never exchange pages. It says nothing of the form."""
    windows: tuple[PageRegion, ...] = ()
    """The pages of further page groups."""
    page_groups: tuple[PageGroup, ...] = ()
    """The layers of each page group."""
    model_dir: str = ""
    """The folder of the model's files; empty for a paced model."""

    @property
    def layout(self) -> PoolLayout:
        """Return how the pages of all groups lie in the pool's memory."""
        return PoolLayout.of(self.pages, self.page_bytes, *self.windows)

    @property
    def window_shape(self) -> WindowShape | None:
        """Return where window parts of blocks lie, if layers with a window keep theirs apart."""
        if not self.windows:
            return None
        window = self.page_groups[-1].window
        assert window is not None, "the last of several groups has a window"
        ends = () if self.conversion is None else (self.conversion.source, self.conversion.target)
        has_exact_blocks = any(page_form(form.format).spans_block for form in (self.kv_form, *ends))
        first, slots = PageId(self.layout.first(1)), self.windows[0].pages
        return WindowShape(first, slots, window, self.block_size, has_exact_blocks)

    @property
    def page_identity(self) -> str:
        """The fingerprint and the form: pages of the same blocks are interchangeable where both agree."""
        return self.identity_in(self.kv_form)

    def identity_in(self, form: KvForm) -> str:
        """Return the identity of pages of the same model in this form."""
        return f"{self.fingerprint};form={form}"


@dataclass(frozen=True, slots=True)
class KernelsInUse:
    """What computes the steps of a worker on a CPU."""

    variant: str
    """The build of the native kernels, or torch."""
    reason: str
    """Why this one."""
    threads: int
    """Threads of the worker's own, in all ranks."""
    ranks: int = 1
    """Processes that compute together."""


class Neighbours(Protocol):
    """The other workers of a host whose cores may be borrowed."""

    def tell_prompts(self, prompts: WaitingPrompts) -> None:
        """Tell them which prompts wait here."""

    def prompts_beside(self) -> WaitingPrompts:
        """Return the prompts that wait there and would be computed sooner with cores of this worker."""

    def measuring(self) -> AbstractContextManager[None]:
        """Wait for a turn to measure; after some seconds go on beside them."""

    def lend(self) -> None:
        """Let them borrow this worker's cores at once: it runs no step for a while."""


Loaded = tuple[Runner, Determinism, Neighbours | None]


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    model: LoadedModel
    memory: Pages
    runner: Runner
    determinism: Determinism
    neighbours: Neighbours | None = None
    """Workers that this one lends its cores to and borrows from, if it has any use for that."""
    kernels: KernelsInUse | None = None
    """None where a device computes, or nothing does."""
    adapters: AdapterSlots = NoSlots()  # noqa: RUF009  # it has no state
    weights: MemoryUse | None = None
    """None for a paced model, which has none."""
    expert_load: ExpertLoad | None = None
    """How much each expert had to do; None for a model without experts."""
    lost: Future[EngineLost] | None = None
    """Is done when a part of the engine that no step waits for is lost; None where that cannot be."""

    @property
    def memory_use(self) -> tuple[MemoryUse, ...]:
        """What was predicted beside what is measured, part by part."""
        return (pages_use(self.memory), *([] if self.weights is None else [self.weights]))

    def close(self) -> None:
        """Close both. A runner on an engine thread is closed by that thread; then only `memory` is left to close."""
        self.runner.close()
        self.memory.close()


def build_runner(config: WorkerConfig, model_dir: Path | None, profiler: Profiler | None = None) -> BuiltEngine:
    """Claim the page memory and load the model. `model_dir` is None for a paced model alone.

    The runner shows `profiler` the parts of its steps. Raises ConfigError or UnsupportedModel before anything is
    started.
    """
    if config.model.is_paced:
        return _build_paced(config)
    assert model_dir is not None, "a real model needs its directory"
    return _build_model(config, model_dir, profiler)


def _build_model(config: WorkerConfig, model_dir: Path, profiler: Profiler | None) -> BuiltEngine:
    # These load torch: hundreds of MB and seconds that a fleet of paced workers does without.
    from twostroke.engine.device_fit import resolve_device
    from twostroke.models.known_specs import known_spec

    device = resolve_device(config.model.device)
    spec = known_spec(model_dir, config.model.max_model_len, config.model.model_impl)
    build = _build_on_cpu if device.type == "cpu" else _build_on_device
    with ThreadPoolExecutor(1, thread_name_prefix="digest") as thread:
        weights = thread.submit(weights_digest, model_dir)  # while the model is loaded
        built = build(config, spec, model_dir, device, profiler)
        try:
            fingerprint = f"{built.model.fingerprint};tensors={weights.result()}"
        except BaseException:
            built.close()
            raise
    return replace(built, model=replace(built.model, fingerprint=fingerprint))


def _build_on_cpu(
    config: WorkerConfig, spec: ModelSpec, model_dir: Path, _device: torch.device, profiler: Profiler | None
) -> BuiltEngine:
    from twostroke.engine.host_build import HostPlan
    from twostroke.engine.rank_build import ranked_runner
    from twostroke.engine.runner import ModelRunner
    from twostroke.kernels.cpu.choice import variant_and_reason

    plan = HostPlan.of(config, spec, model_dir)
    groups, shapes = plan.groups, plan.shapes
    conversion = _conversion_of(config, shapes, groups, plan.centers)
    facts = _model_facts(config, spec, model_dir, _host_layout(config, spec, groups, conversion), groups)
    arithmetic = _cpu_arithmetic(config) if config.model.deterministic else ""

    lost, pids = Future[EngineLost](), [os.getpid()]

    def load(memory: PageMemory) -> Loaded:
        if config.ranks > 1:
            runner, others = ranked_runner(plan, memory, profiler, lost)
            pids.extend(others)
            return runner, runner.determinism, None
        runner = plan.runner(memory, profiler=profiler)
        return runner, runner.determinism, runner if runner.can_borrow else None

    memory = PageMemory(facts.pages, facts.page_bytes, *facts.windows, writers=config.ranks > 1)
    built = _with_memory(facts, memory, load)
    assert isinstance(built.runner, ModelRunner)
    has_pieces = built.runner.has_native_pages and shapes[0].latent_rank is None
    if conversion is not None and has_pieces and config.cache.block_size % PIECE_TOKENS == 0:
        conversion = _in_pieces(conversion)
    apart = GROUPS_APART if len(groups) > 1 else ""
    fingerprint = f"{facts.fingerprint}{apart}{NATIVE_ORDER if has_pieces else ''}{arithmetic}"
    in_use = KernelsInUse(
        *variant_and_reason(built.runner.kernels), config.runtime.threads * config.ranks, config.ranks
    )
    return replace(
        built,
        model=replace(facts, fingerprint=fingerprint, conversion=conversion),
        kernels=in_use,
        weights=_weights_use(plan, pids, is_packed=built.runner.has_packed_weights),
        expert_load=built.runner.expert_load,
        adapters=built.runner.slots,
        lost=lost,
    )


def _cpu_arithmetic(config: WorkerConfig) -> str:
    """Return what a fingerprint says of the kernels: pages that another machine computed may have other bits."""
    from twostroke.kernels.cpu.build import arithmetic_identity
    from twostroke.kernels.cpu.choice import choose_kernels
    from twostroke.models.catalog.places import cache_dir

    identity = arithmetic_identity(choose_kernels(cache_dir() / "kernels"))
    return f";arithmetic={identity}-{config.runtime.threads}"


def _in_pieces(conversion: Conversion) -> Conversion:
    """Return a conversion of pages in the native order, and of their window parts."""
    window = None if conversion.window is None else replace(conversion.window, has_pieces=True)
    return replace(conversion, has_pieces=True, window=window)


def _groups_on_device(config: WorkerConfig, spec: ModelSpec) -> tuple[PageGroup, ...]:
    """Return the page groups that the pools of workers on devices keep apart."""
    spans_block = any(page_form(each).spans_block for each in (config.kv_format, config.peer_kv_format))
    return groups_apart(spec.page_groups, by_whole_blocks=spans_block)


def _host_layout(
    config: WorkerConfig, spec: ModelSpec, groups: tuple[PageGroup, ...], conversion: Conversion | None
) -> PoolLayout:
    """Return what the page memory of a worker on a CPU holds. Raises ConfigError where that is too little."""
    form, shapes = page_form(config.kv_format), spec.page_shapes(config.cache.block_size, groups)
    sizes = tuple(map(form.page_bytes, shapes))
    taken = list(sizes)
    if conversion is not None and config.role is Role.PREFILL:  # each page that is pulled has a converted one beside it
        taken = [own + each.page_bytes for own, each in zip(sizes, conversion.groups, strict=True)]
    shared = _shared_pool(config, groups, tuple(taken), spec.max_position_embeddings)
    counts = [region.pages for region in shared.layout(config.cache.host_bytes).regions]
    first, *further = map(PageRegion, counts, sizes)
    return PoolLayout.of(first.pages, first.page_bytes, *further)


def _shared_pool(
    config: WorkerConfig,
    groups: tuple[PageGroup, ...],
    page_sizes: tuple[int, ...],
    longest: int,
    *,
    on_gpu: bool = False,
) -> SharedPool:
    return SharedPool(
        page_sizes=page_sizes,
        window=groups[-1].window,
        block_size=config.cache.block_size,
        longest=config.model.max_model_len or longest,
        step_tokens=config.schedule.step_tokens(on_gpu=on_gpu),
        window_share=config.cache.kv_window_share,
    )


def _weights_use(plan: HostPlan, pids: Sequence[int], *, is_packed: bool) -> MemoryUse:
    """Return what the weights of all ranks take, which the processes `pids` have."""
    from twostroke.models.weights.packed_file import mapped_bytes
    from twostroke.models.weights.packed_weights import packed_folder

    model, with_head = plan.config.model, plan.config.can_sample
    shares = [
        billed_weights(model, each, plan.model_dir, is_packed=is_packed, with_head=with_head) for each in plan.shares
    ]
    measured = [mapped_bytes(packed_folder(), pid) if is_packed else 0 for pid in pids]
    return MemoryUse("weights", sum(shares), sum(measured) if all(measured) else None)


def billed_weights(model: ModelConfig, spec: ModelSpec, model_dir: Path, *, is_packed: bool, with_head: bool) -> int:
    """Return the bytes of the weights of a model, or of one rank's share of it, on a CPU."""
    from twostroke.models.families.table import layouts_named

    if not is_packed:
        return plain_weights(spec, model.dtype, with_head=with_head).total
    layouts = layouts_in(model_dir)
    if layouts is not None:
        return stored_weights(spec, layouts_named(layouts, spec), with_head=with_head).total
    return packed_weights(spec, is_int8=model.weights == "int8", with_head=with_head).total


def _build_on_device(
    config: WorkerConfig, spec: ModelSpec, model_dir: Path, device: torch.device, _profiler: Profiler | None
) -> BuiltEngine:
    from torch import set_num_threads

    from twostroke.device.memory import DeviceMemory
    from twostroke.engine.accelerator import accelerator_for
    from twostroke.engine.device_build import make_device_runner
    from twostroke.engine.device_ranks import rank_plans, ranked_on_devices
    from twostroke.engine.device_runner import DeviceRunner
    from twostroke.kernels.nibble_pool import check_shape
    from twostroke.models.choice import stored_key_centers
    from twostroke.models.families.table import layouts_named
    from twostroke.models.weights.stored.formats import open_weights

    config.model.check_on_gpu()
    if page_form(config.kv_format).spans_block:
        check_shape(spec.page_shape(config.cache.block_size))
    set_num_threads(config.runtime.threads)  # of what the host computes: rows that ask for more than a token
    layouts = layouts_in(model_dir)
    plans = rank_plans(config, spec, device, None if layouts is None else layouts_named(layouts, spec))
    plan = plans[0]
    groups, form = _groups_on_device(config, spec), page_form(config.kv_format)
    sizes = tuple(map(form.page_bytes, spec.page_shapes(config.cache.block_size, groups)))
    shared = _shared_pool(config, groups, sizes, spec.max_position_embeddings, on_gpu=True)
    pages = min(each.pages(config.cache) for each in plans)
    layout = shared.layout(pages * spec.page_bytes(config.cache.block_size, config.kv_format))
    facts = _model_facts(config, spec, model_dir, layout, groups)
    centers = stored_key_centers(model_dir, spec, plan.torch_dtype)
    conversion = _conversion_of(config, spec.page_shapes(config.cache.block_size, groups), groups, centers)

    def load(memory: DeviceMemory) -> Loaded:
        with open_weights(model_dir, plan.torch_dtype, device, keeps_codes=True) as files:
            return make_device_runner(plan, files, memory.regions, accelerator_for(device)), DEVICE, None

    apart = GROUPS_APART if len(groups) > 1 else ""
    facts = replace(facts, conversion=conversion, fingerprint=f"{facts.fingerprint}{apart}")
    if config.ranks > 1:
        lost = Future[EngineLost]()
        memory, runner = ranked_on_devices(config, plans, model_dir, facts.layout, lost)
        built = BuiltEngine(facts, memory, runner, DEVICE, lost=lost)
    else:
        built = _with_memory(facts, DeviceMemory(facts.pages, facts.page_bytes, device, *facts.windows), load)
    assert isinstance(built.runner, DeviceRunner)
    needed = MemoryUse("weights", sum(each.needs().weight_bytes for each in plans), None)
    return replace(built, weights=needed, expert_load=built.runner.expert_load)


def _kv_form(config: WorkerConfig) -> KvForm:
    own, peers = config.kv_format, config.peer_kv_format
    return KvForm(own, peers if config.role is Role.DECODE and own != peers else None)


def _conversion_of(
    config: WorkerConfig,
    shapes: Sequence[PageShape],
    groups: tuple[PageGroup, ...],
    key_centers: torch.Tensor | None,
) -> Conversion | None:
    """Return how pages of prefill workers become those of decode workers, if these have another form."""
    prefill, decode = (kv_format_of(config.cache, config.model, role) for role in (Role.PREFILL, Role.DECODE))
    if prefill == decode:
        return None
    first, *further = (
        Conversion(
            KvForm(prefill),
            KvForm(decode, prefill),
            shape,
            has_pieces=False,
            key_centers=None if key_centers is None else key_centers[list(group.layers)].numpy(),
        )
        for shape, group in zip(shapes, groups, strict=True)
    )
    return replace(first, window=further[0] if further else None)


def _model_facts(
    config: WorkerConfig, spec: ModelSpec, model_dir: Path, layout: PoolLayout, groups: tuple[PageGroup, ...]
) -> LoadedModel:
    facts = _facts(
        config,
        model=Path(config.model.model).name,
        layout=layout,
        groups=groups,
        vocab_size=spec.vocab_size,
        eos_token_ids=spec.eos_token_ids,
        longest_sequence=spec.max_position_embeddings,
        revision=revision_of(model_dir, spec),
    )
    return replace(facts, model_dir=str(model_dir))


def _build_paced(config: WorkerConfig) -> BuiltEngine:
    spec = PacedSpec.parse(config.model.model.removeprefix(PACED_PREFIX))
    block_size = config.cache.block_size
    groups, sizes = spec.page_groups, spec.page_sizes_for(block_size)
    window = "" if spec.window is None else f"-window-{spec.window}-page-{sizes[1]}"
    layout = _shared_pool(config, groups, sizes, spec.max_model_len).layout(config.cache.host_bytes)
    facts = _facts(
        config,
        model="paced",
        layout=layout,
        groups=groups,
        vocab_size=spec.vocab,
        eos_token_ids=spec.eos_token_ids,
        longest_sequence=spec.max_model_len,
        revision=f"vocab-{spec.vocab}-page-{sizes[0]}{window}-weights-{spec.weights};tokenizer=bytes",
    )
    memory = PageMemory(facts.pages, facts.page_bytes, *facts.windows)
    built = _with_memory(facts, memory, lambda memory: (PacedRunner(spec, memory, block_size=block_size), PACED, None))
    assert isinstance(built.runner, PacedRunner)
    return replace(built, adapters=built.runner.adapters)


def _facts(
    config: WorkerConfig,
    *,
    model: str,
    layout: PoolLayout,
    groups: tuple[PageGroup, ...],
    vocab_size: int,
    eos_token_ids: tuple[int, ...],
    longest_sequence: int,
    revision: str,
) -> LoadedModel:
    wanted = config.model.max_model_len
    if wanted is not None and wanted > longest_sequence:
        raise ConfigError(
            f"--max-model-len {wanted} is more than the {longest_sequence} tokens that the model was made for",
            field="max_model_len",
        )
    block_size, dtype = config.cache.block_size, config.model.dtype
    first, *windows = layout.regions
    pool = PoolSize(first.pages, first.page_bytes, block_size)
    if wanted is not None:
        pool.check(wanted)
    fingerprint = (
        f"model={model};revision={revision};block_size={block_size};hash={HASH_SCHEME};"
        f"dtype={dtype};weights={config.model.weights};layout={LAYOUT_VERSION}"
    )
    return LoadedModel(
        name=config.model.public_name,
        max_model_len=wanted or longest_sequence,
        vocab_size=vocab_size,
        eos_token_ids=eos_token_ids,
        dtype=dtype,
        kv_form=_kv_form(config),
        block_size=block_size,
        page_bytes=first.page_bytes,
        pages=first.pages,
        windows=tuple(windows),
        page_groups=groups,
        advice=pool.advice(wanted or longest_sequence),
        fingerprint=fingerprint,
    )


def _with_memory(facts: LoadedModel, memory: Memory, make_runner: Callable[[Memory], Loaded]) -> BuiltEngine:
    try:
        return BuiltEngine(facts, memory, *make_runner(memory))
    except BaseException:
        memory.close()
        raise
