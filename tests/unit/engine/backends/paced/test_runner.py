"""The paced runner: its pages matter as a real model's do, and a wrong SPEC names the wrong key."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator

import numpy as np
import pytest

from tests.unit.engine.batches import Stream, generate, step
from twostroke.base.errors import ConfigError
from twostroke.base.ids import PageId
from twostroke.engine.adapters.paced import PacedAdapters
from twostroke.engine.backends.paced.runner import PacedRunner, PacedSpec
from twostroke.kv_cache.layout import PageRegion
from twostroke.kv_cache.memory import PageMemory
from twostroke.request import SamplingParams

BLOCK = 4
FAST = PacedSpec(prefill_tokens_per_s=1e9, step_ms=0, step_us_per_seq=0)
PROMPT = [7, 3, 9, 200, 4, 4, 1, 0, 55, 21, 8]


@pytest.fixture
def memory() -> Iterator[PageMemory]:
    memory = PageMemory(32, FAST.page_bytes_for(BLOCK))
    yield memory
    memory.close()


@pytest.fixture
def runner(memory: PageMemory) -> Iterator[PacedRunner]:
    runner = PacedRunner(FAST, memory, block_size=BLOCK)
    yield runner
    runner.close()


def answer(runner: PacedRunner, stream: Stream, count: int = 12, chunk: int = 100) -> list[int]:
    return generate(runner, stream, count, chunk, BLOCK)


def test_chunks_and_pages_do_not_change_the_tokens(runner: PacedRunner) -> None:
    expected = answer(runner, Stream(PROMPT.copy(), list(range(8))))
    assert answer(runner, Stream(PROMPT.copy(), list(range(20, 12, -1))), chunk=3) == expected
    assert len(set(expected)) > 3


def test_a_moved_stream_goes_on_as_if_nothing_had_happened(runner: PacedRunner, memory: PageMemory) -> None:
    expected = answer(runner, Stream(PROMPT.copy(), list(range(8))))
    for source in range(3):
        memory.page(PageId(20 + source))[:] = memory.page(PageId(source))
    known = PROMPT + expected[:5]
    moved = Stream(known, [20, 21, 22, 23, 24, 25, 26], computed=12)
    assert answer(runner, moved, 7) == expected[5:]


@pytest.mark.parametrize("page", [0, 1, 2])
def test_any_wrong_page_changes_the_tokens(runner: PacedRunner, memory: PageMemory, page: int) -> None:
    expected = answer(runner, Stream(PROMPT.copy(), list(range(8))))
    memory.page(PageId(page))[:] = np.random.default_rng(1).integers(0, 256, memory.page_bytes, np.uint8)
    again = Stream(PROMPT + expected[:2], list(range(8)), computed=12)
    assert answer(runner, again, 6) != expected[2:8]


def test_swapped_pages_change_the_tokens(runner: PacedRunner) -> None:
    expected = answer(runner, Stream(PROMPT.copy(), list(range(8))))
    swapped = Stream(PROMPT + expected[:2], [1, 0, *range(2, 8)], computed=12)
    assert answer(runner, swapped, 6) != expected[2:8]


def test_different_prompts_get_different_answers(runner: PacedRunner) -> None:
    swapped = [PROMPT[1], PROMPT[0], *PROMPT[2:]]
    answers = {tuple(answer(runner, Stream(prompt.copy(), list(range(8))))) for prompt in (PROMPT, swapped, PROMPT[1:])}
    assert len(answers) == 3


def test_seed_and_choice_matter_only_where_a_draw_is_random(runner: PacedRunner) -> None:
    def tokens(**params: float) -> tuple[int, ...]:
        sampling = SamplingParams(**{"seed": 1, "max_tokens": 9, **params})  # type: ignore[arg-type]  # of the test's own keys
        return tuple(answer(runner, Stream(PROMPT.copy(), list(range(8)), params=sampling)))

    assert tokens(temperature=0, seed=5) == tokens(temperature=0)
    assert len({tokens(), tokens(seed=5), tokens(choice=1), tokens(temperature=0)}) == 4


def test_sequences_in_one_step_get_what_they_get_alone(runner: PacedRunner) -> None:
    prompts = [[1, 2, 3], [9, 8, 7, 6, 5]]
    alone = [answer(runner, Stream(prompt.copy(), [0, 1]), 1) for prompt in prompts]
    batch = step([(Stream(prompts[0], [2, 3]), 3), (Stream(prompts[1], [4, 5]), 5)], BLOCK)
    assert [[sampled.token] for sampled in runner.run(batch).tokens] == alone


def test_eos_is_drawn_now_and_then_unless_it_is_banned(memory: PageMemory) -> None:
    spec = PacedSpec(prefill_tokens_per_s=1e9, step_ms=0, step_us_per_seq=0, eos=2)
    runner = PacedRunner(spec, memory, block_size=BLOCK)
    tokens = [answer(runner, Stream([number], [0, 1]), 1)[0] for number in range(250)]
    assert 0 < tokens.count(2) < 25
    assert spec.eos_token_ids == (2,)
    assert FAST.eos_token_ids == ()
    runner.close()


def test_a_step_takes_at_least_the_time_that_the_spec_says(memory: PageMemory) -> None:
    spec = PacedSpec(prefill_tokens_per_s=1000, step_ms=20, step_us_per_seq=5000)
    runner = PacedRunner(spec, memory, block_size=BLOCK)
    started_s = time.perf_counter()
    result = runner.run(step([(Stream(PROMPT.copy(), [0, 1, 2]), 11)], BLOCK))
    assert result.seconds >= 0.035
    assert time.perf_counter() - started_s >= 0.035
    runner.close()


def test_prompt_steps_and_pairs_cost_what_the_spec_says(memory: PageMemory) -> None:
    spec = PacedSpec(prefill_tokens_per_s=1000, prefill_step_ms=5, prefill_us_per_1k_pairs=200_000)
    runner = PacedRunner(spec, memory, block_size=BLOCK)
    chunk = Stream([1] * 17, list(range(5)), computed=8)
    assert runner.run(step([(chunk, 8)], BLOCK)).seconds >= 0.005 + 0.008 + 8 * (8 + 4) * 200e-6
    assert spec.cost.of_prompt(16, 0, 8) == pytest.approx(2 * 0.005 + 0.016 + 16 * 8 * 200e-6)
    assert PacedSpec(prefill_tokens_per_s=1000).cost.of_prompt(8, 1000, 8) == pytest.approx(0.008)
    runner.close()


def test_every_key_of_a_spec_can_be_given() -> None:
    text = (
        "prefill_tokens_per_s=5e3,prefill_step_ms=3,prefill_us_per_1k_pairs=0.5, step_ms=2.5,step_us_per_seq=1,"
        "page_bytes=4096,vocab=1000,max_model_len=99,eos=7"
    )
    assert PacedSpec.parse(text) == PacedSpec(
        prefill_tokens_per_s=5000,
        prefill_step_ms=3,
        prefill_us_per_1k_pairs=0.5,
        step_ms=2.5,
        step_us_per_seq=1,
        page_bytes=4096,
        vocab=1000,
        max_model_len=99,
        eos=7,
    )
    assert PacedSpec.parse("") == PacedSpec()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("speed=3", "speed"),
        ("step_ms", "step_ms"),
        ("step_ms=fast", "step_ms"),
        ("step_ms=-1", "step_ms"),
        ("step_ms=nan", "step_ms"),
        ("vocab=1", "vocab"),
        ("vocab=1.5", "vocab"),
        ("eos=32000", "eos"),
        ("prefill_tokens_per_s=0", "prefill_tokens_per_s"),
        ("prefill_step_ms=-1", "prefill_step_ms"),
        ("prefill_us_per_1k_pairs=nan", "prefill_us_per_1k_pairs"),
        ("prefill_tokens_per_s=inf", "prefill_tokens_per_s"),
        ("max_model_len=0", "max_model_len"),
        ("step_ms=1,step_ms=2", "step_ms"),
    ],
)
def test_a_wrong_spec_names_the_key(text: str, key: str) -> None:
    with pytest.raises(ConfigError, match=key) as error:
        PacedSpec.parse(text)
    assert error.value.field == key


def test_pages_too_small_for_their_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="page_bytes must be at least 128"):
        PacedSpec(page_bytes=127).page_bytes_for(16)


@pytest.mark.parametrize("slot", range(BLOCK))
def test_over_an_answer_every_bit_of_a_page_counts(runner: PacedRunner, memory: PageMemory, slot: int) -> None:
    expected = answer(runner, Stream(PROMPT.copy(), list(range(8))))
    memory.data[1, slot * 8 + 3] ^= 1
    again = Stream(PROMPT + expected[:2], list(range(8)), computed=12)
    assert answer(runner, again, 10) != expected[2:12]


WINDOWED = PacedSpec(prefill_tokens_per_s=1e9, step_ms=0, step_us_per_seq=0, window=9)


@pytest.fixture
def windowed() -> Iterator[tuple[PageMemory, PacedRunner]]:
    memory = PageMemory(32, WINDOWED.page_bytes_for(BLOCK), PageRegion(16, 64))
    runner = PacedRunner(WINDOWED, memory, block_size=BLOCK)
    yield memory, runner
    runner.close()
    memory.close()


def test_with_a_window_chunks_and_pages_that_it_has_left_do_not_change_the_tokens(
    windowed: tuple[PageMemory, PacedRunner],
) -> None:
    memory, runner = windowed
    expected = answer(runner, Stream(PROMPT.copy(), list(range(8)), window_rows=list(range(8))))
    chunked = Stream(PROMPT.copy(), list(range(20, 12, -1)), window_rows=[9, 3, 5, 4, 15, 8, 7, 6])
    assert answer(runner, chunked, chunk=3) == expected
    known, left = PROMPT + expected[:7], (len(PROMPT) + 7 - 1 - 9) // BLOCK
    for row in range(left):
        memory.regions[1][row] = 0xAB
    rows = [*[0] * left, *range(left, 8)]
    answer(runner, Stream(known[:-1], list(range(8)), window_rows=list(range(8))), 1)
    again = Stream(known, list(range(8)), computed=len(known) - 1, window_rows=rows)
    assert answer(runner, again, 5) == expected[7:]


@pytest.mark.parametrize("block", [1, 2])
def test_a_wrong_page_that_the_window_shows_changes_the_tokens(
    windowed: tuple[PageMemory, PacedRunner], block: int
) -> None:
    memory, runner = windowed
    rows = list(range(8))
    expected = answer(runner, Stream(PROMPT.copy(), list(range(8)), window_rows=rows))
    memory.page(PageId(32 + block))[:] = 0x5A
    again = Stream(PROMPT + expected[:2], list(range(8)), computed=12, window_rows=rows)
    assert answer(runner, again, 8) != expected[2:10]


@pytest.mark.parametrize(
    ("spec", "error"),
    [
        ("window=0", "window must be at least 1, got 0"),
        ("window_page_bytes=512", "window_page_bytes must be left out without window, got 512"),
    ],
)
def test_windows_that_are_none_are_refused(spec: str, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        PacedSpec.parse(spec)


def test_pages_of_a_window_are_as_large_as_others_unless_they_are_told_their_size() -> None:
    assert PacedSpec.parse("window=9,page_bytes=300").page_sizes_for(16) == (300, 300)
    assert PacedSpec.parse("window=9,page_bytes=300,window_page_bytes=128").page_sizes_for(16) == (300, 128)
    with pytest.raises(ConfigError, match="window_page_bytes must be at least 128 for blocks of 16, got 127"):
        PacedSpec.parse("window=9,window_page_bytes=127").page_sizes_for(16)
    assert [group.name for group in WINDOWED.page_groups] == ["full", "window"]


def test_a_row_without_an_adapter_has_its_tokens_beside_rows_with_one(runner: PacedRunner, memory: PageMemory) -> None:
    expected = answer(runner, Stream(PROMPT.copy(), list(range(8))), 1)
    adapters = PacedAdapters()
    adapters.put(b"digest", 12345)
    runner = PacedRunner(FAST, memory, block_size=BLOCK, extra=adapters)
    rows = [Stream(PROMPT.copy(), list(range(first, first + 8))) for first in (8, 16)]
    batch = step([(row, len(PROMPT)) for row in rows], BLOCK)
    base, adapted = runner.run(dataclasses.replace(batch, weights=(None, b"digest"))).tokens
    assert [base.token] == expected
    alone = Stream(PROMPT.copy(), list(range(24, 32)))
    again = runner.run(dataclasses.replace(step([(alone, len(PROMPT))], BLOCK), weights=(b"digest",))).tokens[0]
    assert again.token == adapted.token != base.token
