"""The model that is billed: it is known from its config alone, and its backend plans what a worker of it holds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch

from tools.bill.layer_groups import LayerGroup, groups_of
from tools.bill.options import BillFlags, ModelFlags
from twostroke.base.errors import ConfigError
from twostroke.config import CacheConfig, Role, ScheduleConfig, WorkerConfig
from twostroke.engine.backends.cpu.backend import CpuBackend
from twostroke.engine.backends.cuda.backend import CudaBackend
from twostroke.engine.backends.memory_plan import MemoryPlan
from twostroke.engine.backends.paced.backend import PacedBackend
from twostroke.engine.ranks.cpu import RankedOnCpus
from twostroke.models.catalog import places
from twostroke.models.known_specs import known_spec
from twostroke.models.memory_needs import MemoryReading
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.stored.model_files import GGUF_SUFFIX, LayoutOf, layouts_in, layouts_of_gguf

BILLED_DEVICE: Final = "with --device-memory"


@dataclass(frozen=True)  # no slots: what it plans is kept
class BilledModel:
    """A model, and what its workers hold."""

    flags: BillFlags
    spec: ModelSpec | None
    """None for a paced model."""
    layouts: LayoutOf | None
    """The layouts of quantised files; None for plain numbers, and for a directory with only a config."""

    @property
    def name(self) -> str:
        return self.flags.model.model

    def config(self, role: Role = Role.DECODE, **cache: Any) -> WorkerConfig:
        """Returns the config of a worker. `cache`: settings of its pages in place of the flags'."""
        model, memory = self.flags.model, self.flags.memory
        given = memory.model_dump(exclude={"device_memory_bytes", "host_cache_bytes", "disk_cache_bytes"})
        return WorkerConfig(
            role=role,
            worker_id="bill",
            model=model.config.replace(max_model_len=model.max_model_len),
            cache=CacheConfig(**given | cache),
            schedule=ScheduleConfig(max_num_seqs=model.max_num_seqs),
        )

    def planned(self, config: WorkerConfig) -> MemoryPlan:
        """Returns what a worker holds. Raises ConfigError where it would be refused."""
        spec, device_bytes = self.spec, self.flags.memory.device_memory_bytes
        if spec is None:
            return PacedBackend().plan(config).memory
        if device_bytes is None:
            return RankedOnCpus(CpuBackend(spec, Path(), self.layouts)).plan(config).memory
        device = (torch.device("cuda:0"), MemoryReading(BILLED_DEVICE, device_bytes, device_bytes))
        return CudaBackend(spec, Path(), self.layouts, [device]).plan(config).memory

    @cached_property
    def plan(self) -> MemoryPlan:
        """What a decode worker holds with pages in the form that is asked for."""
        return self.planned(self.config())

    @cached_property
    def groups(self) -> tuple[LayerGroup, ...]:
        """The groups of layers whose pages are counted apart; none for a paced model."""
        return () if self.spec is None else groups_of(self.spec, self.plan)

    def block_bytes(self, form: str) -> int:
        """Returns the bytes of one block in all layers. Pages of a paced model have one size in every form."""
        return sum(group.page_bytes(form) for group in self.groups) or self.plan.layout.block_bytes


def billed_model(flags: BillFlags) -> BilledModel:
    """Reads the model's config. Raises ConfigError or UnsupportedModel where it cannot be served."""
    model = flags.model
    if model.is_paced:
        return BilledModel(flags, None, None)
    return BilledModel(flags, spec_of(model.model, model.dtype, model.max_model_len), _layouts_of(model))


def _layouts_of(model: ModelFlags) -> LayoutOf | None:
    path = Path(model.model).expanduser()
    if path.suffix == GGUF_SUFFIX and path.is_file():
        return layouts_of_gguf(path)
    directory = path if path.is_dir() else places.locate(model.model, model.dtype)
    return None if directory is None else layouts_in(directory)


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
