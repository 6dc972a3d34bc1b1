"""`python -m tests.bench forms`: what each form of pages takes in bytes and in quality, with a real model.

    options     the flags, checked once
    quality     one text through the model over pages of each form: perplexity, distance of logits, greedy tokens
    session     all forms beside the first one; table, JSON

Only argparse is imported until `run` is called; torch comes then.
"""

from __future__ import annotations

import argparse

from tests.bench.forms import options

EPILOG = """Each window of the text is computed in chunks over pages of one form; every position but the last predicts
the next token. KL is the distance of the next token's distribution from the one over pages of the model's dtype, in
nats; "same" is the share of positions whose likeliest token is the same. "int8 from bfloat16" are int8 pages whose
earlier chunks were computed over bfloat16 pages and then converted, as where prefill workers have another form than
decode workers. For step times: python -m tests.bench kernels --only forms

examples:
  python -m tests.bench forms
  python -m tests.bench forms --model smollm2-135m --text novel.txt --windows 8 --json forms.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog, parser.formatter_class = EPILOG, argparse.RawDescriptionHelpFormatter
    options.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """0. Raises ServeError for bad flags and for a model that is not on this machine."""
    checked = options.options_from(args)
    from tests.bench.forms.session import run_session

    return run_session(checked)
