// The latest requests, the slowest of the last minute, and where the time of one of them went.

import * as api from "./api.js";
import { bar, element, field, fill, select, table } from "./dom.js";
import { ago, count, plural, seconds, share } from "./format.js";
import { live } from "./live.js";

const PERIOD_MS = 2000;

export function requests(main, about, name) {
  return name ? one(main, name) : many(main);
}

function many(main) {
  const order = select([["slowest", "Slowest of the last minute"], ["latest", "Latest"]], "slowest");
  const id = element("input", { type: "search", required: true, spellcheck: "false", maxlength: "300" });
  const listing = element("div", {});
  fill(main,
    element("div", { class: "title" }, element("h2", {}, "Requests"), element("p", { class: "small muted", id: "who" })),
    element("div", { class: "card grid" }, field("Order", order),
      element("form", { onsubmit: (event) => {
        event.preventDefault();
        location.hash = `#requests/${encodeURIComponent(id.value.trim())}`;
      } }, field("Open by id", id, "The id of its answer (chatcmpl-…), or x-request-id. Enter opens it."))),
    element("section", { class: "card", "aria-label": "Requests" }, listing));
  let shown = "";

  async function look(isOver) {
    const now = await api.read("requests", { order: order.value });
    if (isOver()) return;
    const text = JSON.stringify(now.requests);
    if (text === shown) return;
    shown = text;
    fill(document.getElementById("who"), `as ${now.router} remembers them`);
    const focused = document.activeElement?.dataset?.stream;
    fill(listing, tableOf(now.requests, now.at_s, order.value));
    if (focused) [...listing.querySelectorAll("button")].find((each) => each.dataset.stream === focused)?.focus();
  }

  let stop = live(look, (error) => fill(listing, problem(error)), PERIOD_MS);
  order.addEventListener("change", () => {
    stop();
    stop = live(look, (error) => fill(listing, problem(error)), PERIOD_MS);
  });
  return () => stop();
}

function problem(error) {
  return element("p", { role: "alert", class: "status bad" }, error.message);
}

function tableOf(lines, nowSeconds, order) {
  if (lines.length === 0) {
    return element("p", { class: "muted" }, order === "slowest" ? "No request has ended within the last minute." : "No request has come in yet.");
  }
  const columns = [["Request", "wide"], ["Began", ""], ["Status", ""], ["Total", "number"], ["First token", "number"], ["Per token", "number"],
    ["Prompt", "number"], ["Reused", "number"], ["Output", "number"], ["Ran on", ""]];
  return table(order === "slowest" ? "The slowest that ended within the last minute, the slowest first" : "The latest first", columns,
    lines.map((line) => [
      opener(line), line.start_s === null ? "–" : ago(line.start_s, nowSeconds), status(line.status), seconds(line.duration_s), seconds(line.first_token_s),
      seconds(line.token_s), count(line.prompt_tokens), line.prompt_tokens ? share((line.cached_tokens ?? 0) / line.prompt_tokens) : "–",
      count(line.tokens), place(line),
    ]));
}

function opener(line) {
  const button = element("button", { type: "button", class: "link", onclick: () => { location.hash = `#requests/${encodeURIComponent(line.stream)}`; } }, line.request);
  button.dataset.stream = line.stream;
  return button;
}

function status(text) {
  const kind = text === "ok" ? "good" : text === "open" ? "warn" : "bad";
  return element("span", { class: `status ${kind}` }, text);
}

function place(line) {
  if (!line.decode) return "–";
  return line.source && line.source !== "local" ? `${line.source} → ${line.decode}` : line.decode;
}

function one(main, name) {
  const shown = element("div", { class: "stack" }, element("p", { class: "muted" }, "Asking the router and its workers …"));
  fill(main, element("div", { class: "title" }, element("h2", {}, "Request"), element("a", { href: "#requests" }, "All requests")), shown);
  let hasLeft = false;
  api.read("request", { id: name }).then((known) => {
    if (!hasLeft) fill(shown, ...detail(known));
  }).catch((error) => {
    if (!hasLeft) fill(shown, problem(error));
  });
  return () => { hasLeft = true; };
}

function detail(known) {
  return [
    element("section", { class: "card stack", "aria-labelledby": "why-slow" },
      element("div", {}, element("h3", { id: "why-slow" }, "Where its time went"),
        element("p", { class: "small muted" }, known.stream, ` · ${seconds(known.length_s)} in all`, known.is_open ? " so far: it is still open" : "")),
      element("ol", { class: "parts" }, known.parts.map((part) => element("li", {},
        element("span", {}, part.text, " ", element("span", { class: "muted small" }, share(part.share))),
        bar([["", part.share, part.name]], `${part.name}: ${share(part.share)} of the whole time`)))),
      known.remarks.map((remark) => element("p", { class: "status warn" }, remark))),
    choiceCard(known.choice),
    element("section", { class: "card stack", "aria-labelledby": "waterfall-title" }, element("h3", { id: "waterfall-title" }, "Waterfall"),
      element("div", { class: "waterfall", role: "list" }, known.lines.map((line) => spanLine(line, 1e3 * known.length_s))),
      known.missing.map((worker) => element("p", { class: "small muted" }, `The part of ${worker} is missing: it still runs, or that epoch of it is over.`)),
      known.silent.length ? element("p", { class: "small muted" }, `Did not answer: ${known.silent.join(", ")}`) : null,
      element("p", { class: "small muted" }, "The same on a command line: ", element("code", {}, `twostroke trace ${known.stream}`))),
  ];
}

function spanLine(line, wholeMs) {
  const isEvent = line.length_ms === null;
  const drawn = element("span", {});
  drawn.style.left = `${(100 * Math.max(0, line.start_ms)) / Math.max(1e-9, wholeMs)}%`;
  if (!isEvent) drawn.style.width = `${(100 * line.length_ms) / Math.max(1e-9, wholeMs)}%`;
  const name = element("span", { class: "name", title: `${line.name} ${line.process}` }, line.name, " ", element("span", { class: "muted" }, line.process));
  name.style.paddingLeft = `${0.9 * line.depth}em`;
  const isFailed = line.facts.includes("error=");
  return element("div", { class: `span${isEvent ? " event" : ""}${isFailed ? " failed" : ""}`, role: "listitem" }, name,
    element("span", { class: "track", "aria-hidden": "true" }, drawn),
    element("span", { class: "number" }, isEvent ? `at ${seconds(line.start_ms / 1e3)}` : seconds(line.length_ms / 1e3)),
    line.facts ? element("span", { class: "facts" }, line.facts) : null);
}

function choiceCard(choice) {
  if (choice === null) return null;
  const candidates = [choice.chosen, ...choice.others].filter((each) => Object.keys(each.terms).length > 0);
  const terms = Object.keys(choice.terms_in_words).filter((term) => candidates.some((each) => each.terms[term]));
  const columns = [["Candidate", "wide"], ["Price", "number"], ...terms.map((term) => [choice.terms_in_words[term], "number"])];
  const rows = candidates.map((each) => {
    const total = Object.values(each.terms).reduce((sum, value) => sum + value, 0);
    return [whereOf(each), seconds(total), ...terms.map((term) => seconds(each.terms[term]))];
  });
  return element("section", { class: "card stack", "aria-labelledby": "why-there" },
    element("h3", { id: "why-there" }, "Why it ran there"),
    element("p", {}, `Policy ${choice.policy} took ${whereOf(choice.chosen)}: it foresaw the first token after ${seconds(choice.forecast_s)}`,
      choice.actual_s === null ? "." : `, and it came after ${seconds(choice.actual_s)}.`,
      ` It counted on ${plural(choice.cached_blocks ?? 0, "cached block")} and ${plural(choice.computed_tokens ?? 0, "token")} to compute.`),
    candidates.length ? table("Prices in seconds; the first line was taken. Prices within 2 % or 5 ms count as equal.", columns, rows,
      { rowClass: (at) => (at === 0 ? "chosen" : null), isSingle: true }) : null);
}

function whereOf(candidate) {
  const computing = candidate.source && candidate.source !== "local" ? `${candidate.source} → ${candidate.decode}` : `${candidate.decode} alone`;
  return candidate.peer && candidate.peer !== "none" ? `${computing}, prefix from ${candidate.peer}` : computing;
}
