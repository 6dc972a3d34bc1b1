"""Reads the files of the prefixes that every tenant may share."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

from router.dialects.openai.schema import parse_chat
from router.json_body import parse_json
from router.text.prompts import ChatPrompt, PublicPrefixes
from router.text.tokenizer import Text
from twostroke.base.errors import ConfigError, ServeError


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
