"""The model that is billed: its groups of layers, its weights and its working memory, only from its config."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.bill.options import BillFlags, ModelFlags
from twostroke.base.errors import ConfigError
from twostroke.config import PACED_PREFIX, Role, ScheduleConfig
from twostroke.config.worker import ranks_flag, ranks_of
from twostroke.engine.backends.cuda.graph_sizes import graph_sizes
from twostroke.engine.backends.paced.runner import PacedSpec
from twostroke.engine.ranks.cpu import SUM_BYTES
from twostroke.kv_cache.form import PageShape, check_latents, page_form
from twostroke.kv_cache.groups.page_group import groups_apart
from twostroke.models.catalog import places
from twostroke.models.known_specs import known_spec
from twostroke.models.memory_needs import (
    DRAW_BYTES,
    HOST_PROCESS_BYTES,
    WeightBytes,
    plain_weights,
    step_bytes,
    weights_on_cpu,
    working_bytes,
)
from twostroke.models.ranks.share import shares_of
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.stored.model_files import GGUF_SUFFIX, LayoutOf, layouts_in, layouts_of_gguf
from twostroke.ranks.group import slot_bytes_for

EVERY = "every worker"
LOGIT_BYTES = 4
"""Bytes of a logit that a rank sends to the first one."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers whose pages are alike."""

    kind: str
    """What their attention reads: all tokens, or those of a window."""
    layers: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    """Tokens that a token sees in layers whose pages lie apart."""
    latent_rank: int | None = None
    """Numbers of a latent, where pages hold those in place of keys and values."""

    def shape(self, block_size: int) -> PageShape:
        """Returns the dimensions of one block in all layers of the group."""
        return PageShape(self.layers, self.kv_heads, block_size, self.head_dim, self.latent_rank)

    def page_bytes(self, form: str, block_size: int) -> int:
        """Returns the bytes of one block in all layers of the group."""
        return page_form(form).page_bytes(self.shape(block_size))


@dataclass(frozen=True, slots=True)
class BilledRank:
    """What one process of a worker holds besides pages."""

    weights: WeightBytes
    working_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weights.total + self.working_bytes


@dataclass(frozen=True, slots=True)
class RankedWorker:
    """A worker of several processes, or a worker of one process where others have several."""

    role: str
    ranks: tuple[BilledRank, ...]
    sums_bytes: int
    """Memory in which ranks meet."""

    @property
    def weights(self) -> WeightBytes:
        """What all ranks hold, and what they read for one step."""
        return WeightBytes(
            sum(rank.weights.total for rank in self.ranks), sum(rank.weights.step for rank in self.ranks)
        )

    @property
    def working_bytes(self) -> int:
        return sum(rank.working_bytes for rank in self.ranks) + self.sums_bytes


@dataclass(frozen=True, slots=True)
class BilledModel:
    """A model and how one worker holds it."""

    name: str
    longest: int
    """Tokens of a request, prompt and answer together."""
    groups: tuple[LayerGroup, ...]
    """Empty for a paced model, whose pages have one size in every form."""
    paced_page_bytes: int
    has_key_centers: bool
    """Whether forms with one scale per token store keys without a center."""
    weights: WeightBytes
    weights_kind: str
    working_bytes: int
    """For the activations and logits of one step, the process and its libraries; of all ranks of a decode worker."""
    ranked: tuple[RankedWorker, ...] = ()
    """A worker of each role, or of every one, where some have several ranks."""
    one_rank_bytes: int = 0
    """What a worker of one rank would hold besides pages, where some workers have several ranks."""

    def page_bytes(self, form: str, block_size: int) -> int:
        if not self.groups:
            return self.paced_page_bytes
        return sum(group.page_bytes(form, block_size) for group in self.groups)

    def check_form(self, form: str, block_size: int) -> None:
        """Raises ConfigError for a form that the model's pages cannot have."""
        for group in self.groups:
            check_latents(group.shape(block_size), page_form(form))


def billed_model(flags: BillFlags) -> BilledModel:
    """Reads the model's config. Raises ConfigError or UnsupportedModel where it cannot be served."""
    model = flags.model
    if model.is_paced:
        return _paced(model, flags.memory.block_size)
    spec = spec_of(model.model, model.dtype, model.max_model_len)
    longest = model.max_model_len or spec.max_position_embeddings
    if longest > spec.max_position_embeddings:
        raise ConfigError(
            f"--max-model-len {longest} is more than the {spec.max_position_embeddings} tokens that the model was "
            "made for",
            field="max_model_len",
        )
    groups = _groups_of(spec, flags)
    on_gpu = flags.memory.device_memory_bytes is not None
    layouts = _layouts_of(model)
    weights, kind = weights_of(spec, model, layouts, on_gpu=on_gpu)
    working = _working_on_gpu(spec, model, has_codes=layouts is not None) if on_gpu else _working_on_cpu(spec, model)
    one = BilledModel(model.model, longest, groups, 0, spec.has_key_bias, weights, kind, working)
    return _with_ranks(one, spec, model, layouts) if model.config.ranks_by_flag else one


def _with_ranks(one: BilledModel, spec: ModelSpec, model: ModelFlags, layouts: LayoutOf | None) -> BilledModel:
    """Returns the bill of workers with the ranks that are asked for, of that of a worker with one."""
    prefill, decode = (_ranked(role, spec, model, layouts) for role in (Role.PREFILL, Role.DECODE))
    are_alike = len(prefill.ranks) == len(decode.ranks)
    return replace(
        one,
        weights=decode.weights,
        working_bytes=decode.working_bytes,
        ranked=(replace(decode, role=EVERY),) if are_alike else (prefill, decode),
        one_rank_bytes=one.weights.total + one.working_bytes,
    )


def _groups_of(spec: ModelSpec, flags: BillFlags) -> tuple[LayerGroup, ...]:
    """Returns the groups of layers whose pages are counted apart."""
    by_whole_blocks = flags.memory.device_memory_bytes is not None and page_form(flags.form).spans_block
    groups = groups_apart(spec.page_groups, by_whole_blocks=by_whole_blocks)
    if len(groups) == 1:
        rank = None if spec.latents is None else spec.latents.rank
        return (LayerGroup(_attention_of(spec), spec.layers, spec.kv_heads, spec.head_dim, latent_rank=rank),)
    return tuple(
        LayerGroup(
            "full attention" if group.window is None else f"a window of {group.window} tokens",
            len(group.layers),
            spec.kv_heads,
            spec.head_dim,
            group.window,
        )
        for group in groups
    )


def _attention_of(spec: ModelSpec) -> str:
    """Says what the layers read. Pages of window layers hold all tokens, as those of others do."""
    if spec.latents is not None:
        return f"latents of {spec.latents.rank} and a rotated key of {spec.latents.rope_dim}"
    windows = sorted({rule.window for rule in spec.rules if rule.window is not None})
    if not windows:
        return "full attention"
    count = sum(rule.window is not None for rule in spec.rules)
    return f"full attention ({count} layers: {' and '.join(map(str, windows))} tokens)"


def _paced(model: ModelFlags, block_size: int) -> BilledModel:
    spec = PacedSpec.parse(model.model.removeprefix(PACED_PREFIX))
    longest = model.max_model_len or spec.max_model_len
    if longest > spec.max_model_len:
        raise ConfigError(
            f"--max-model-len {longest} is more than the {spec.max_model_len} tokens that the model was made for",
            field="max_model_len",
        )
    page_bytes = spec.page_bytes_for(block_size)
    return BilledModel(model.model, longest, (), page_bytes, False, WeightBytes(0, 0), "none", 0)


def _layouts_of(model: ModelFlags) -> LayoutOf | None:
    """Returns the layouts of quantised files; None for plain numbers, and for a directory with only a config."""
    path = Path(model.model).expanduser()
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return layouts_of_gguf(path)
    directory = path if path.is_dir() else places.locate(model.model, model.dtype)
    return None if directory is None else layouts_in(directory)


def weights_of(
    spec: ModelSpec, model: ModelFlags, layouts: LayoutOf | None, *, on_gpu: bool
) -> tuple[WeightBytes, str]:
    """Returns the weights as the worker holds them, and how."""
    if on_gpu:
        return plain_weights(spec, model.dtype), model.dtype
    return weights_on_cpu(spec, model.dtype, layouts, is_int8=model.weights == "int8")


def _ranked(role: Role, spec: ModelSpec, model: ModelFlags, layouts: LayoutOf | None) -> RankedWorker:
    """Bills a worker rank by rank. Raises ConfigError where the model cannot be divided among the ranks."""
    ranks, named = ranks_of(model.config, role), None
    if layouts is not None and spec.generic is None:
        from twostroke.models.families.table import layouts_named  # loads torch

        named = layouts_named(layouts, spec)
    shares = shares_of(spec, ranks, named, is_int8=model.weights == "int8", flag=ranks_flag(model.config, role))
    billed = [
        BilledRank(weights_of(share, model, layouts, on_gpu=False)[0], _working_on_cpu(share, model))
        for share in shares
    ]
    most_bytes = _schedule(model).step_tokens() * spec.hidden_size * SUM_BYTES
    return RankedWorker(
        f"a {role.value} worker", tuple(billed), 2 * ranks * slot_bytes_for(most_bytes) if ranks > 1 else 0
    )


def _schedule(model: ModelFlags) -> ScheduleConfig:
    return ScheduleConfig(max_num_seqs=model.max_num_seqs)


def _working_on_cpu(spec: ModelSpec, model: ModelFlags) -> int:
    tokens = _schedule(model).step_tokens()
    is_first = spec.share is None or spec.share.rank == 0
    logits = model.max_num_seqs * (spec.vocab_size * DRAW_BYTES if is_first else len(spec.vocabulary) * LOGIT_BYTES)
    return HOST_PROCESS_BYTES + step_bytes(spec.hidden_size, spec.widest_mlp, tokens=tokens) + logits


def _working_on_gpu(spec: ModelSpec, model: ModelFlags, *, has_codes: bool) -> int:
    return working_bytes(
        spec.hidden_size,
        spec.widest_mlp,
        spec.vocab_size,
        tokens=_schedule(model).step_tokens(on_gpu=True),
        samples=model.max_num_seqs,
        recorded=sum(graph_sizes(model.max_num_seqs)),
        has_codes=has_codes,
    )


def spec_of(model: str, dtype: str, max_model_len: int | None) -> ModelSpec:
    """Returns the spec of a model by the name that --model takes. It reads only config.json or a GGUF file's header."""
    path = Path(model).expanduser()
    if path.suffix == GGUF_SUFFIX:
        return _spec_of_gguf(path, max_model_len)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"model directory {path} has no config.json", field="model")
        return _read(path, lambda: known_spec(path.resolve(), max_model_len))
    directory = places.locate(model, dtype)
    if directory is not None:
        return _read(directory, lambda: known_spec(directory, max_model_len))
    raise ConfigError(
        f"model {model!r} is not on this machine; run: twostroke model pull {model}, or name a directory with its "
        "config.json",
        field="model",
    )


def _read(path: Path, read: Callable[[], ModelSpec]) -> ModelSpec:
    """Reads the spec of a config. transformers may raise any error for a config with wrong values."""
    try:
        return read()
    except (AttributeError, TypeError, ValueError, KeyError, ZeroDivisionError, RecursionError) as error:
        raise ConfigError(f"{path}: its config cannot be read: {error!r}", field="model") from error


def _spec_of_gguf(path: Path, max_model_len: int | None) -> ModelSpec:
    if not path.is_file():
        raise ConfigError(f"--model {path}: no such file", field="model")
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds, and only GGUF files need them

    with tempfile.TemporaryDirectory() as folder:
        try:
            config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
            config.architectures = [AutoModelForCausalLM._model_mapping[type(config)].__name__]
            config.save_pretrained(folder)
        except Exception as error:  # the reader raises whatever a damaged header leads to
            raise ConfigError(f"--model {path}: not a GGUF file that can be read: {error}", field="model") from error
        return _read(path, lambda: known_spec(Path(folder), max_model_len))
