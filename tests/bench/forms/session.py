"""All forms over the same text: a table, JSON."""

from __future__ import annotations

import dataclasses
import hashlib
import math

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from cluster.flags.checks import STDOUT
from tests.bench.forms.options import FormOptions
from tests.bench.forms.quality import BLOCK, ConvertedModel, FormModel, Quality, compare
from tools.output import write_json
from twostroke.errors import ConfigError
from twostroke.kernels.cpu.choice import choose_kernels
from twostroke.kernels.page_pool import BYTES
from twostroke.kv_cache.form import FORMS, Conversion, KvForm
from twostroke.models import catalog
from twostroke.models.registry import read_spec

SCHEMA_VERSION = 1


def run_session(options: FormOptions) -> int:
    text = options.text.read_text(encoding="utf-8")
    results = qualities(options, text)
    console = Console(stderr=options.json_path == STDOUT)
    console.print(_table(results), highlight=False)
    write_json(
        {
            "schema_version": SCHEMA_VERSION,
            "model": options.model.model,
            "dtype": options.model.dtype,
            "text": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
            "tokens": options.windows * options.window_tokens,
            "results": [dataclasses.asdict(each) for each in results],
        },
        options.json_path,
    )
    return 0


def qualities(options: FormOptions, text: str) -> list[Quality]:
    """Return those of the model's own dtype, then of all forms. Raises ConfigError where model or text is missing."""
    name, dtype = options.model.model, options.model.dtype
    directory = catalog.locate(name, dtype)
    if directory is None:
        raise ConfigError(f"{name} in {dtype} is not on this machine: `twostroke model pull {name}`", field="model")
    spec, tokens = read_spec(directory), options.window_tokens
    known = torch.tensor(Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids)
    if len(known) < options.windows * tokens:
        raise ConfigError(
            f"--text has {len(known)} tokens, {options.windows} windows of {tokens} need {options.windows * tokens}",
            field="text",
        )
    windows = list(known[: options.windows * tokens].view(options.windows, tokens))
    kernels = choose_kernels(catalog.cache_dir() / "kernels")
    shape = spec.page_shape(BLOCK)

    def over(form: str) -> FormModel:
        return FormModel(directory, spec, dtype, form, tokens, kernels)

    def converted(form: str) -> ConvertedModel:
        conversion = Conversion(KvForm(dtype), KvForm(form, dtype), shape, has_pieces=kernels is not None)
        return ConvertedModel(over(dtype), over(form), conversion)

    others = {form: over(form) for form in options.forms}
    mixed = {str(KvForm(form, dtype)): converted(form) for form in options.forms if form in BYTES}
    found = compare(over(dtype), {**others, **mixed}, windows)
    return [
        Quality(form or dtype, FORMS[(form or dtype).split()[0]].page_bytes(shape), math.exp(loss), kl, same)
        for form, (loss, kl, same) in found.items()
    ]


def _table(results: list[Quality]) -> Table:
    exact = results[0]
    table = Table(title="forms of pages", title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in ("bytes/token", "of exact", "perplexity", "change", "mean KL", "same token"):
        table.add_column(column, justify="right", no_wrap=True)
    for each in results:
        table.add_row(
            each.form,
            f"{each.page_bytes / BLOCK:.0f}",
            f"{each.page_bytes / exact.page_bytes:.3f}",
            f"{each.perplexity:.3f}",
            f"{each.perplexity / exact.perplexity - 1:+.2%}",
            f"{each.mean_kl:.2e}",
            f"{each.same:.1%}",
        )
    return table
