"""The tokens that end an answer: all that the config, the generation config, the tokenizer and the GGUF file of a model
name.

They are combined, as in vLLM, because publishers forget now one of them and now another. No torch here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from twostroke.models.weights.stored.gguf_file import read_gguf
from twostroke.models.weights.stored.model_files import gguf_in

TOKENIZER: Final = "tokenizer.json"
SPECIAL_TOKENS: Final = ("tokenizer_config.json", "special_tokens_map.json")
"""Files with eos_token as the text of a token, or as an object with its content."""
READ_FILES: Final = ("config.json", "generation_config.json", *SPECIAL_TOKENS, TOKENIZER)
"""The files of a model's directory that its spec is read from, except for a GGUF file."""
GGUF_KEYS: Final = tuple(f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom"))
"""The ends of a text, of a turn and of a message in a GGUF file's header."""


def end_tokens(directory: Path, config_ids: Any, vocab_size: int, *, usual_ids: Any = None) -> tuple[int, ...]:
    """Returns the ids of all end tokens of the model in `directory`, those of its generation config first.

    `config_ids` is the value in config.json. `usual_ids` are transformers' defaults for such models. They count only
    where nothing else names an end token, since in other vocabularies they are ordinary words. Ids from `vocab_size` on
    are left out, since they are never drawn. Raises ValueError, naming the file, for what is no token.
    """
    generation = _read(directory / "generation_config.json").get("eos_token_id")
    found = [
        *_ids("generation_config.json", generation),
        *_ids("config.json", config_ids),
        *_of_tokenizer(directory),
        *_of_gguf(directory),
    ]
    found = found or [*_ids("config.json", usual_ids)]
    return tuple(dict.fromkeys(token for token in found if token < vocab_size))


def _ids(source: str, ids: Any) -> tuple[int, ...]:
    every = () if ids is None else tuple(ids) if isinstance(ids, list | tuple) else (ids,)
    if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in every):
        raise ValueError(f"eos_token_id of {source} is {ids!r}, which is neither a token id nor a list of them")
    return every


def _of_tokenizer(directory: Path) -> Iterator[int]:
    """Yields the end tokens of the tokenizer. A text that is not a token of the tokenizer is passed over."""
    texts = set()
    for name in SPECIAL_TOKENS:
        token = _read(directory / name).get("eos_token")
        text = token.get("content") if isinstance(token, Mapping) else token
        if isinstance(text, str):
            texts.add(text)
    if not texts:
        return
    tokens = _tokens(_read(directory / TOKENIZER))
    yield from (tokens[text] for text in sorted(texts) if text in tokens)


def _tokens(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Returns the id of each token's text. Where an added token has the same text, its id counts."""
    model = tokenizer.get("model")
    vocabulary = model.get("vocab") if isinstance(model, Mapping) else None
    tokens = dict(vocabulary) if isinstance(vocabulary, Mapping) else {}
    if isinstance(vocabulary, list):  # a unigram model: pairs of text and score, in the order of ids
        tokens = {pair[0]: token for token, pair in enumerate(vocabulary)}
    return tokens | {added["content"]: added["id"] for added in tokenizer.get("added_tokens") or ()}


def _of_gguf(directory: Path) -> Iterator[int]:
    for key, ids in zip(GGUF_KEYS, gguf_end_facts(directory), strict=True):
        yield from _ids(key, ids)


def gguf_end_facts(directory: Path) -> tuple[Any, ...]:
    """Returns the values of `GGUF_KEYS` in the header of a directory's GGUF file, unchecked; None for a missing key."""
    gguf = gguf_in(directory)
    facts = {} if gguf is None else read_gguf(gguf).facts
    return tuple(facts.get(key) for key in GGUF_KEYS)


def _read(file: Path) -> Mapping[str, Any]:
    """Returns a file's object; an empty one where there is no file. Raises ValueError where it is not an object."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file.name} is no JSON: {error}") from error
    if not isinstance(content, dict):
        raise TypeError(f"{file.name} is not an object")
    return content
