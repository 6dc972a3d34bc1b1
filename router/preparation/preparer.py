"""Prepares short requests on the event loop, and others in processes of their own, in which tenants take turns.

Parsing, rendering and tokenizing hold the interpreter's lock, even on a thread: a body of megabytes would stop all
streams of this router for seconds, and some short ones for tenths of a second. A process for bodies of some kilobytes
always runs. One for large bodies, and one that compiles grammars, start when they are needed. Each process does one
request at a time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

from router.dialects.openai.schema import parse_chat
from router.json_body import parse_json
from router.preparation.prepare import prepare
from router.preparation.prepared_texts import PreparedTexts
from router.preparation.work_process import WORK_S, TextFiles, WorkProcess, WorkProgram
from router.requests.work import PreparationOutcome, Work
from router.text.prompts import ChatPrompt, PublicPrefixes
from router.text.structured.output import StructuredOutput
from router.text.text_files import text_copy, text_digest
from router.text.tokenizer import Text
from twostroke.base.errors import ConfigError, ServeError

INLINE_BYTES = 4 << 10
"""Bytes of the largest body that is prepared on the event loop: some milliseconds, 20 ms at worst."""
_MAY_TAKE_LONG = re.compile(rb"allOf|oneOf|regex|\\u00[67]")
"""What a body has that takes up to 200 ms for so few bytes: a schema of alternatives, or the regex of a custom tool.
The escapes stand for ASCII letters, with which each word can be written."""
SMALL_BYTES = 128 << 10
"""Bytes of the largest body that never waits for larger ones."""
SMALL_S = 10.0
"""Seconds of processor time for one small body. It usually takes milliseconds, and other small ones wait for it."""
COMPILE_S = 2.0
"""Seconds of processor time for one grammar. Nearly all take milliseconds. By the clock it may be many times as long,
since the process gets only what other processes leave of the machine."""
IDLE_S = 120.0
"""Idle seconds after which the process for large bodies ends, and frees its memory. Starting it takes a second, many
times the preparation of a chat's turn, so it stays from one turn of a chat to the next."""
COMPILER_IDLE_S = 600.0
"""Idle seconds after which the process that compiles grammars ends. Starting it takes about a second."""
LARGE_NICE = 10


_READER = WorkProgram(
    "router.preparation.process", "read the request", WORK_S, None, None, frozenset({-signal.SIGABRT})
)
"""Reads large bodies. Libraries end a process with SIGABRT if they get no memory."""
_SMALL_READER = dataclasses.replace(_READER, cpu_s=SMALL_S)
_COMPILER = WorkProgram(
    "router.preparation.grammar_process",
    "compile the grammar",
    WORK_S,
    COMPILE_S,
    WORK_S,
    frozenset({-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS}),
)
"""Compiles grammars. A process whose stack is full ends with SIGSEGV or SIGBUS."""


class ProcessPreparer:
    """Prepares requests and compiles grammars. Its processes do what may take long."""

    def __init__(self, text: Text, model_dir: str, texts: PreparedTexts) -> None:
        """`texts` caches the tokens of earlier texts for all of its processes."""
        self.text = text
        self._texts = texts
        digest = text_digest(model_dir)
        files = TextFiles(text_copy(model_dir, digest), digest)
        self._small = WorkProcess(_SMALL_READER, files, nice=0, idle_s=None)
        self._large = WorkProcess(_READER, files, nice=LARGE_NICE, idle_s=IDLE_S)
        self._grammars = WorkProcess(_COMPILER, files, nice=LARGE_NICE, idle_s=COMPILER_IDLE_S)

    async def prepare(self, work: Work, tenant: str) -> PreparationOutcome:
        work, known = self._texts.keyed(work), self._texts.known_to(work)
        if len(work.body) <= INLINE_BYTES and _MAY_TAKE_LONG.search(work.body) is None:
            outcome = prepare(work, self.text, known)
            if known is not None:
                known.learn(outcome)
            return outcome
        process = self._small if len(work.body) <= SMALL_BYTES else self._large
        return await process.prepare(work, tenant, known)

    async def compile(self, output: StructuredOutput, tenant: str) -> PreparationOutcome:
        return await self._grammars.prepare(output, tenant)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for process in (self._small, self._large, self._grammars):
                group.create_task(process.run())


def read_public_prefixes(files: Iterable[str], text: Text) -> PublicPrefixes:
    """Reads the files of --public-prefix. Raises ConfigError that names a wrong file.

    FILE.json holds the first messages of a chat, as clients send them; they are rendered. Any other file holds the
    text that completions begin with.
    """
    return PublicPrefixes(_tokens_of(Path(file), text) for file in files)


def _tokens_of(file: Path, text: Text) -> Sequence[int]:
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
