"""Which of a model's chat templates a chat is rendered with: the choice is that of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from router.text.chat_template import ChatTemplates, load_templates
from router.text.prompts import ChatPrompt
from tests.unit.router.text.test_tokenizer import write_tokenizer
from twostroke.base.errors import ConfigError, InvalidRequest, UnsupportedFeature
from twostroke.models.catalog.places import TEMPLATES

MESSAGES = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
NAMED = {"default": "plain", "tool_use": "tools {{ tools | length }}", "rag": "rag"}


def in_config(directory: Path, templates: Any) -> None:
    write_tokenizer(directory, {"chat_template": templates})


def in_files(directory: Path, templates: dict[str, str]) -> None:
    write_tokenizer(directory, {"chat_template": "overridden"})
    for name, template in templates.items():
        (directory / TEMPLATES).mkdir(exist_ok=True)
        file = directory / "chat_template.jinja" if name == "default" else directory / TEMPLATES / f"{name}.jinja"
        file.write_text(template)


def loaded(directory: Path) -> ChatTemplates:
    templates = load_templates(directory)
    assert templates is not None
    return templates


def chat(*tools: dict[str, Any], template: str = "") -> ChatPrompt:
    return ChatPrompt(messages=tuple(MESSAGES), tools=tools, template=template)


@pytest.mark.parametrize("kind", ["list", "object", "files"])
def test_with_tools_the_template_for_tools_is_rendered_as_by_transformers(tmp_path: Path, kind: str) -> None:
    if kind == "files":
        in_files(tmp_path, NAMED)
    else:
        entries = [{"name": name, "template": template} for name, template in NAMED.items()]
        in_config(tmp_path, entries if kind == "list" else NAMED)
    ours, theirs = loaded(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for tools in ([], [TOOL], [TOOL, TOOL]):
        rendered = theirs.apply_chat_template(MESSAGES, tools=tools or None, tokenize=False)
        assert ours.render(chat(*tools)) == rendered
    assert ours.render(chat(TOOL)) == "tools 1"
    for name in NAMED:
        assert ours.render(chat(TOOL, template=name)) == theirs.apply_chat_template(
            MESSAGES, tools=[TOOL], chat_template=name, tokenize=False
        )


def test_a_name_that_the_model_has_no_template_of_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    in_config(tmp_path, NAMED)
    for named in ("other", "{{ messages }}"):
        with pytest.raises(UnsupportedFeature, match="default, rag, tool_use") as refusal:
            loaded(tmp_path).render(chat(template=named))
        assert refusal.value.field == "chat_template"


def test_one_template_alone_is_the_default_and_several_without_one_ask_for_a_name(tmp_path: Path) -> None:
    in_config(tmp_path, [{"name": "chat", "template": "chat"}])
    assert loaded(tmp_path).render(chat(TOOL)) == loaded(tmp_path).render(chat(template="chat")) == "chat"
    in_config(tmp_path, {"rag": "rag", "tool_use": "tools"})
    assert loaded(tmp_path).render(chat(TOOL)) == "tools"
    with pytest.raises(InvalidRequest, match="rag, tool_use"):
        loaded(tmp_path).render(chat())


def test_the_template_for_tools_shows_the_format_of_calls(tmp_path: Path) -> None:
    in_config(tmp_path, {"default": "plain", "tool_use": "<tool_call>", "rag": "[TOOL_CALLS]"})
    assert "<tool_call>" in loaded(tmp_path).source
    assert "[TOOL_CALLS]" not in loaded(tmp_path).source


@pytest.mark.parametrize("said", [5, ["x"], [{"name": "x"}], {"x": 5}])
def test_templates_that_are_none_are_named(tmp_path: Path, said: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": said}))
    with pytest.raises(ConfigError, match="chat_template"):
        load_templates(tmp_path)


@pytest.mark.parametrize("said", [None, "", []])
def test_a_model_may_have_no_template(tmp_path: Path, said: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": said}))
    assert load_templates(tmp_path) is None
