"""Records what real models answer to prompts with tools, in every format, into recorded.jsonl.

twostroke serve --model qwen2.5-coder-1.5b:gguf --max-model-len 2048
python -m tests.conformance.record_outputs

and, for a model that knows no tools and can only be forced, in each format:

twostroke serve --tool-call-parser FORMAT --max-model-len 2048
python -m tests.conformance.record_outputs --forced FORMAT

A line is {"model", "format", "output", "parts"}, as in tool_outputs.jsonl. An answer that was cut has {"cut": true},
too. The lines of the same model and format are
written anew, others stay. Qwen2.5-Coder is shown other formats than its own in the system prompt, so that many answers
break them, at temperature 1 and above most of all. `parts` are what the parser made of the whole answer
when it was recorded; test_recorded.py compares the calls among them with those that a second reading finds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.conformance.make_tool_outputs import TOOLS
from tests.conformance.reading import parsed

FILE = Path(__file__).with_name("recorded.jsonl")
AT_ONCE = 16
"""Requests under way: a batch of a decode worker."""
MAX_TOKENS = 100
"""Enough for two calls. Answers that ramble break off in the middle of one."""

QUESTIONS = (
    "What is the weather in Paris and in São Paulo?",
    "What is (3 + 4) * 29, and is it raining in Oslo?",
    'Write a file notes.txt. Its first line says "first", its second line says it\'s the last one.',
    "Search for the newest release of Python, at most 5 results, and then ping the server.",
)
FORMATS = {
    "qwen3_coder": (
        "To call a function, answer with a block that begins with < tool_call > and ends with < /tool_call > (written "
        "without the spaces), in this form:\n<function=example_function>\n<parameter=example_parameter>\nvalue\n"
        "</parameter>\n</function>\nTwo calls are two blocks."
    ),
    "llama3_json": (
        'Answer with function calls in the form {"name": function name, "parameters": dictionary of argument name and '
        'its value}. Several calls stand in one line with "; " between them. No Markdown, no other text.'
    ),
    "pythonic": (
        "Answer with function calls in the form [func_name1(param1=value1, param2=value2), func_name2(param=value)]. "
        "No Markdown, no other text."
    ),
    "mistral": (
        'Answer with function calls in the form [TOOL_CALLS] [{"name": "func_name", "arguments": {"param": value}}, '
        '{"name": ...}]. No Markdown, no other text.'
    ),
    "harmony": (
        "Answer in messages. Begin with <|channel|>analysis<|message|>what you think<|end|> and then, to call a "
        "function, <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>"
        '{"param": value}<|call|>. What the user reads is <|start|>assistant<|channel|>final<|message|>text<|return|>.'
    ),
    "think": "First think aloud between <think> and </think>, in a few words. Then answer.",
}

SHOWN_MARKS = (
    "You call tools. To call one, answer with a block that begins with < tool_call > and ends with < /tool_call > "
    "(written without the spaces). A question about two cities or two things needs two blocks, one after the other. "
    "Never use Markdown."
)
WITH_TOOLS = (
    ("You are a helpful assistant.", "auto", 0.0),
    ("You are a helpful assistant.", "auto", 1.3),
    ("You are a helpful assistant.", "required", 1.3),
    (SHOWN_MARKS, "auto", 0.0),
    (SHOWN_MARKS, "auto", 1.0),
    (SHOWN_MARKS, "auto", 1.2),
)
"""System prompt, `tool_choice` and temperature of requests with tools."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request whose answer is recorded."""

    form: str
    body: dict[str, Any]


def requests_with_prompts() -> Iterator[Asked]:
    """Yields the requests for a model whose chat template knows tools, in the format of Hermes."""
    for rank, question in enumerate(QUESTIONS):
        for form, told in FORMATS.items():
            for temperature in (0.0, 1.0):
                yield _asked(form, question, temperature, rank, _told(told))
        for system, choice, temperature in WITH_TOOLS:
            yield _asked("hermes", question, temperature, rank, system, tools=tools(), tool_choice=choice)


def requests_forced(form: str) -> Iterator[Asked]:
    """Yields the requests for any model of a server that was started with this format."""
    for rank, question in enumerate(QUESTIONS):
        for temperature in (0.0, 1.0):
            yield _asked(form, question, temperature, rank, "", tools=tools(), tool_choice="required")


def _asked(form: str, question: str, temperature: float, seed: int, system: str, **fields: Any) -> Asked:
    messages = [{"role": "system", "content": system}] if system else []
    body = {"messages": [*messages, {"role": "user", "content": question}], "temperature": temperature, "seed": seed}
    return Asked(form, body | fields)


def tools() -> list[dict[str, Any]]:
    """Returns the tools of all conformance answers in OpenAI's form."""
    empty = {"type": "object", "properties": {}}
    functions = [{"name": name, "parameters": dict(schema or empty)} for name, schema in TOOLS.items()]
    return [{"type": "function", "function": function} for function in functions]


def _told(form: str) -> str:
    functions = "\n".join(json.dumps(tool["function"]) for tool in tools())
    return f"{form}\n\nThe functions are:\n{functions}"


def recorded_lines() -> list[dict[str, Any]]:
    """Returns the lines that are recorded."""
    return [json.loads(line) for line in FILE.read_text().split("\n") if line] if FILE.exists() else []


def recorded(url: str, asked: Sequence[Asked]) -> list[dict[str, Any]]:
    """Returns the lines of the model that is served, without those that another one repeats."""
    with httpx.Client(base_url=url, timeout=600) as http, ThreadPoolExecutor(AT_ONCE) as threads:
        model = http.get("/v1/models").json()["data"][0]["id"]
        outputs = threads.map(lambda each: _output(http, each), asked)
        answers = dict.fromkeys((each.form, *output) for each, output in zip(asked, outputs, strict=True))
    return [
        {"model": model, "format": form, "output": out, "parts": parsed(form, [out], is_cut=is_cut)}
        | ({"cut": True} if is_cut else {})
        for form, out, is_cut in answers
    ]


def _output(http: httpx.Client, asked: Asked) -> tuple[str, bool]:
    """Returns the answer's text with all special tokens but the last one, and whether it was cut."""
    body = asked.body | {"max_tokens": MAX_TOKENS, "return_token_ids": True}
    answer = http.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    choice = answer.json()["choices"][0]
    said = http.post("/detokenize", json={"tokens": choice["token_ids"]})
    text: str = said.raise_for_status().json()["prompt"]
    return text.removesuffix("<|im_end|>"), choice["finish_reason"] == "length"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.conformance.record_outputs", allow_abbrev=False)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="a server of one model")
    parser.add_argument("--forced", metavar="FORMAT", help="the server's --tool-call-parser: calls are required")
    arguments = parser.parse_args()
    asked = requests_forced(arguments.forced) if arguments.forced else requests_with_prompts()
    lines = recorded(arguments.url, list(asked))
    written = {(line["model"], line["format"]) for line in lines}
    kept = [line for line in recorded_lines() if (line["model"], line["format"]) not in written]
    FILE.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in (*kept, *lines)))
    print(f"{len(lines)} answers of {lines[0]['model']}, {len(kept) + len(lines)} in {FILE.name}")


if __name__ == "__main__":
    main()
