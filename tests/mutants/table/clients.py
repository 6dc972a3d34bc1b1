"""What clients see: keys and limits, streams, texts, dialects, and settings."""

from __future__ import annotations

from typing import Final

from tests.mutants.mutant import Mutant

MUTANTS: Final = (
    Mutant(
        name="refused-key-is-logged",
        claim="no secret is in logs: a refused API key over HTTP",
        file="router/endpoints/middleware.py",
        old="        except (InvalidApiKey, RateLimitExceeded) as error:\n",
        new=(
            "        except (InvalidApiKey, RateLimitExceeded) as error:\n"
            '            __import__("logging").getLogger(__name__).warning("refused key=%s", '
            "_shown_key(Request(scope).headers))\n"
        ),
        test=("tests/unit/router/auth/test_api_keys.py::test_no_log_answer_or_metric_has_a_key_that_was_refused"),
    ),
    Mutant(
        name="refused-key-in-grpc-is-logged",
        claim="no secret is in logs: a refused API key over gRPC",
        file="router/auth/key_authenticator.py",
        old=(
            "        except InvalidApiKey as error:\n"
            "            self._refusals.labels(ROLE, error.reason).inc()\n"
            "            raise\n"
        ),
        new=(
            "        except InvalidApiKey as error:\n"
            '            log.warning("refused key=%s", authorization)\n'
            "            self._refusals.labels(ROLE, error.reason).inc()\n"
            "            raise\n"
        ),
        test=("tests/unit/router/auth/test_api_keys.py::test_no_log_answer_or_metric_has_a_key_that_was_refused"),
    ),
    Mutant(
        name="key-in-the-error",
        claim="no secret is in an answer: a wrong API key",
        file="router/auth/api_keys.py",
        old='raise InvalidApiKey("incorrect API key", reason="wrong")',
        new='raise InvalidApiKey(f"incorrect API key {shown[0]}", reason="wrong")',
        test=(
            "tests/unit/router/auth/test_api_keys.py::test_a_key_that_is_revoked_ends_no_kserve_stream_but_serves_no_more_requests"
        ),
    ),
    Mutant(
        name="keys-of-right-ids",
        claim="an API key is its secret",
        file="router/auth/api_keys.py",
        old="if entry is None or not is_right:",
        new="if entry is None:",
        test="tests/unit/router/auth/test_api_keys.py::test_without_a_good_key_both_doors_refuse",
    ),
    Mutant(
        name="expired-keys",
        claim="an API key ends when it expires",
        file="router/auth/api_keys.py",
        old="if expires_s is not None and now_s >= expires_s:",
        new="if expires_s is not None and now_s >= expires_s + 86400:",
        test="tests/unit/router/auth/test_api_keys.py::test_a_key_expires_when_it_is_said_to",
    ),
    Mutant(
        name="revoked-keys",
        claim="a revoked API key is refused",
        file="router/auth/api_keys.py",
        old="if entry.disabled:",
        new="if entry.disabled and entry.expires:",
        test="tests/unit/router/auth/test_api_keys.py::test_without_a_good_key_both_doors_refuse",
    ),
    Mutant(
        name="tokens-over-the-limit",
        claim="API keys have limits of tokens",
        file="router/auth/limits.py",
        old="(wait_s := use.tokens.wait_s(0, per_minute, now_s)) > 0",
        new="(wait_s := use.tokens.wait_s(0, per_minute, now_s)) > 60",
        test=("tests/unit/router/auth/test_limits.py::test_one_token_beyond_the_limit_has_to_come_back_too"),
    ),
    Mutant(
        name="choices-over-the-limit",
        claim="API keys have limits of answers at once",
        file="router/auth/limits.py",
        old="if use.answers + more > self._most:",
        new="if self._answers + more > self._most:",
        test="tests/unit/router/auth/test_api_keys.py::test_every_choice_counts_as_an_answer_at_once",
    ),
    Mutant(
        name="prompts-are-free",
        claim="the tokens of prompts count for the limit of an API key",
        file="router/requests/request_output.py",
        old="self._spend(len(parent.request.prompt))",
        new="self._spend(0)",
        test="tests/unit/router/auth/test_api_keys.py::test_tokens_of_prompt_and_answer_count",
    ),
    Mutant(
        name="tenant-as-the-client-says",
        claim="a key's tenant cannot be chosen by its client",
        file="router/auth/auth.py",
        old='if named not in ("", self.tenant):',
        new="if not named and self.tenant is named:",
        test=("tests/unit/router/auth/test_api_keys.py::test_the_tenant_is_the_keys_and_nobody_can_say_otherwise"),
    ),
    Mutant(
        name="other-hosts",
        claim="a page whose name leads to loopback reaches nothing",
        file="router/endpoints/middleware.py",
        old='return "*" in self._hosts or name in self._hosts or _is_loopback(name)',
        new="return True",
        test="tests/unit/router/endpoints/test_middleware.py::test_on_loopback_a_foreign_name_is_refused",
    ),
    Mutant(
        name="other-origins",
        claim="a web page of another origin reaches nothing",
        file="router/endpoints/middleware.py",
        old=(
            'return "*" in self._origins or origin in self._origins or origin.lower() == f"{scheme}://{host}".lower()'
        ),
        new="return True",
        test="tests/unit/router/endpoints/test_middleware.py::test_pages_of_other_origins_may_not",
    ),
    Mutant(
        name="clients-without-certificates",
        claim="mTLS: a client without a certificate is refused",
        file="twostroke/security/tls.py",
        old="context.verify_mode = ssl.CERT_REQUIRED",
        new="context.verify_mode = ssl.CERT_OPTIONAL",
        test=(
            "tests/unit/security/test_tls.py::test_who_must_show_a_certificate_and_shows_none_or_a_strangers_is_not_let_in"
        ),
    ),
    Mutant(
        name="certificates-read-once",
        claim="certificates change under load",
        file="twostroke/security/tls.py",
        old="if self._current_stamp() != self._stamp:",
        new="if not self._stamp:",
        test="tests/unit/security/test_tls.py::test_files_that_change_while_they_are_read_are_never_mixed",
    ),
    Mutant(
        name="marks-of-any-tenant",
        claim="no other tenant can resume a stream",
        file="router/requests/resume.py",
        old="is_short and is_marked and resumed",
        new="is_short and resumed",
        test=("tests/unit/router/auth/test_api_keys.py::test_only_the_same_tenant_goes_on_with_a_stream_or_aborts_it"),
    ),
    Mutant(
        name="seeds-of-positions",
        claim="any router computes the same answer again: seeds follow the stream's name and the prompt's index",
        file="router/requests/resume.py",
        old='hashlib.blake2b(f"{prompt} {name}".encode()',
        new='hashlib.blake2b(f"{name}".encode()',
        test=(
            "tests/unit/router/requests/test_resume.py::test_seeds_are_the_same_at_every_router_of_a_cluster_and_differ_by_stream_and_prompt"
        ),
    ),
    Mutant(
        name="tokens-again-after-resuming",
        claim="a resumed stream goes on after the last message",
        file="router/requests/request_output.py",
        old="is_sent = position < choice.sent_tokens",
        new="is_sent = position < choice.sent_tokens - 1",
        test=(
            "tests/unit/router/requests/test_resume.py::test_an_answer_that_breaks_off_anywhere_goes_on_with_what_would_have_followed"
        ),
    ),
    Mutant(
        name="usage-of-resumed-choices",
        claim="usage counts every token of the answer, also after resuming",
        file="router/requests/request_output.py",
        old="self._completion_tokens = sum(sent.tokens or 0 for sent in ended)",
        new="self._completion_tokens = 0",
        test=(
            "tests/unit/router/requests/test_resume.py::test_an_answer_that_breaks_off_anywhere_goes_on_with_what_would_have_followed"
        ),
    ),
    Mutant(
        name="usage-of-cached-tokens",
        claim="usage says how many tokens of the prompt were cached",
        file="router/requests/request_output.py",
        old="self._cached_tokens += min(cached.values())",
        new="self._cached_tokens += max(cached.values())",
        test=(
            "tests/unit/router/requests/test_usage.py::test_cached_tokens_of_several_answers_are_those_of_the_one_that_found_fewest"
        ),
    ),
    Mutant(
        name="stop-strings-lose-their-tail",
        claim="stop strings are found wherever they begin",
        file="router/text/stop_strings.py",
        old="child.fail = self.root if node is self.root else self.after(node.fail, char)",
        new="child.fail = self.root",
        test=(
            "tests/unit/router/text/test_detokenize.py::test_any_split_with_any_stop_strings_equals_decode_all_then_cut"
        ),
    ),
    Mutant(
        name="stop-strings-within-others",
        claim="a stop string that lies in the beginning of another one is found",
        file="router/text/stop_strings.py",
        old="len(self._stops[first]) == depth else child.fail.matched_chars",
        new="len(self._stops[first]) == depth else 0",
        test=(
            "tests/unit/router/text/test_detokenize.py::test_any_split_with_any_stop_strings_equals_decode_all_then_cut"
        ),
    ),
    Mutant(
        name="stop-strings-are-sent",
        claim="no part of a stop string is sent",
        file="router/text/stop_strings.py",
        old="certain_chars = len(text) - node.depth",
        new="certain_chars = len(text) - min(node.depth, 1)",
        test=(
            "tests/unit/router/text/test_detokenize.py::test_any_split_with_any_stop_strings_equals_decode_all_then_cut"
        ),
    ),
    Mutant(
        name="stops-before-min-tokens",
        claim="nothing ends an answer before min_tokens",
        file="router/text/detokenize.py",
        old="self._scanner is None or self.tokens <= self._min_tokens else",
        new="self._scanner is None or self.tokens < self._min_tokens else",
        test=(
            "tests/unit/router/text/test_detokenize.py::test_a_stop_string_counts_from_the_first_token_behind_min_tokens_on"
        ),
    ),
    Mutant(
        name="half-characters",
        claim="text is sent in whole characters",
        file="router/text/detokenize.py",
        old="return min(trailing, UNFINISHED_CHARS)",
        new="return 0",
        test=(
            "tests/unit/router/text/test_detokenize.py::test_any_bytes_of_a_byte_level_tokenizer_stream_as_they_decode_at_once"
        ),
    ),
    Mutant(
        name="special-tokens-of-clients",
        claim="special tokens that a client writes stay text",
        file="router/text/chat_template.py",
        old="lambda special: special[0][0] + self._mark + special[0][1:]",
        new="lambda special: special[0]",
        test=(
            "tests/unit/router/text/test_tokenizer.py::test_special_tokens_that_a_client_writes_in_a_chat_are_ordinary_text"
        ),
    ),
    Mutant(
        name="trimmed-continuations",
        claim="continue_final_message goes on where the message ends",
        file="router/text/chat_template.py",
        old="return kept if rendered.startswith(_TAG, start) else kept.rstrip()",
        new="return kept",
        test=(
            "tests/unit/router/text/test_tokenizer.py::test_a_template_that_trims_messages_cuts_a_continued_one_at_its_last_word"
        ),
    ),
    Mutant(
        name="escaped-tools",
        claim="templates get tools as JSON without escapes",
        file="router/text/chat_template.py",
        old="ensure_ascii: bool = False,",
        new="ensure_ascii: bool = True,",
        test=("tests/unit/router/text/test_tokenizer.py::test_templates_may_use_the_conventions_of_published_ones"),
    ),
    Mutant(
        name="calls-of-tools-that-are-none",
        claim="prose is not a call: a name that is not a tool",
        file="router/text/output/formats/mistral.py",
        old="if name.strip() not in self._tools or (rest",
        new="if (rest",
        test=(
            "tests/unit/router/text/output/test_conformance.py::test_recorded_answers_mean_the_parts_that_are_recorded_with_them"
        ),
    ),
    Mutant(
        name="framing-of-reasoning",
        claim="reasoning ends without its framing",
        file="router/text/output/think.py",
        old='self._parts.add_reasoning(text.removesuffix("\\n"))',
        new="self._parts.add_reasoning(text)",
        test=(
            "tests/unit/router/text/output/test_conformance.py::test_recorded_answers_mean_the_parts_that_are_recorded_with_them"
        ),
    ),
    Mutant(
        name="anthropic-input-tokens",
        claim="Anthropic's input_tokens are those that were not cached",
        file="router/dialects/anthropic/reply.py",
        old="usage.prompt_tokens - usage.cached_tokens - written, written,",
        new="usage.prompt_tokens - written, written,",
        test="tests/unit/router/dialects/anthropic/test_http.py::test_an_answer_is_a_message",
    ),
    Mutant(
        name="anthropic-stop-sequence",
        claim="Anthropic's stop_reason names a stop sequence",
        file="router/dialects/anthropic/reply.py",
        old='return "stop_sequence"',
        new='return "end_turn"',
        test=(
            "tests/unit/router/dialects/anthropic/test_http.py::test_an_answer_says_which_stop_sequence_has_ended_it"
        ),
    ),
    Mutant(
        name="openai-cached-tokens",
        claim="usage says how many tokens of the prompt were cached, in OpenAI's dialect",
        file="router/dialects/openai/reply.py",
        old='"prompt_tokens_details": {"cached_tokens": usage.cached_tokens},',
        new='"prompt_tokens_details": {"cached_tokens": 0},',
        test="tests/unit/router/dialects/openai/test_http.py::test_a_chat_has_text_usage_and_finish_reason",
    ),
    Mutant(
        name="responses-cached-tokens",
        claim="usage says how many tokens of the prompt were cached, in the dialect of Responses",
        file="router/dialects/responses/reply.py",
        old='"input_tokens_details": {"cached_tokens": usage.cached_tokens,',
        new='"input_tokens_details": {"cached_tokens": 0,',
        test=("tests/unit/router/dialects/responses/test_http.py::test_openais_client_gets_the_response_and_its_usage"),
    ),
    Mutant(
        name="responses-cut-is-complete",
        claim="an answer that was cut is incomplete in Responses",
        file="router/dialects/responses/reply.py",
        old='return "incomplete" if self._finish is FinishReason.LENGTH else "completed"',
        new='return "completed"',
        test="tests/unit/router/dialects/responses/test_http.py::test_a_probe_for_one_token_gets_one",
    ),
    Mutant(
        name="kserve-cached-tokens",
        claim="usage says how many tokens of the prompt were cached, in KServe's dialect",
        file="router/dialects/kserve/reply.py",
        old='"cached_tokens": self._usage.cached_tokens,',
        new='"cached_tokens": 0,',
        test=(
            "tests/unit/router/dialects/kserve/test_generate.py::test_details_say_how_the_answer_ended_and_what_each_token_was"
        ),
    ),
    Mutant(
        name="kserve-output-tokens",
        claim="KServe's num_output_tokens counts tokens",
        file="router/dialects/kserve/answer_parts.py",
        old="return [len(choice.tokens) for choice in choices]",
        new="return [len(choice.texts) + 1 for choice in choices]",
        test=(
            "tests/unit/router/dialects/kserve/test_generate.py::test_the_vllm_backends_dialect_has_the_prompt_before_a_whole_answer_and_its_flags"
        ),
    ),
    Mutant(
        name="grpc-usage",
        claim="usage is complete over gRPC",
        file="router/endpoints/grpc/service.py",
        old="message.usage.CopyFrom(inference_pb2.Usage(**dataclasses.asdict(event.usage)))",
        new="message.usage.CopyFrom(inference_pb2.Usage(prompt_tokens=event.usage.prompt_tokens))",
        test=(
            "tests/unit/router/endpoints/grpc/test_service.py::test_every_token_is_its_own_message_and_the_last_has_the_usage"
        ),
    ),
    Mutant(
        name="grpc-salt",
        claim="cache_salt keeps prefixes apart over gRPC",
        file="router/dialects/grpc/schema.py",
        old='made = {"prompts": (prompt_of(message),), "options": options_of(message)}',
        new='made = {"prompts": (prompt_of(message),), "options": options_of(message), "cache_salt": None}',
        test=(
            "tests/unit/router/requests/test_isolations.py::test_no_two_requests_share_blocks_that_differ_in_anything_that_keeps_blocks_apart"
        ),
    ),
    Mutant(
        name="seeds-of-32-bits",
        claim="all 64 bits of a client's seed count",
        file="router/requests/params.py",
        old="options.seed % (1 << 64)",
        new="options.seed % (1 << 32)",
        test=(
            "tests/unit/router/endpoints/grpc/test_service.py::test_chats_token_ids_and_all_options_reach_the_worker"
        ),
    ),
    Mutant(
        name="deadline-of-clients",
        claim="a deadline ends a request everywhere",
        file="router/requests/client_request.py",
        old="deadline_s=self.deadline_s",
        new="deadline_s=None",
        test="tests/unit/router/dialects/openai/test_refusals.py::test_a_timeout_of_more_than_a_day_is_a_day",
    ),
    Mutant(
        name="lines-of-clients",
        claim="a client's text cannot look like another line of a log",
        file="twostroke/base/client_text.py",
        old='if text and text.isprintable() and " " not in text',
        new='if text and " " not in text',
        test="tests/unit/base/test_client_text.py::test_a_value_in_a_log_is_quoted_unless_it_cannot_be_misread",
    ),
    Mutant(
        name="simulated-pace",
        claim="a simulated fleet meets the trace at the asked pace",
        file="tools/simulate/runs.py",
        old="timestamp_s=row.timestamp_s / rate_scale",
        new="timestamp_s=row.timestamp_s * rate_scale",
        test="tests/unit/tools/simulate/test_loads.py::test_a_faster_pace_is_the_same_requests_sooner",
    ),
    Mutant(
        name="weights-of-any-dtype",
        claim="options that exclude each other are refused before a worker starts",
        file="twostroke/config/model.py",
        old='if self.weights == "int8" and self.dtype != "bfloat16":',
        new='if self.weights == "int8" and not self.dtype:',
        test="tests/unit/config/test_configs.py::test_what_is_wrong_is_named",
    ),
    Mutant(
        name="text-cut-before-any-token",
        claim="a prompt has the same tokens, whatever of it was prepared before",
        file="router/text/segments.py",
        old="return not (token.lstrip or token.rstrip or token.single_word or token.content != token.content.strip())",
        new="return True",
        test="tests/unit/router/text/test_known_text.py::test_text_is_not_cut_before_tokens_that_take_what_stands_beside_them",
    ),
    Mutant(
        name="text-key-without-what-is-before",
        claim="a prompt has the same tokens, whatever of it was prepared before",
        file="router/text/known_text.py",
        old="            key = _keyed(key, content_of(segment))",
        new="            key = _keyed(self._root, content_of(segment))",
        test="tests/unit/router/text/test_known_text.py::test_a_segment_is_found_only_behind_what_was_before_it",
    ),
    Mutant(
        name="text-key-without-salt",
        claim="nobody finds text that was prepared for another one",
        file="router/text/known_text.py",
        old='return _keyed(key, len(owner).to_bytes(4, "little") + owner + salt)',
        new='return _keyed(key, len(owner).to_bytes(4, "little") + owner)',
        test="tests/unit/router/text/test_known_text.py::test_nobody_finds_text_of_another_tenant_client_or_salt",
    ),
    Mutant(
        name="text-key-without-tenant",
        claim="nobody finds text that was prepared for another one",
        file="router/preparation/prepared_texts.py",
        old="key = hashlib.blake2b(work.tenant.encode(), digest_size=32, key=self._secret).digest()",
        new='key = hashlib.blake2b(b"", digest_size=32, key=self._secret).digest()',
        test=(
            "tests/unit/router/preparation/test_prepared_texts.py"
            "::test_each_tenant_has_a_key_of_its_own_which_no_other_router_has"
        ),
    ),
    Mutant(
        name="kept-hashes-without-salt",
        claim="tenants do not see each other's prefixes",
        file="router/serving/prompt_hashes.py",
        old='content = b"%d %d " % (block_size, request.public_blocks) + request.salt',
        new='content = b"%d %d " % (block_size, request.public_blocks)',
        test="tests/unit/router/serving/test_prompt_hashes.py::test_whoever_has_another_salt_finds_no_hashes",
    ),
)
