"""`python -m tests.trials.chaos.tiny_model DIRECTORY` saves a model that two ranks can share, and that costs little.

Its weights are random. It has the tokenizer of the default model, so that its answers are text.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from twostroke.config import DEFAULT_MODEL
from twostroke.models.catalog.fetch import fetch

LAYERS = 2


def save(directory: Path, layers: int) -> None:
    """Saves a Llama in float32: 4 heads, 2 key-value heads, 64 numbers of a token's state.

    Models with fewer layers have the same embedding and the same first layers. Each layer adds about as much as the
    embedding, so that such a model is right now and then.
    """
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    of_tokenizer = fetch(DEFAULT_MODEL, "bfloat16", lambda stage, part: None)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=2,
        bos_token_id=1,
        initializer_range=0.06,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config)
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    model.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copyfile(of_tokenizer / name, directory / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.trials.chaos.tiny_model", description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, default=LAYERS, help="a model with fewer is a draft model of it")
    args = parser.parse_args()
    save(args.directory, args.layers)
