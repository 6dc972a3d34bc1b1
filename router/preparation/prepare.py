"""Parses, checks, renders and tokenizes a request before it is admitted. It may run in any process."""

from __future__ import annotations

import dataclasses
import json
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from google.protobuf.message import DecodeError

from router.dialects.anthropic.schema import counted_chat
from router.dialects.grpc.schema import parse_prefix, prompt_of
from router.dialects.openai.schema import (
    DetokenizeBody,
    TokenizeBody,
    tokenize_prompt,
)
from router.dialects.responses.schema import counted_response
from router.dialects.table import DIALECTS, MESSAGES, Dialect, MessageDialect
from router.json_body import BYTES_FIELD, parse_json
from router.requests.client_request import AnswerRequest
from router.requests.params import (
    AnswerOptions,
    check_length,
    check_model,
    check_prompt,
    check_prompt_length,
    check_text_length,
    check_token_ids,
)
from router.requests.work import PreparationOutcome, Work
from router.text.cache_hints import TokenHint
from router.text.infill import infill_ends, infill_text
from router.text.known_text import KnownSegments, KnownText, owner_root
from router.text.output.grammars.answers import answer_grammar, unmarked_calls
from router.text.output.output_formats import REASONING_BY_NAME
from router.text.output.parsing import Parsing, callable_tools
from router.text.prompts import ChatPrompt, Prompt, TextPrompt, TokenPrompt, common_length, diverging_chat, prompt_field
from router.text.structured.output import StructuredOutput
from router.text.tokenizer import Text
from twostroke.base.errors import InvalidRequest, ServeError, UnsupportedFeature, without_frames
from twostroke.observability.bug_log import place_of
from twostroke.request import LONGEST
from twostroke.rpc.v1 import inference_pb2

MOST_COUNTED_TOKENS = 1 << 17
"""Tokens that `/tokenize` returns at most, or more if the model takes more: a response of a megabyte or two."""

OPENING_TOKENS = 16
"""Last tokens of a prompt that are searched for the mark that begins reasoning."""


def prepare(work: Work, text: Text, segments: KnownSegments | None = None) -> PreparationOutcome:
    """Prepares one request. The outcome holds a ServeError instead of raising it.

    `segments` are the cached tokens of its tenant's texts. None: no cache.
    """
    outcome = PreparationOutcome()
    try:
        outcome.value = KINDS[work.kind](_Preparation(work, text, outcome, segments if work.text_key else None))
    except ServeError as error:
        outcome.place = place_of(error)
        outcome.error = without_frames(error)
    except MemoryError:
        outcome.error = InvalidRequest("the request takes more memory to read than one request may have")
    except RecursionError:
        outcome.error = InvalidRequest("the request is nested too deeply")
    return outcome


class _Preparation:
    def __init__(
        self, work: Work, text: Text, outcome: PreparationOutcome, segments: KnownSegments | None = None
    ) -> None:
        self._work = work
        self._segments = segments
        self._known = self._known_to()
        self._facts = work.facts
        self._text = text
        self._outcome = outcome

    def answer(self, dialect: Dialect) -> AnswerRequest:
        """Returns the request with its prompts as tokens."""
        body, end = self._work.body, self._work.json_bytes
        fields = {**parse_json(body[:end]), **dict(self._work.path_fields)}
        if dialect.takes_bytes:
            fields[BYTES_FIELD] = b"" if end is None else body[end:]
        return self._tokenized(dialect.parse(fields))

    def answer_message(self, dialect: MessageDialect) -> AnswerRequest:
        """Returns the request with its prompt as tokens."""
        return self._tokenized(dialect.parse(_message(dialect.message, self._work.body)))

    def _known_to(self, owner: str = "", salt: bytes = b"") -> KnownText:
        """Returns the known text of one salt and one owner within the tenant, whom a gateway may name."""
        return KnownText(owner_root(self._work.text_key, owner.encode(), salt), self._segments)

    def _tokenized(self, wanted: AnswerRequest) -> AnswerRequest:
        self._known = self._known_to(wanted.named_tenant, wanted.cache_salt)
        check_model(wanted.model, self._work.model, self._work.named_models)
        options, prompts = wanted.options, self._prompts(wanted.prompts, wanted.options.structured)
        for prompt, tokens in zip(wanted.prompts, prompts, strict=True):
            if isinstance(prompt, ChatPrompt) and prompt.tool_use is not None and tokens.parsing is not None:
                structured = answer_grammar(
                    prompt.tools, prompt.tool_use, tokens.parsing, options.structured, self._text.added_token
                )
                options = options.model_copy(update={"structured": structured})
        if any(isinstance(prompt, TextPrompt) and prompt.suffix for prompt in wanted.prompts):
            options = self._ended(options)
        return wanted.model_copy(update={"prompts": prompts, "options": options})

    def _ended(self, options: AnswerOptions) -> AnswerOptions:
        """Returns the options with the stop tokens of an infilled text, between a prompt and its suffix."""
        if options.ignore_eos:
            return options
        ends = tuple(dict.fromkeys((*options.stop_token_ids, *infill_ends(self._text))))
        return options.model_copy(update={"stop_token_ids": ends[: LONGEST["stop_token_ids"]]})

    def tokenize(self) -> bytes:
        """Returns the body of the response."""
        body = parse_json(self._work.body)
        wanted, prompt = TokenizeBody.read(body), tokenize_prompt(body)
        check_model(wanted.model, self._work.model, self._work.named_models)
        tokens = self._counted(prompt, isinstance(prompt, TextPrompt) and prompt.add_special_tokens)
        strings = [self._text.entry(token) for token in tokens] if wanted.return_token_strs else None
        counts = {"count": len(tokens), "max_model_len": self._facts.context_tokens}
        return _json({**counts, "tokens": list(tokens), "token_strs": strings})

    def count(self, chat_of: Callable[[Mapping[str, Any]], ChatPrompt], named: Mapping[str, str]) -> bytes:
        """Returns the body of a response with a chat's number of tokens and the fields of `named`.

        `chat_of` parses the chat in the request's body.
        """
        body = parse_json(self._work.body)
        wanted, chat = TokenizeBody.read(body), chat_of(body)
        check_model(wanted.model, self._work.model, self._work.named_models)
        return _json({**named, "input_tokens": len(self._counted(chat, False))})

    def detokenize(self) -> bytes:
        """Returns the body of the response."""
        wanted = DetokenizeBody.read(parse_json(self._work.body))
        return _json({"prompt": self._detokenized(wanted.model, wanted.tokens, "tokens")})

    def grpc_detokenize(self) -> bytes:
        """Returns the serialized response."""
        message = _message(inference_pb2.DetokenizeRequest, self._work.body)
        text = self._detokenized(message.model or None, message.token_ids, "token_ids")
        return inference_pb2.DetokenizeResponse(text=text).SerializeToString()

    def _detokenized(self, model: str | None, tokens: Sequence[int], field: str) -> str:
        check_model(model, self._work.model, self._work.named_models)
        check_length(len(tokens), field, self._facts)
        check_token_ids(tokens, field, self._facts.vocab_size)
        self._outcome.tokens += len(tokens)
        return self._text.decode(tokens, skip_special_tokens=False)

    def grpc_tokenize(self) -> bytes:
        """Returns the serialized response."""
        message = _message(inference_pb2.TokenizeRequest, self._work.body)
        check_model(message.model or None, self._work.model, self._work.named_models)
        prompt = prompt_of(message)
        tokens = self._counted(prompt, isinstance(prompt, TextPrompt))
        return inference_pb2.TokenizeResponse(token_ids=tokens).SerializeToString()

    def shared_prefix(self) -> array[int]:
        """Returns the tokens that all prompts with this prefix begin with."""
        prefix = parse_prefix(self._work.body)
        if not isinstance(prefix, ChatPrompt):
            return array("I", self._tokens(prefix, self._facts.context_tokens, isinstance(prefix, TextPrompt)))
        if prefix.continue_final_message:
            raise InvalidRequest("continue_final_message has no effect on a pin", field="chat.continue_final_message")
        begun = diverging_chat(prefix, len(prefix.messages))
        tokens = self._tokens(begun, self._facts.context_tokens, False)
        return array("I", tokens[: self._tokens_up_to(begun, len(prefix.messages), tokens)])

    def _counted(self, prompt: Prompt, add_special_tokens: bool) -> Sequence[int]:
        """Tokenizes for clients that count tokens to shorten a prompt: it may be longer than the model takes."""
        most_tokens = max(MOST_COUNTED_TOKENS, self._facts.max_model_len)
        tokens = self._tokens(prompt, most_tokens, add_special_tokens)
        if len(tokens) > most_tokens:
            name = prompt_field(prompt)
            raise InvalidRequest(f"{name} has {len(tokens)} tokens; at most {most_tokens} are counted", field=name)
        return tokens

    def _prompts(self, prompts: Sequence[Prompt], structured: StructuredOutput | None) -> tuple[TokenPrompt, ...]:
        """Tokenizes all prompts, after the cheap checks of all of them.

        `structured` is the format of answers without tool calls.
        """
        for prompt in prompts:
            if isinstance(prompt, TokenPrompt):
                check_prompt(prompt, self._facts)
            elif isinstance(prompt, TextPrompt):
                self._check_text(prompt.text, "prompt", self._facts.context_tokens)
        return tuple(self._prompt(prompt, structured) for prompt in prompts)

    def _prompt(self, prompt: Prompt, structured: StructuredOutput | None) -> TokenPrompt:
        tokens = self._chat(prompt) if isinstance(prompt, ChatPrompt) else self._completion(prompt)
        if isinstance(prompt, TokenPrompt) or self._text.tokens_end > self._facts.vocab_size:
            check_prompt(tokens, self._facts)
        else:
            check_prompt_length(tokens, self._facts)
        if isinstance(prompt, ChatPrompt) and (prompt.tool_use is not None or self._work.formats.reasoning):
            return self._parsed(prompt, tokens, structured)
        return tokens

    def _chat(self, prompt: ChatPrompt) -> TokenPrompt:
        ids = self._tokens(prompt, self._facts.context_tokens, False)
        hints = [TokenHint(self._tokens_up_to(prompt, hint.messages, ids), hint.seconds) for hint in prompt.hints]
        return TokenPrompt(ids, is_chat=True, hints=tuple(hints))

    def _completion(self, prompt: TextPrompt | TokenPrompt) -> TokenPrompt:
        if isinstance(prompt, TokenPrompt):
            ids = self._tokens(prompt, self._facts.context_tokens, False)
            text = self._text.decode(ids, skip_special_tokens=False) if prompt.is_echoed else ""
            return TokenPrompt(array("I", ids), hints=prompt.hints, text=text)
        is_empty = not prompt.text and not prompt.suffix
        adds = prompt.add_special_tokens
        ids = () if is_empty else self._tokens(prompt, self._facts.context_tokens, adds)
        hints = () if prompt.keep_s is None else (TokenHint(len(ids), prompt.keep_s),)
        return TokenPrompt(array("I", ids), hints=hints, text=prompt.text if prompt.is_echoed else "")

    def _parsed(self, prompt: ChatPrompt, tokens: TokenPrompt, structured: StructuredOutput | None) -> TokenPrompt:
        """Returns the prompt with the parsing of its answers. `structured` is their format without tool calls."""
        formats, use = self._work.formats, prompt.tool_use
        if use is not None and not formats.calls:
            raise UnsupportedFeature(
                "tools: the model's chat template shows no known format of tool calls; whoever runs this server can "
                'name one with --tool-call-parser, or send tool_choice "none"',
                field="tools",
            )
        opening = REASONING_BY_NAME[formats.reasoning].opening if formats.reasoning else ""
        end = self._text.decode(tokens.ids[-OPENING_TOKENS:], skip_special_tokens=False).rstrip() if opening else ""
        tools = {} if use is None else callable_tools(prompt.tools)
        is_open = bool(opening) and end.endswith(opening)
        parsing = Parsing(formats=formats, tools=tools, is_reasoning_open=is_open)
        if use is not None:
            unmarked = unmarked_calls(prompt.tools, use, structured)
            parsing = dataclasses.replace(parsing, unmarked=unmarked)
        return dataclasses.replace(tokens, parsing=parsing)

    def _tokens_up_to(self, chat: ChatPrompt, messages: int, tokens: Sequence[int]) -> int:
        """Returns how many of the chat's tokens belong to its first messages, whatever comes after them."""
        return common_length(tokens, self._text.encode_chat(diverging_chat(chat, messages), known=self._known))

    def _tokens(self, prompt: Prompt, most_tokens: int, add_special_tokens: bool) -> Sequence[int]:
        match prompt:
            case TokenPrompt(ids):
                tokens: Sequence[int] = ids
            case TextPrompt(text, split):
                if prompt.suffix:
                    text = infill_text(self._text, text, prompt.suffix)
                self._check_text(text, "prompt", most_tokens)
                tokens = self._text.encode(
                    text, add_special_tokens=add_special_tokens, split_special_tokens=split, known=self._known
                )
            case ChatPrompt():
                tokens = self._text.encode_chat(
                    prompt, lambda text: self._check_text(text, "messages", most_tokens), self._known
                )
        self._outcome.tokens += len(tokens)
        return tokens

    def _check_text(self, text: str, name: str, most_tokens: int) -> None:
        check_text_length(text, name, self._text.longest_token_chars, most_tokens, self._facts)


KINDS: Mapping[str, Callable[[_Preparation], Any]] = {
    **{dialect.path: partial(_Preparation.answer, dialect=dialect) for dialect in DIALECTS},
    **{kind: partial(_Preparation.answer_message, dialect=dialect) for kind, dialect in MESSAGES.items()},
    "tokenize": _Preparation.tokenize,
    "count_tokens": partial(_Preparation.count, chat_of=counted_chat, named={}),
    "input_tokens": partial(_Preparation.count, chat_of=counted_response, named={"object": "response.input_tokens"}),
    "detokenize": _Preparation.detokenize,
    "grpc_tokenize": _Preparation.grpc_tokenize,
    "grpc_detokenize": _Preparation.grpc_detokenize,
    "shared_prefix": _Preparation.shared_prefix,
}


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")


def _message(kind: Any, body: bytes) -> Any:
    try:
        return kind.FromString(body)
    except DecodeError as error:
        raise InvalidRequest(f"the request is not a valid message: {error}") from error
