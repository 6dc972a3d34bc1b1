"""Prefixes of prompts that every tenant may share: the operator has declared that they are no secret."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from router.frontend.json_body import parse_json
from router.frontend.openai.schema import parse_chat
from router.frontend.params import ChatPrompt
from router.frontend.text.tokenizer import Text
from twostroke.errors import ConfigError, ServeError


class PublicPrefixes:
    """A prompt's blocks are public that lie wholly in what it has in common with one of the prefixes."""

    def __init__(self, prefixes: Iterable[Sequence[int]] = ()) -> None:
        self._prefixes = tuple(tuple(prefix) for prefix in prefixes)

    def blocks_of(self, prompt: Sequence[int], block_size: int) -> int:
        return max((common_length(prompt, prefix) for prefix in self._prefixes), default=0) // block_size


def read_public_prefixes(files: Iterable[str], text: Text) -> PublicPrefixes:
    """Reads the files. Raises ConfigError, naming the file.

    FILE.json holds the beginning of a chat as clients would send it, which the model's template renders. Any other file
    holds the text that completions begin with.
    """
    return PublicPrefixes(_tokens_of(Path(file), text) for file in files)


def _tokens_of(file: Path, text: Text) -> list[int]:
    try:
        content = file.read_bytes().decode()
        if file.suffix != ".json":
            return text.encode(content)
        (chat,) = parse_chat(parse_json(content.encode())).prompts
        assert isinstance(chat, ChatPrompt)
        return text.encode_chat(dataclasses.replace(chat, add_generation_prompt=False, continue_final_message=False))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--public-prefix {file}: {error}", field="--public-prefix") from error
    except ServeError as error:
        raise ConfigError(f"--public-prefix {file}: {error.message}", field="--public-prefix") from error


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Counts the tokens that both begin with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (mine, yours) in pairs if mine != yours), min(len(one), len(other)))
