"""`python -m tests.trials.bench forms`: what each form of pages takes in bytes and in quality, with real models.

    options      the flags, checked once
    form_model   a model over pages of one form
    quality      one text: perplexity, distance of the predictions
    answers      greedy continuations, and facts that a long text says once
    results      what was found, as a table
    session      all forms of all models; JSON

Only argparse is imported until `run` is called; torch comes then.
"""

from __future__ import annotations

import argparse

from tests.trials.bench.forms import options

EPILOG = """What is measured, each over pages of every form, beside pages of the model's dtype:

  prediction  Windows, evenly spaced in the text, are computed in chunks; every position but the last predicts the next
              token. KL is the distance of the next token's distribution, in nats; "same" is the share of positions
              whose likeliest token is the same.
  converted   The same over "int8 from bfloat16": earlier chunks were computed over bfloat16 pages and then converted,
              as where prefill workers have another form than decode workers.
  greedy      Parts of the text are continued greedily, past any end of text. "shared" is the mean number of tokens
              before the first one that differs.
  facts       Sentences like "The secret number of Oslo is 48213." are planted evenly in one long text (the same text,
              repeated). Its pages are computed once; then each fact is asked for, and the greedy answer must hold it.

For step times: python -m tests.trials.bench kernels --only forms

examples:
  python -m tests.trials.bench forms
  python -m tests.trials.bench forms --model smollm2-135m --model qwen2.5-coder-0.5b --threads 2 --json forms.json
  python -m tests.trials.bench forms --text novel.txt --only facts --context 16384 --forms int8
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0. Raises ServeError for bad flags and for a model that is not on this machine."""
    checked = options.options_from(args)
    from tests.trials.bench.forms.session import run_session

    return run_session(checked)
