"""A real model that answers within grammars: every answer matches, also where its decode worker is killed."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from pathlib import Path

import jsonschema

from tests.cluster.processes import Client, running_cluster
from tests.cluster.requests.deaths import asked_until, kill_the_busiest, undrafted
from tests.cluster.requests.test_exact_resume import Answers, ask
from tests.metrics_page import total
from twostroke.config import CacheConfig, ModelConfig, ScheduleConfig
from twostroke.rpc.v1.inference_pb2 import Choices, StructuredOutput

PROMPT = [504, 3575, 282, 4649, 314, 260, 2240, 282, 1005, 29, 1398, 253, 1343, 327, 354, 28, 284, 1449, 30]
"""Nineteen tokens of ordinary text: one full block and a tail."""
SCHEMA = {
    "type": "object",
    "properties": {
        "temperature_in_degrees": {"type": "integer", "minimum": -40, "maximum": 120},
        "name_of_the_place": {"type": "string", "maxLength": 30},
        "kind_of_weather_there": {"enum": ["thunderstorms with hail", "thunderstorms with rain", "fog"]},
        "measured_at": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 24}, "maxItems": 3},
    },
    "required": ["temperature_in_degrees", "name_of_the_place", "kind_of_weather_there", "measured_at"],
    "additionalProperties": False,
}
PATTERN = r"The date is (19|20)[0-9]{2}-(0[1-9]|1[0-2])-[0-3][0-9], at [0-2][0-9]:[0-5][0-9] o'clock sharp\."
STRINGS = ["certainly, with great pleasure and without delay", "certainly not, and never again", "perhaps tomorrow"]

OF_SCHEMA = StructuredOutput(json_schema=json.dumps(SCHEMA), no_whitespace=True)
GRAMMARS = {
    "schema": OF_SCHEMA,
    "regex": StructuredOutput(regex=PATTERN),
    "choice": StructuredOutput(choice=Choices(strings=STRINGS)),
}
HOW: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "drawn": {"temperature": 1.0, "seed": 21},
    "truncated": {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "seed": 22, "ignore_eos": True},
    "penalised": {"temperature": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.4, "seed": 23},
    "two choices": {"temperature": 1.0, "n": 2, "seed": 24},
}
MODES: dict[str, dict[str, object]] = {
    f"{grammar}, {how}": options | {"structured_output": output, "max_tokens": 160}
    for grammar, output in GRAMMARS.items()
    for how, options in HOW.items()
}


DECODE = 3
"""Decode workers, of which two are killed."""


def check(mode: str, text: str) -> None:
    """The text matches the mode's grammar."""
    match mode.partition(",")[0]:
        case "schema":
            jsonschema.validate(json.loads(text), SCHEMA)
        case "regex":
            assert re.fullmatch(PATTERN, text), text
        case "choice":
            assert text in STRINGS


async def ask_all(client: Client, modes: Mapping[str, Mapping[str, object]]) -> Answers:
    answers = await asyncio.gather(*(ask(client, options, PROMPT) for options in modes.values()))
    return dict(zip(modes, answers, strict=True))


async def test_answers_of_a_real_model_match_their_grammars_whoever_decodes_them(short_model_dir: Path) -> None:
    """Whole, token by token where logprobs are asked for, preempted, and resumed elsewhere: the same tokens."""
    async with running_cluster(
        prefill=1,
        decode=DECODE,
        model=ModelConfig(model=str(short_model_dir), dtype="bfloat16"),
        model_dir=short_model_dir,
        cache=CacheConfig(kv_cache_memory_bytes=3 << 20),
        schedule=ScheduleConfig(max_num_seqs=32),
    ) as cluster:
        client = Client(cluster.grpc)
        expected = await ask_all(client, MODES)
        for mode, choices in expected.items():
            for said in choices.values():
                check(mode, said.text)
                assert said.finish == "stop"
        workers = [f"decode-{index}" for index in range(DECODE)]
        forced = sum(cluster.metric(worker, "twostroke_grammar_forced_tokens_total") for worker in workers)
        tokens = sum(cluster.metric(worker, "twostroke_grammar_tokens_total") for worker in workers)
        assert 0.1 * tokens < forced < tokens

        singly = {mode: options | {"logprobs": 1} for mode, options in MODES.items() if "two" not in mode}
        for mode, choices in (await ask_all(client, singly)).items():
            assert choices[0].tokens == expected[mode][0].tokens, mode
            assert (choices[0].text, choices[0].finish) == (expected[mode][0].text, "stop")

        are_killed = asyncio.Event()
        asked = asyncio.ensure_future(asked_until(are_killed, lambda: ask_all(client, undrafted(MODES))))
        living = {*workers}
        while len(living) > 1:
            await kill_the_busiest(cluster, living, 15, asked)
        are_killed.set()
        rounds = await asked
        await client.close()
        assert total(cluster.http, "twostroke_reopened_requests_total") > 0
        for answers in rounds:
            assert {mode for mode in MODES if answers[mode] != expected[mode]} == set()
