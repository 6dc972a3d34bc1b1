"""`tests.trials.bench forms`: what is compared, whole runs over a tiny model, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.trials.bench.forms import run
from tests.trials.bench.forms.answers import (
    ANSWER_TOKENS,
    PlantedText,
    Question,
    continued,
    planted,
    retrieved,
    shared_tokens,
)
from tests.trials.bench.forms.form_model import BLOCK, FormModel, LocalModel, Span, local_model
from tests.trials.bench.forms.options import options_from
from tests.trials.bench.forms.quality import compare
from twostroke.base.errors import ConfigError
from twostroke.config import ModelConfig
from twostroke.config.cache import KV_FORMATS
from twostroke.kernels.pools.page_pool import BYTES

WORDS = 64
TINY = LlamaConfig(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=WORDS,
    max_position_embeddings=2048,
    eos_token_id=2,
)


class Predicts:
    """A model that says the same at every position."""

    def __init__(self, *logits: float) -> None:
        self._row = torch.tensor(logits).log_softmax(0)

    def log_probabilities(self, tokens: torch.Tensor) -> Any:
        for start in range(0, len(tokens), 256):
            yield self._row.expand(min(256, len(tokens) - start), -1)


def test_every_position_but_the_last_counts_once_and_distance_is_from_the_exact_model() -> None:
    window = torch.zeros(300, dtype=torch.int64)
    other: Any = Predicts(0.0, 1.0)
    exact: Any = Predicts(2.0, 0.0)
    found = compare(exact, {"equal": exact, "other": other}, [window, window])
    sure = float(torch.tensor([2.0, 0.0]).log_softmax(0)[0])
    assert found[""] == pytest.approx([-sure, 0.0, 1.0])
    assert found["equal"] == pytest.approx(found[""])
    assert found["other"][0] == pytest.approx(-float(torch.tensor([0.0, 1.0]).log_softmax(0)[0]))
    assert found["other"][1] > 0.5
    assert found["other"][2] == 0.0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights whose words are w0 to w63; any other word is w0."""
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(TINY).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def local(tiny: Path) -> Iterator[LocalModel]:
    with local_model(ModelConfig(model=str(tiny), device="cpu"), threads=2) as model:
        yield model


def test_shared_tokens_are_those_before_the_first_one_that_differs() -> None:
    exact = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    assert shared_tokens(exact, torch.tensor([[1, 2, 3], [1, 0, 3], [0, 2, 3]])) == (3, 1, 0)


def test_facts_lie_evenly_in_a_text_of_whole_blocks_and_fit_with_question_and_answer(local: LocalModel) -> None:
    filler = torch.arange(1, WORDS).repeat(2)
    text = planted(local, filler, facts=3, context=300, seed=0)
    assert len(text.tokens) % BLOCK == 0
    longest = max(len(question.tokens) for question in text.questions)
    assert 300 - BLOCK < len(text.tokens) + longest + ANSWER_TOKENS <= 300
    fact = len(local.encode("The secret number of Oslo is 48213."))
    unknown = (text.tokens == 0).nonzero().flatten()
    room = len(text.tokens) - 3 * fact
    assert len(unknown) == 3 * fact
    assert unknown[::fact].tolist() == [round(room * (n + 0.5) / 3) + n * fact for n in range(3)]
    assert text.tokens[text.tokens > 0].tolist() == (filler.tolist() * 3)[:room]
    assert len({question.value for question in text.questions}) == 3
    assert [q.value for q in planted(local, filler, 3, 300, seed=1).questions] != [q.value for q in text.questions]
    with pytest.raises(ConfigError, match="3 facts and a question do not fit"):
        planted(local, filler, facts=3, context=40, seed=0)


def test_an_answer_counts_if_it_holds_the_value_of_its_own_question(local: LocalModel) -> None:
    answers = torch.tensor([[1, 2], [3, 4], [5, 6]])

    class Answers:
        def store(self, tokens: torch.Tensor) -> None: ...

        def greedy(self, spans: list[Span], tokens: int) -> torch.Tensor:
            return answers

    model: Any = Answers()
    questions = tuple(Question(torch.tensor([1]), value) for value in ("w1 w2", "w1", "w6"))
    assert retrieved(model, PlantedText(torch.zeros(32).long(), questions), local) == (True, False, True)


@pytest.mark.parametrize("form", KV_FORMATS)
def test_questions_after_shared_pages_are_answered_as_after_pages_of_their_own(local: LocalModel, form: str) -> None:
    text = torch.arange(320) * 7 % WORDS
    questions = [torch.tensor([5, 9, 1]), torch.tensor([8] * 20)]
    alone = continued(FormModel(local, form, 1024), [torch.cat([text, question]) for question in questions], 12)
    found: list[torch.Tensor] = []

    class Watched(FormModel):
        def greedy(self, spans: Sequence[Span], tokens: int) -> torch.Tensor:
            found.append(super().greedy(spans, tokens))
            return found[-1]

    asked = PlantedText(text, tuple(Question(question, "") for question in questions))
    retrieved(Watched(local, form, asked.pool_tokens), asked, local)
    assert found[0].tolist() == alone.tolist()


def test_every_form_of_every_model_is_compared_over_the_same_text(arguments: Any, tiny: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text(" ".join(f"w{i * i % WORDS}" for i in range(700)))
    twin = tmp_path / "twin"
    twin.symlink_to(tiny)
    out = tmp_path / "forms.json"
    flags = ["--model", str(tiny), "--model", str(twin), "--text", str(text), "--windows", "2", "--window-tokens"]
    flags += ["300", "--prompts", "3", "--prompt-tokens", "100", "--continued-tokens", "20", "--facts", "2"]
    assert run(arguments("forms", *flags, "--context", "4000", "--json", str(out))) == 0
    found, same = json.loads(out.read_text())["models"]
    assert found["results"] == same["results"]
    assert found["context_tokens"] == TINY.max_position_embeddings, "at most what the model was made for"
    exact, *others = found["results"]
    assert exact["form"] == "bfloat16"
    assert exact["shared_tokens"] == [20, 20, 20]
    small = (*BYTES, "int4")
    mixed = {f"{form} from bfloat16" for form in small}
    assert {each["form"] for each in others} == (set(KV_FORMATS) - {"bfloat16"}) | mixed
    for form in small:
        pure, converted = (next(e for e in others if e["form"] == name) for name in (form, f"{form} from bfloat16"))
        assert pure["page_bytes"] == converted["page_bytes"]
        assert pure["mean_kl"] != converted["mean_kl"], "earlier chunks were computed in another form"
        assert len(pure["shared_tokens"]) == 3
        assert len(pure["retrieved"]) == 2
        assert converted["shared_tokens"] is converted["retrieved"] is None
    for each in others:
        assert 0.95 < each["perplexity"] / exact["perplexity"] < 1.05
        assert 0 <= each["mean_kl"] < 1e-2
    with pytest.raises(ConfigError, match=r"--text has 700 tokens, 3 windows of 300 need 900"):
        run(arguments("forms", *flags, "--windows", "3"))


def test_only_the_parts_that_are_asked_for_are_measured(arguments: Any, tiny: Path, tmp_path: Path) -> None:
    out = tmp_path / "forms.json"
    flags = ("--model", str(tiny), "--forms", "int8", "--only", "facts", "--context", "200", "--facts", "1")
    assert run(arguments("forms", *flags, "--json", str(out))) == 0
    exact, other = json.loads(out.read_text())["models"][0]["results"]
    assert other["form"] == "int8"
    assert exact["perplexity"] is other["perplexity"] is other["shared_tokens"] is None
    assert len(other["retrieved"]) == 1


@pytest.mark.parametrize(
    ("flags", "field"),
    [
        (["--forms", "int3"], "forms"),
        (["--forms", "int4+1xint3"], "forms"),
        (["--forms", ""], "forms"),
        (["--model", "paced:"], "model"),
        (["--text", "/no/such/text"], "text"),
        (["--only", "taste"], "only"),
        (["--windows", "0"], "windows"),
        (["--prompts", "0"], "prompts"),
        (["--facts", "25"], "facts"),
        (["--context", "-1"], "context"),
        (["--threads", "0"], "threads"),
        (["--window-tokens", "1"], "window"),
        (["--json", "/no/such/directory/forms.json"], "json"),
    ],
)
def test_a_wrong_flag_is_refused_by_name(arguments: Any, flags: list[str], field: str) -> None:
    with pytest.raises(ConfigError, match=f"--{field}") as caught:
        options_from(arguments("forms", *flags))
    assert caught.value.field is not None
    assert caught.value.field.removeprefix("--") == field
