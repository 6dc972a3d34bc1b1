"""What completions show of their prompts: `echo`, logprobs of the prompt, and text before a suffix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from router.preparation.prepare import prepare
from router.requests.work import Work
from router.text.infill import FORMS, infill_text
from router.text.tokenizer import ByteText, TokenizerText
from tests.unit.router.conftest import FACTS
from twostroke.base.errors import UnsupportedFeature
from twostroke.request import FinishReason, SampledToken
from twostroke.rpc.v1 import inference_pb2

URL = "/v1/completions"


async def chunks_of(frontend: Any, **body: Any) -> list[dict[str, Any]]:
    answer = await frontend.http.post(URL, json={"stream": True} | body)
    events = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


async def choices_of(frontend: Any, **body: Any) -> list[dict[str, Any]]:
    choices: list[dict[str, Any]] = (await frontend.http.post(URL, json=body)).json()["choices"]
    return choices


async def test_echo_puts_the_prompt_before_the_answer_of_each_choice(frontend: Any) -> None:
    choices = await choices_of(frontend, prompt=["ab€", "cd"], echo=True, n=2)
    assert [choice["text"] for choice in choices] == ["ab€hello", "ab€hello", "cdhello", "cdhello"]
    assert all(choice["logprobs"] is None for choice in choices)
    assert frontend.dispatcher.requests[0].sampling.prompt_logprobs is None, "nothing is scored for it"


async def test_echo_decodes_prompts_that_are_tokens(frontend: Any) -> None:
    (choice,) = await choices_of(frontend, prompt=[97, 98, 299], echo=True, return_token_ids=True)
    assert choice["text"] == "ab<299>hello"
    assert choice["token_ids"] == list(b"hello")


async def test_a_stream_with_echo_begins_with_the_prompt(frontend: Any) -> None:
    chunks = await chunks_of(frontend, prompt="ab", echo=True, stream_options={"include_usage": True})
    texts = [chunk["choices"][0]["text"] for chunk in chunks[:-1]]
    assert texts == ["ab", *"hello", ""]
    assert chunks[-1]["usage"]["completion_tokens"] == 5


async def test_a_stream_that_is_resumed_goes_on_after_what_its_client_has(frontend: Any) -> None:
    """After the prompt, and after each token: with the same texts and offsets as without a cut."""
    body = {"prompt": "ab", "echo": True, "stream": True, "logprobs": 0}
    whole = await frontend.http.post(URL, json=body, headers={"X-Resumable-Stream": "true"})
    events = [event for event in whole.text.split("\n\n") if event.startswith("id: ")]
    assert len(events) == 7
    said = [json.loads(event.partition("\ndata: ")[2])["choices"] for event in events]
    for cut in range(1, len(events)):
        name = events[cut - 1].partition("\n")[0].removeprefix("id: ")
        resumed = await frontend.http.post(URL, json=body, headers={"Last-Event-ID": name})
        rest = [event for event in resumed.text.split("\n\n") if event.startswith("id: ")]
        assert [json.loads(event.partition("\ndata: ")[2])["choices"] for event in rest] == said[cut:]


async def test_logprobs_with_echo_cover_prompt_and_answer(frontend: Any) -> None:
    frontend.dispatcher.script = lambda request, index: [SampledToken(120, -0.5, ((121, -1.0),))]
    (choice,) = await choices_of(frontend, prompt="abc", echo=True, logprobs=1)
    assert choice["text"] == "abcx"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "x"],
        "token_logprobs": [None, -1.0, -2.0, -0.5],
        "top_logprobs": [None, {"c": 0.0, "b": -1.0}, {"d": 0.0, "c": -2.0}, {"y": -1.0, "x": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }
    assert "prompt_logprobs" not in choice


async def test_a_stream_has_the_same_logprobs_piece_by_piece(frontend: Any) -> None:
    frontend.dispatcher.script = lambda request, index: [SampledToken(120 + place, -0.5) for place in range(3)]
    asked = {"prompt": "abc", "echo": True, "logprobs": 1}
    (whole,) = await choices_of(frontend, **asked)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in await chunks_of(frontend, **asked)]
    joined: dict[str, list[Any]] = {}
    for piece in filter(None, pieces):
        for name, values in piece.items():
            joined[name] = joined.get(name, []) + values
    assert joined == whole["logprobs"]


async def test_each_choice_has_the_logprobs_of_its_own_prompt_whole_and_streamed(frontend: Any) -> None:
    asked = {"prompt": ["abc", "de"], "echo": True, "logprobs": 1, "n": 2}
    expected = [["a", "b", "c"], ["a", "b", "c"], ["d", "e"], ["d", "e"]]
    for choice, prompt in zip(await choices_of(frontend, **asked), expected, strict=True):
        assert choice["logprobs"]["tokens"][: -len("hello")] == prompt
    opened: dict[int, list[str]] = {}
    for chunk in await chunks_of(frontend, **asked):
        choice = chunk["choices"][0]
        opened.setdefault(choice["index"], (choice["logprobs"] or {}).get("tokens"))
    assert [opened[index] for index in range(4)] == expected


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
async def test_no_token_is_made_to_be_shown_where_a_prompt_is_only_scored(frontend: Any, name: str) -> None:
    frontend.dispatcher.reason = FinishReason.STOP
    body = {"prompt": "abc", "echo": True, "logprobs": 1, name: 0, "min_tokens": 3}
    answer = (await frontend.http.post(URL, json=body)).json()
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert answer["usage"]["completion_tokens"] == 0
    assert frontend.dispatcher.requests[0].sampling.max_tokens == 1
    first, last = await chunks_of(frontend, **body)
    assert first["choices"][0]["logprobs"] == choice["logprobs"]
    assert (last["choices"][0]["text"], last["choices"][0]["finish_reason"]) == ("", "length")


async def test_a_prompt_of_one_token_has_no_logprob(frontend: Any) -> None:
    (choice,) = await choices_of(frontend, prompt="a", echo=True, logprobs=1, max_tokens=0)
    assert choice["logprobs"]["token_logprobs"] == [None]


async def test_prompt_logprobs_are_by_token_id_as_in_vllm(frontend: Any) -> None:
    (choice,) = await choices_of(frontend, prompt="ab", prompt_logprobs=2)
    assert choice["text"] == "hello"
    assert choice["prompt_logprobs"] == [
        None,
        {
            "98": {"logprob": -1.0, "rank": 1, "decoded_token": "b"},
            "99": {"logprob": 0.0, "rank": 1, "decoded_token": "c"},
            "100": {"logprob": -1.0, "rank": 2, "decoded_token": "d"},
        },
    ]


async def test_more_of_the_prompt_than_of_the_answer_is_shown_where_it_is_asked_for(frontend: Any) -> None:
    (choice,) = await choices_of(frontend, prompt="ab", echo=True, logprobs=1, prompt_logprobs=3)
    assert len(choice["prompt_logprobs"][1]) == 4
    assert choice["logprobs"]["top_logprobs"][1] == {"c": 0.0, "b": -1.0}
    assert frontend.dispatcher.requests[0].sampling.prompt_logprobs == 3


async def test_a_chat_has_prompt_logprobs_beside_its_choices(frontend: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt_logprobs": 0}
    answer = (await frontend.http.post("/v1/chat/completions", json=body)).json()
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_logprobs"][0] is None
    assert all(len(entry) == 1 for entry in answer["prompt_logprobs"][1:])


def vocabulary(folder: Path, *tokens: str) -> TokenizerText:
    ids = {token: 3 + rank for rank, token in enumerate(tokens)}
    tokenizer = Tokenizer(WordLevel({"?": 0, "a": 1, "b": 2, **ids}, "?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens([AddedToken(token) for token in tokens])
    tokenizer.save(str(folder / "tokenizer.json"))
    return TokenizerText(folder)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.tokens[0])
def test_text_before_a_suffix_is_asked_for_in_the_models_own_form(tmp_path: Path, form: Any) -> None:
    asked = infill_text(vocabulary(tmp_path, *form.tokens), "{suffix}", "after")
    assert asked == form.template.replace("{suffix}", "after").replace("{prefix}", "{suffix}")


def test_a_suffix_becomes_tokens_of_the_prompt(tmp_path: Path) -> None:
    text = vocabulary(tmp_path, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    for prompt, expected in (("a", [3, 1, 4, 2, 5]), ("", [3, 4, 2, 5])):
        body = {"prompt": prompt, "suffix": "b", "echo": True}
        request = prepare(Work(URL, json.dumps(body).encode(), "toy", FACTS), text).value
        assert list(request.prompts[0].ids) == expected
        assert request.prompts[0].text == prompt


def test_a_suffix_over_grpc_becomes_tokens_of_the_prompt_and_ends_where_the_form_does(tmp_path: Path) -> None:
    text = vocabulary(tmp_path, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
    for ignore_eos, ends in ((False, {1, 3, 4, 5}), (True, {1})):
        stop = inference_pb2.StopOptions(stop_token_ids=[1], ignore_eos=ignore_eos)
        asked = inference_pb2.GenerateRequest(text="a", suffix="b", stop=stop, skip_special_tokens=False)
        body = prepare(Work("grpc_generate", asked.SerializeToString(), "toy", FACTS), text).value
        (prompt,), options = body.token_prompts, body.options
        assert list(prompt.ids) == [3, 1, 4, 2, 5]
        assert set(options.stop_token_ids) == ends
        assert options.skip_special_tokens is False


def test_a_middle_ends_at_the_models_own_tokens_for_it_unless_nothing_is_to_end_it(tmp_path: Path) -> None:
    text = vocabulary(tmp_path, "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>", "<|im_end|>")
    for fields, expected in (
        ({"suffix": "b"}, {3, 4, 5, 6}),
        ({"suffix": "b", "stop_token_ids": [1, 3]}, {1, 3, 4, 5, 6}),
        ({"suffix": "b", "stop_token_ids": [1], "ignore_eos": True}, {1}),
        ({"suffix": ""}, set()),
    ):
        work = Work(URL, json.dumps({"prompt": "a", **fields}).encode(), "toy", FACTS)
        ends = prepare(work, text).value.options.stop_token_ids
        assert set(ends) == expected
        assert len(ends) == len(expected)


def test_a_model_without_such_tokens_refuses_a_suffix_by_name() -> None:
    body = {"prompt": "a", "suffix": "b"}
    error = prepare(Work(URL, json.dumps(body).encode(), "toy", FACTS), ByteText()).error
    assert isinstance(error, UnsupportedFeature)
    assert error.field == "suffix"
    assert "filling in the middle" in error.message
