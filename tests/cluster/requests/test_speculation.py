"""Drafted tokens change no bit of any answer: whoever proposes, switched at each step, on workers that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster.processes import Client, ProcessCluster
from tests.cluster.requests.speculation_matrix import (
    AT_ONCE,
    AUTO,
    EACH,
    OFF,
    SWITCHED,
    Answers,
    Asking,
    Matrix,
    Outcome,
    Speculated,
    outcome_of,
    speculating,
)
from tests.cluster.requests.test_exact_resume import MODES, ask_all
from tests.cluster.requests.test_grammars import GRAMMARS, HOW
from tests.draft_models import save_first_layers
from twostroke.config import DEFAULT_MODEL, DRAFT_MODEL, DRAFTER_NAMES, ModelConfig
from twostroke.config.schedule import GRAMMAR_DRAFTER
from twostroke.models.catalog.fetch import fetch

STRUCTURED: dict[str, dict[str, object]] = {
    f"{grammar}, logprobs, {how}": HOW[how] | {"structured_output": output, "max_tokens": 160, "logprobs": 3}
    for grammar, output in GRAMMARS.items()
    for how in ("greedy", "drawn")
}
"""Grammars force many of these tokens, and each has its logprobs."""
CHEAP_LAYERS = 2
"""Layers of a draft model that is nearly always wrong, and so cheap that it draws where that does not matter."""
LOOP = {"max_tokens": 96, "ignore_eos": True, "temperature": 0}
"""A small model that goes on greedily soon repeats itself."""
EVERY_MODE = MODES | STRUCTURED | {"loop": LOOP, "loop with penalties": LOOP | {"frequency_penalty": 0.01}}
IN_GATE = (
    "greedy",
    "truncated",
    "penalised",
    "logprobs of draws",
    "choices",
    "not before",
    "some tokens alone",
)
SHORT = 28
SOME_MODES = {name: EVERY_MODE[name] | {"max_tokens": SHORT} for name in IN_GATE} | {
    "loop": LOOP | {"max_tokens": 64},
    "schema": STRUCTURED["schema, logprobs, drawn"],
}
"""One of each way of sampling, with short answers."""


def whole_model(dtype: str) -> Path:
    return fetch(DEFAULT_MODEL, dtype, lambda stage, part: None)


async def ask_every_mode(cluster: ProcessCluster, client: Client) -> Answers:
    return await ask_all(client, EVERY_MODE)


async def ask_some_modes(cluster: ProcessCluster, client: Client) -> Answers:
    return await ask_all(client, SOME_MODES)


async def compare(
    settings: tuple[Speculated, ...],
    directory: Path,
    model: ModelConfig,
    folder: Path,
    asking: Asking,
    kv_format: str | None = None,
) -> None:
    """Asks the same in each setting, one after the other: every answer is what it is in the first, which is off.

    Answers without drafts outlive a worker in `test_exact_resume.py`.
    """
    cheaper = save_first_layers(directory, folder / "cheaper", CHEAP_LAYERS)
    needs_better = any(setting.has_draft_model and setting is not SWITCHED for setting in settings)
    better = save_first_layers(directory, folder / "better") if needs_better else cheaper
    expected: Answers = {}
    for setting in settings:
        draft_model = cheaper if setting is SWITCHED else better
        async with speculating(setting, model, directory, draft_model, kv_format) as cluster:
            outcome = await outcome_of(cluster, asking, kills=setting is not OFF)
        print(f"{model.dtype} {setting.name}: {outcome}", flush=True)
        expected = expected or outcome.first
        for answers in (outcome.first, outcome.again):
            assert {key for key in expected if answers[key] != expected[key]} == set(), setting.name
        check_drafts(setting, outcome)


def check_drafts(setting: Speculated, outcome: Outcome) -> None:
    """Drafts were made where they may be, and only there."""
    drafted, kept = outcome.drafted.total(), outcome.kept.total()
    if setting.name == GRAMMAR_DRAFTER:
        assert drafted == kept > 0
    else:
        assert (drafted > kept > 0) == (setting is not OFF), setting.name
    if setting is SWITCHED:
        assert {*DRAFTER_NAMES} - {DRAFT_MODEL} <= {*outcome.drafted}, "others than the draft model have no price there"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("kv_format", "settings", "asking"),
    [
        (None, (OFF, SWITCHED), ask_some_modes),
        *(
            pytest.param(form, (OFF, AUTO, SWITCHED, *EACH), ask_every_mode, marks=pytest.mark.slow)
            for form in (None, "int4")
        ),
    ],
)
async def test_speculation_changes_no_bit_of_any_answer(
    tmp_path: Path,
    short_model_dir: Path,
    kv_format: str | None,
    settings: tuple[Speculated, ...],
    asking: Asking,
) -> None:
    directory = short_model_dir if asking is ask_some_modes else whole_model("bfloat16")
    model = ModelConfig(model=str(directory), dtype="bfloat16")
    await compare(settings, directory, model, tmp_path, asking, kv_format)


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_thirty_two_prompts_in_seven_ways_are_answered_alike_whoever_proposes(tmp_path: Path, dtype: str) -> None:
    """float32 with --deterministic; bfloat16 as it is, since the native kernels keep it."""
    model, directory = ModelConfig(dtype=dtype, deterministic=dtype == "float32"), whole_model(dtype)
    matrix = Matrix(directory, AT_ONCE[dtype])
    await compare((OFF, SWITCHED, AUTO, *EACH), directory, model, tmp_path, matrix)
