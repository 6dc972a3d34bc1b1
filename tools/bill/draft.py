"""Bills a draft model: its weights and its private pages. Each decode worker holds both in addition to the model's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tools.bill.model import spec_of, weights_of
from tools.bill.options import BillFlags, ModelFlags
from twostroke.base.errors import ConfigError
from twostroke.config import ModelConfig, ScheduleConfig
from twostroke.kv_cache.layout import PoolLayout
from twostroke.models.catalog.places import locate
from twostroke.models.drafts.check import (
    TOKENIZER,
    check_draft,
    check_vocab_sizes,
    draft_dir,
    draft_pool,
    is_drafted_in_int8,
    refuse_no_smaller,
)
from twostroke.models.memory_needs import WeightBytes
from twostroke.models.weights.stored.model_files import layouts_in


@dataclass(frozen=True, slots=True)
class BilledDraft:
    name: str
    weights: WeightBytes
    weights_kind: str
    pages: int
    page_bytes: int
    block_size: int

    @property
    def pool_bytes(self) -> int:
        """What its pages take, with their scratch page and generations."""
        return PoolLayout.of(self.pages, self.page_bytes).host_bytes

    @property
    def tokens(self) -> int:
        return self.pages * self.block_size

    @property
    def total_bytes(self) -> int:
        return self.weights.total + self.pool_bytes


def billed_draft(flags: BillFlags, model_weights: WeightBytes) -> BilledDraft | None:
    """Counts the draft model as a decode worker does; None where none is named.

    Raises ConfigError where it cannot propose tokens for the model, or has no room for pages.
    """
    name, model = flags.draft.draft_model, flags.model
    if name is None:
        return None
    if flags.memory.device_memory_bytes is not None:
        raise ConfigError(
            f"--draft-model {name} is computed on CPUs only: leave --device-memory away", field="draft_model"
        )
    ScheduleConfig(draft_model=name).check_draft_model(ModelConfig(model=model.model, dtype=model.dtype))
    directory = draft_dir(name, model.dtype)
    if directory is None:
        raise ConfigError(f"draft model {name!r} is not on this machine; run: twostroke model pull {name}")
    _check_vocabulary(name, directory, model)
    draft = _counted(flags, name, directory)
    refuse_no_smaller(name, draft.weights, model_weights)
    return draft


def _counted(flags: BillFlags, name: str, directory: Path) -> BilledDraft:
    model, block_size = flags.model, flags.memory.block_size
    spec, layouts = spec_of(name, model.dtype, None), layouts_in(directory)
    is_int8 = is_drafted_in_int8(spec, model.dtype, layouts)
    as_draft = ModelFlags(model=name, dtype=model.dtype, weights="int8" if is_int8 else "model")
    weights, kind = weights_of(spec, as_draft, layouts, on_gpu=False)
    pool = draft_pool(spec, model.dtype, block_size, flags.draft.draft_cache_bytes)
    return BilledDraft(name, weights, kind, pool.pages, pool.page_bytes, block_size)


def _check_vocabulary(name: str, draft: Path, model: ModelFlags) -> None:
    """Compares the tokenizers where both models have one, and otherwise only the number of tokens."""
    path = Path(model.model).expanduser()
    directory = path if path.exists() else locate(model.model, model.dtype)
    if directory is not None and (directory / TOKENIZER).is_file() and (draft / TOKENIZER).is_file():
        check_draft(name, draft, directory)
    else:
        check_vocab_sizes(
            name, spec_of(name, model.dtype, None).vocab_size, spec_of(model.model, model.dtype, None).vocab_size
        )
