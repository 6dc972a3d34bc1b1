"""What is served."""

from __future__ import annotations

import argparse

from cluster.flags.defaults import DEFAULTS, with_default


def add(group: argparse._ActionsContainer) -> None:
    model = DEFAULTS.model
    group.add_argument(
        "--model",
        default=model.model,
        help=with_default("a name of the catalogue, a directory, a hub id, or paced:SPEC"),
    )
    group.add_argument(
        "--served-model-name",
        default=model.served_model_name,
        metavar="NAME",
        help="what clients call it (default: as --model)",
    )
    group.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default=model.dtype,
        help=with_default("of weights and KV"),
    )
    group.add_argument(
        "--weights",
        choices=("model", "int8"),
        default=model.weights,
        help=with_default("as the model has them, or rounded to int8: faster on CPUs, less exact"),
    )
    group.add_argument(
        "--max-model-len",
        type=int,
        default=model.max_model_len,
        metavar="TOKENS",
        help="prompt and answer together (default: what the model was made for)",
    )
    group.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=model.deterministic,
        help=with_default("a stream's bits depend on no other, whatever dies; refused where that cannot be kept"),
    )
    group.add_argument(
        "--device",
        default=model.device,
        metavar="DEVICE",
        help=with_default("what computes: cpu, cuda, cuda:N, or auto"),
    )
