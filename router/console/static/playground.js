// A chat with the model: parameters, tools, stop, and how much of each prompt was reused.

import * as api from "./api.js";
import { bar, element, field, fill, select } from "./dom.js";
import { count, seconds, share } from "./format.js";
import { events } from "./events.js";

export function playground(main, about) {
  const talk = { messages: [], running: null };
  const shown = element("div", { class: "messages", role: "log", "aria-label": "Conversation", "aria-live": "off" });
  const text = element("textarea", { rows: "3", required: true, onkeydown: (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  } });
  const system = element("textarea", { rows: "2" });
  const controls = parameters(about);
  const send = element("button", { class: "main", type: "submit" }, "Send");
  const stop = element("button", { type: "button", disabled: true, onclick: () => talk.running?.abort() }, "Stop");
  const clear = element("button", { type: "button", class: "quiet", onclick: () => {
    talk.running?.abort();
    talk.messages = [];
    fill(shown);
  } }, "New chat");
  const form = element("form", { class: "card stack", onsubmit: (event) => {
    event.preventDefault();
    if (talk.running === null) ask();
  } }, field("Message", text, "Ctrl and Enter sends it."), element("div", { class: "row" }, send, stop, clear),
    element("details", {}, element("summary", {}, "System message, parameters and tools"), element("div", { class: "stack" }, field("System message", system), controls.drawn)));
  fill(main, element("div", { class: "title" }, element("h2", {}, "Playground")), shown, form);

  async function ask() {
    let extra;
    try {
      extra = controls.read();
    } catch (error) {
      fill(shown, ...shown.children, element("p", { class: "message error", role: "alert" }, error.message));
      return;
    }
    const question = { role: "user", content: text.value };
    const asked = message("user", "You", question.content);
    text.value = "";
    await answer([question], asked, extra);
  }

  /** Send what is new, and show what comes back. */
  async function answer(added, asked, extra) {
    const head = system.value ? [{ role: "system", content: system.value }] : [];
    const reply = replyView();
    shown.append(asked, reply.drawn);
    talk.running = new AbortController();
    send.disabled = true;
    stop.disabled = false;
    try {
      const body = { messages: [...head, ...talk.messages, ...added], stream: true, stream_options: { include_usage: true }, ...extra };
      const said = await stream(body, talk.running.signal, reply, asked);
      asked.append(promptView(body, reply.cachedTokens()));
      talk.messages.push(...added, said);
      if (said.tool_calls) {
        reply.drawn.append(resultForm(said.tool_calls, (results) => {
          const sent = message("user", "Results of tools", results.map((each) => each.content).join("\n"));
          answer(results, sent, extra);
        }));
      }
    } catch (error) {
      reply.fail(error.name === "AbortError" ? "stopped" : error.message);
      if (error.name === "AbortError" && reply.text()) talk.messages.push(...added, { role: "assistant", content: reply.text() });
    }
    talk.running = null;
    send.disabled = false;
    stop.disabled = true;
    text.focus();
  }

  return () => talk.running?.abort();
}

async function stream(body, signal, reply, asked) {
  const begun = performance.now();
  const response = await api.open("/v1/chat/completions", body, signal);
  reply.named(response.headers.get("x-request-id"));
  const calls = [];
  for await (const data of events(response)) {
    if (data.error) throw new Error(data.error.message ?? "the stream failed");
    if (data.usage) reply.used(data.usage, asked, (performance.now() - begun) / 1e3);
    const [choice] = data.choices ?? [];
    if (choice === undefined) continue;
    const delta = choice.delta ?? {};
    if (delta.reasoning_content ?? delta.reasoning) reply.think(delta.reasoning_content ?? delta.reasoning);
    if (delta.content) reply.add(delta.content, (performance.now() - begun) / 1e3);
    for (const part of delta.tool_calls ?? []) {
      const call = (calls[part.number ?? 0] ??= { id: part.id ?? "", type: "function", function: { name: "", arguments: "" } });
      if (part.id) call.id = part.id;
      call.function.name += part.function?.name ?? "";
      call.function.arguments += part.function?.arguments ?? "";
      reply.call(part.number ?? 0, call.function);
    }
    if (choice.finish_reason) reply.finish(choice.finish_reason);
  }
  const said = { role: "assistant", content: reply.text() };
  return calls.length ? { ...said, tool_calls: calls.filter(Boolean) } : said;
}

function message(kind, who, content) {
  return element("div", { class: `message ${kind}` }, element("span", { class: "who" }, who), element("span", { class: "content" }, content));
}

function replyView() {
  const who = element("span", { class: "who" }, "Model");
  const reasoning = element("div", { class: "reasoning", hidden: true });
  const content = element("span", { class: "content" });
  const calls = element("div", {});
  const figures = element("div", { class: "small muted", role: "status" });
  const drawn = element("div", { class: "message assistant" }, who, reasoning, content, calls, figures);
  let first = null;
  let finish = "";
  let cachedTokens = 0;
  return {
    drawn,
    text: () => content.textContent,
    cachedTokens: () => cachedTokens,
    named(id) {
      if (id) fill(who, "Model · ", element("a", { href: `#requests/${encodeURIComponent(id)}` }, id));
    },
    think(more) {
      reasoning.hidden = false;
      reasoning.append(more);
    },
    add(more, atSeconds) {
      first ??= atSeconds;
      content.append(more);
    },
    call(index, call) {
      while (calls.children.length <= index) calls.append(element("div", { class: "call" }));
      fill(calls.children[index], element("strong", {}, call.name), element("pre", {}, call.arguments));
    },
    finish(reason) {
      finish = reason;
    },
    used(usage, asked, tookSeconds) {
      const cached = usage.prompt_tokens_details?.cached_tokens ?? 0;
      cachedTokens = cached;
      fill(figures, `${count(usage.completion_tokens)} tokens in ${seconds(tookSeconds)}`, first === null ? "" : `, the first after ${seconds(first)}`, finish ? ` · ended: ${finish}` : "");
      asked.append(reusedBar(cached, usage.prompt_tokens));
    },
    fail(why) {
      drawn.classList.toggle("error", why !== "stopped");
      fill(figures, why);
    },
  };
}

/** Asks for what the called tools returned; `send` gets it as messages. */
function resultForm(calls, send) {
  const inputs = calls.map((call) => element("textarea", { rows: "2", spellcheck: "false" }));
  const button = element("button", { type: "submit" }, "Send results");
  return element("form", { class: "stack", onsubmit: (event) => {
    event.preventDefault();
    button.disabled = true;
    send(calls.map((call, at) => ({ role: "tool", tool_call_id: call.id, content: inputs[at].value })));
  } }, calls.map((call, at) => field(`Result of ${call.function.name}`, inputs[at])), element("div", {}, button));
}

/** How much of the prompt, with all earlier messages, was not computed. */
function reusedBar(cached, prompt) {
  const said = `${count(cached)} of ${count(prompt)} prompt tokens reused (${share(prompt ? cached / prompt : 0)})`;
  return element("div", { class: "small" }, bar([["active", prompt ? cached / prompt : 0, said]], said), element("span", { class: "muted" }, said));
}

/** The prompt as the model sees it, with what of it was not computed marked; asked for when it is opened. */
function promptView({ messages, tools = [], model = "" }, cachedTokens) {
  const shown = element("pre", { class: "small" });
  let isAsked = false;
  return element("details", { ontoggle: async () => {
    if (isAsked) return;
    isAsked = true;
    try {
      const found = await api.act("blocks", { messages, tools, model });
      const texts = [...found.blocks.map((block) => block.text), found.rest_text];
      const reused = Math.floor(cachedTokens / found.block_size);
      fill(shown, element("mark", {}, texts.slice(0, reused).join("")), texts.slice(reused).join(""));
    } catch (error) {
      fill(shown, error.message);
    }
  } }, element("summary", { class: "small" }, "The prompt, with its reused part marked"), shown);
}

/** Controls for what a request may say besides its messages. Those that are empty are left to the router. */
function parameters(about) {
  const recommended = about.recommended ?? {};
  const number = (step, hint) => element("input", { type: "number", step, placeholder: hint === undefined ? "" : String(hint) });
  const inputs = {
    temperature: number("0.1", recommended.temperature), top_p: number("0.05", recommended.top_p), top_k: number("1", recommended.top_k),
    max_tokens: number("1"), seed: number("1"), presence_penalty: number("0.1"), frequency_penalty: number("0.1"), repetition_penalty: number("0.05", recommended.repetition_penalty),
  };
  inputs.max_tokens.value = "256";
  const stopStrings = element("input", { spellcheck: "false" });
  const tools = element("textarea", { rows: "4", spellcheck: "false" });
  const more = element("textarea", { rows: "3", spellcheck: "false" });
  const choice = select([["", "as the router decides"], ["auto", "auto"], ["none", "none"], ["required", "required"]]);
  const model = select([["", about.model], ...about.named_models.map((name) => [name, name])]);
  const drawn = element("div", { class: "stack" },
    element("div", { class: "fields" }, field("Model", model), Object.entries(inputs).map(([name, input]) => field(name, input)), field("stop", stopStrings)),
    field("tools, a list as JSON", tools), field("tool_choice", choice), field("Further fields, an object as JSON", more, "as {\"response_format\": {\"type\": \"json_object\"}}"));
  return {
    drawn,
    read() {
      const body = {};
      if (model.value) body.model = model.value;
      for (const [name, input] of Object.entries(inputs)) if (input.value !== "") body[name] = Number(input.value);
      if (stopStrings.value) body.stop = [stopStrings.value];
      if (tools.value.trim()) body.tools = parsed(tools.value, "tools");
      if (choice.value && body.tools) body.tool_choice = choice.value;
      return more.value.trim() ? { ...body, ...parsed(more.value, "further fields") } : body;
    },
  };
}

function parsed(text, name) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
}
