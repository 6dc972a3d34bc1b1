"""All forms of each model over the same text: a table per model, JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rich.console import Console

from cluster.flags.checks import STDOUT
from tests.trials.bench.forms.answers import blocks_of, continued, planted, retrieved, shared_tokens
from tests.trials.bench.forms.form_model import BLOCK, FormModel, LocalModel, local_model
from tests.trials.bench.forms.options import CONVERTED, FACTS, GREEDY, PREDICTION, FormOptions
from tests.trials.bench.forms.quality import ConvertedModel, Predicts, compare
from tests.trials.bench.forms.results import FormResult, ModelResult, table_of
from tools.output import write_json
from twostroke.base.errors import ConfigError
from twostroke.kernels.pools.page_pool import PLAIN
from twostroke.kv_cache.form import Conversion, KvForm, page_form

SCHEMA_VERSION = 2
PIPE_COLUMNS = 130


def run_session(options: FormOptions) -> int:
    text = options.text.read_text(encoding="utf-8")
    console = Console(stderr=options.json_path == STDOUT)
    width = None if console.is_terminal else PIPE_COLUMNS
    found = []
    for config in options.models:
        with local_model(config, options.threads) as model:
            found.append(FormComparison(model, options, text).result())
        console.print(table_of(found[-1]), highlight=False, width=width)
    flags = {key: value for key, value in dataclasses.asdict(options).items() if isinstance(value, int)}
    write_json(
        {
            "schema_version": SCHEMA_VERSION,
            "text": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
            "options": flags,
            "models": [dataclasses.asdict(each) for each in found],
        },
        options.json_path,
    )
    return 0


@dataclass(frozen=True, slots=True)
class Prediction:
    loss: float
    mean_kl: float
    same: float


class FormComparison:
    """One model, and the text as its tokens. Raises ConfigError where the text is too short, or the model."""

    def __init__(self, model: LocalModel, options: FormOptions, text: str) -> None:
        self._model = model
        self._options = options
        self._tokens = model.encode(text)
        self._forms = (model.config.dtype, *options.forms)
        longest = model.spec.max_position_embeddings
        self._context = min(options.context, longest)
        for flag, tokens in (
            ("--window-tokens", options.window_tokens),
            ("--prompt-tokens and --continued-tokens", options.prompt_tokens + options.continued_tokens),
        ):
            if tokens > longest:
                raise ConfigError(f"{flag}: {model.config.model} takes {longest} tokens", field="model")

    def result(self) -> ModelResult:
        parts = self._options.parts
        predictions = self._predictions() if parts & {PREDICTION, CONVERTED} else {}
        shared = self._shared() if GREEDY in parts else {}
        facts = self._facts() if FACTS in parts else {}
        return ModelResult(
            model=self._model.config.model,
            dtype=self._model.config.dtype,
            context_tokens=self._context,
            results=tuple(
                FormResult(
                    form=name,
                    page_bytes=page_form(name.split()[0]).page_bytes(self._model.shape),
                    perplexity=None if (found := predictions.get(name)) is None else math.exp(found.loss),
                    mean_kl=None if found is None else found.mean_kl,
                    same=None if found is None else found.same,
                    shared_tokens=shared.get(name),
                    retrieved=facts.get(name),
                )
                for name in dict.fromkeys((*self._forms, *predictions))
            ),
        )

    def _predictions(self) -> Mapping[str, Prediction]:
        exact, *others = self._forms
        tokens, parts, predicting = self._options.window_tokens, self._options.parts, dict[str, Predicts]()
        windows = self._parts_of_text(self._options.windows, tokens, "windows")
        if PREDICTION in parts:
            predicting.update({form: self._over(form, tokens) for form in others})
        if CONVERTED in parts:
            predicting.update(self._converted(form, tokens) for form in others if form not in PLAIN)
        found = compare(self._over(exact, tokens), predicting, windows)
        return {form or exact: Prediction(*means) for form, means in found.items()}

    def _converted(self, form: str, tokens: int) -> tuple[str, ConvertedModel]:
        """Returns the form's name and its model, whose earlier pages come from those of the model's dtype."""
        exact, model = self._forms[0], self._model
        target = KvForm(form, exact)
        centers = None if model.key_centers is None else model.key_centers.numpy()
        has_pieces = model.kernels is not None
        conversion = Conversion(KvForm(exact), target, model.shape, has_pieces=has_pieces, key_centers=centers)
        return str(target), ConvertedModel(self._over(exact, tokens), self._over(form, tokens), conversion)

    def _shared(self) -> Mapping[str, tuple[int, ...]]:
        count, length, more = self._options.prompts, self._options.prompt_tokens, self._options.continued_tokens
        prompts = self._parts_of_text(count, length, "prompts")
        tokens = count * blocks_of(length + more) * BLOCK
        found = {form: continued(self._over(form, tokens), prompts, more) for form in self._forms}
        exact, *_ = found.values()
        return {form: shared_tokens(exact, each) for form, each in found.items()}

    def _facts(self) -> Mapping[str, tuple[bool, ...]]:
        text = planted(self._model, self._tokens, self._options.facts, self._context, self._options.seed)
        return {form: retrieved(self._over(form, text.pool_tokens), text, self._model) for form in self._forms}

    def _over(self, form: str, tokens: int) -> FormModel:
        return FormModel(self._model, form, tokens)

    def _parts_of_text(self, count: int, length: int, what: str) -> list[torch.Tensor]:
        """Returns `count` parts of the text, evenly spaced, the first at its beginning."""
        if len(self._tokens) < count * length:
            raise ConfigError(
                f"--text has {len(self._tokens)} tokens, {count} {what} of {length} need {count * length}",
                field="text",
            )
        step = len(self._tokens) // count
        return [self._tokens[number * step :][:length] for number in range(count)]
