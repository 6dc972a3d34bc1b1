"""Checks that a draft model can propose tokens for a model: a smaller one with the same vocabulary. No torch here."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from twostroke.base.errors import ConfigError
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig
from twostroke.kv_cache.form import AnyForm, page_form
from twostroke.kv_cache.groups.page_group import groups_apart
from twostroke.kv_cache.pool_size import enough_pages, host_pool_bytes
from twostroke.models.catalog.places import locate
from twostroke.models.known_specs import known_spec
from twostroke.models.memory_needs import WeightBytes, plain_weights, weights_on_cpu
from twostroke.models.spec import ModelSpec
from twostroke.models.weights.stored.model_files import LayoutOf, layouts_in
from twostroke.page_forms.page_form import PageShape

FLAG = "--draft-model"
CACHE_FLAG = "--draft-cache-memory"
TOKENIZER = "tokenizer.json"


def draft_dir(name: str, dtype: str) -> Path | None:
    """Returns what `places.locate` returns for a draft model. Raises ConfigError, naming its flag."""
    with naming_draft(name):
        return locate(name, dtype)


@contextlib.contextmanager
def naming_draft(name: str) -> Iterator[None]:
    """Makes a ConfigError of the body, about the model `name`, name the flag of draft models."""
    try:
        yield
    except ConfigError as error:
        message = error.message.replace("--model", FLAG)
        raise ConfigError(message if FLAG in message else f"{FLAG} {name}: {message}", field=FLAG) from error


@dataclass(frozen=True, slots=True)
class DraftModelPlan:
    """The memory that a draft model takes on one decode worker in addition to the model."""

    name: str
    spec: ModelSpec
    is_int8: bool
    """Whether native kernels round its weights to int8."""
    weights: WeightBytes
    weights_kind: str
    form: AnyForm
    shapes: tuple[PageShape, ...]
    """Dimensions of its pages. There is one page group, since a page holds all layers of a block."""
    pages: int

    @property
    def page_bytes(self) -> int:
        return self.form.page_bytes(self.shapes[0])

    @property
    def pool_bytes(self) -> int:
        """Bytes of its pages, with their scratch page and generations."""
        return host_pool_bytes(self.pages, self.page_bytes)

    @property
    def tokens(self) -> int:
        return self.pages * self.shapes[0].block

    @property
    def total_bytes(self) -> int:
        return self.weights.total + self.pool_bytes


def plan_draft(
    directory: Path, model: ModelConfig, cache: CacheConfig, schedule: ScheduleConfig, *, is_packed: bool = True
) -> DraftModelPlan:
    """Returns the memory that a decode worker takes for its draft model, which is in a directory.

    `is_packed`: whether native kernels compute it if they can. Raises ConfigError where its page memory is too small.
    """
    dtype, spec = model.dtype, known_spec(directory)
    form, groups = page_form(dtype), groups_apart(spec.page_groups, by_whole_blocks=True)
    shapes = spec.page_shapes(cache.block_size, groups)
    weights, kind, is_int8 = plain_weights(spec, dtype), dtype, False
    if is_packed:
        layouts = layouts_in(directory)
        is_int8 = _is_drafted_in_int8(spec, dtype, layouts)
        weights, kind = weights_on_cpu(spec, dtype, layouts, is_int8=is_int8)
    pages = enough_pages(schedule.draft_cache_bytes, form.page_bytes(shapes[0]), flag=CACHE_FLAG)
    return DraftModelPlan(schedule.draft_model or "", spec, is_int8, weights, kind, form, shapes, pages)


def check_draft(name: str, draft: Path, model: Path) -> None:
    """Raises ConfigError, one line, where the draft model in a directory cannot propose tokens for `model`.

    `name` is the draft model's, as in `--draft-model`.
    """
    if draft.resolve() == model.resolve():
        raise _refused(name, "is the model itself: a draft model is a smaller one")
    check_vocab_sizes(name, known_spec(draft).vocab_size, known_spec(model).vocab_size)
    own, others = _vocabulary(draft), _vocabulary(model)
    differing = sorted(own.items() ^ others.items(), key=lambda entry: entry[1])
    if differing:
        token, number = differing[0]
        raise _refused(
            name, f"has another vocabulary than the model: they differ in token {number} ({token!r}), among others"
        )


def _is_drafted_in_int8(spec: ModelSpec, dtype: str, layouts: LayoutOf | None) -> bool:
    """Returns whether native kernels round a draft model to int8. `layouts` are those of its files: they show what is
    quantised."""
    return dtype == "bfloat16" and spec.generic is None and layouts is None


def check_draft_size(name: str, draft: Path, model_dir: Path, model: ModelConfig) -> None:
    """Raises ConfigError where a step of the draft model reads no fewer bytes of weights than one of the model."""
    spec, layouts = known_spec(draft), layouts_in(draft)
    is_int8 = _is_drafted_in_int8(spec, model.dtype, layouts)
    own, _ = weights_on_cpu(spec, model.dtype, layouts, is_int8=is_int8)
    whole, layouts = known_spec(model_dir, model.max_model_len, model.model_impl), layouts_in(model_dir)
    others, _ = weights_on_cpu(whole, model.dtype, layouts, is_int8=model.weights == "int8")
    refuse_no_smaller(name, own, others)


def refuse_no_smaller(name: str, draft: WeightBytes, model: WeightBytes) -> None:
    """Raises ConfigError where a token of the draft model costs as much as one of the model."""
    if draft.step >= model.step:
        raise _refused(
            name,
            f"reads {draft.step} bytes of weights in a step and the model {model.step}: a draft model is a smaller one",
        )


def check_vocab_sizes(name: str, draft_tokens: int, model_tokens: int) -> None:
    """Raises ConfigError where the two models draw from different numbers of tokens."""
    if draft_tokens != model_tokens:
        raise _refused(
            name, f"draws from {draft_tokens} tokens and the model from {model_tokens}: both need one vocabulary"
        )


def _refused(name: str, why: str) -> ConfigError:
    return ConfigError(f"{FLAG} {name} {why}", field=FLAG)


def _vocabulary(directory: Path) -> dict[str, int]:
    """Returns the id of each token, added tokens included. Raises ConfigError where the file cannot be read."""
    path = directory / TOKENIZER
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = (read.get("model") or {}).get("vocab") or {}
        if isinstance(vocabulary, list):  # of a Unigram tokenizer: pairs of a token and its score
            vocabulary = {str(token): number for number, (token, _) in enumerate(vocabulary)}
        return {**vocabulary, **{str(added["content"]): int(added["id"]) for added in read.get("added_tokens") or ()}}
    except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is not a tokenizer: {error!r}", field=FLAG) from error
