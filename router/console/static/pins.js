// Pins: prefixes that workers keep.

import * as api from "./api.js";
import { confirm } from "./dialog.js";
import { element, field, fill, select, table } from "./dom.js";
import { ago, bytes, count, plural, seconds } from "./format.js";
import { live } from "./live.js";

const PERIOD_MS = 3000;
const HOUR_S = 3600;

export function pins(main, about) {
  const listing = element("div", {});
  let shown = "";
  async function look(isOver) {
    const now = await api.read("pins");
    const text = JSON.stringify(now);
    if (isOver() || text === shown) return;
    shown = text;
    fill(listing, tableOf(now.pins, () => { shown = ""; }));
  }
  fill(main, element("div", { class: "title" }, element("h2", {}, "Pins")),
    element("section", { class: "card", "aria-label": "Pins" }, listing), form(about));
  return live(look, (error) => fill(listing, element("p", { role: "alert", class: "status bad" }, error.message)), PERIOD_MS);
}

function tableOf(entries, changed) {
  if (entries.length === 0) return element("p", { class: "muted" }, "No prefix is pinned.");
  const now = Date.now() / 1e3;
  return table(plural(entries.length, "pin"), [["Begins", "wide"], ["Owner", ""], ["Tenant", ""], ["Workers", ""], ["Bytes", "number"], ["Hits", "number"], ["Saved", "number"], ["Ends", ""], ["", ""]],
    entries.map((pin) => [
      element("span", {}, pin.text, element("div", { class: "small muted mono" }, pin.pin)), pin.owner, pin.tenant || "–", holders(pin.held),
      bytes(Math.max(0, ...pin.held.map((each) => each.bytes))), count(sum(pin.held, "hits")), seconds(sum(pin.held, "saved_s")),
      pin.expires_s === null ? "never" : pin.expires_s < now ? "now" : `in ${ago(now, pin.expires_s).replace(" ago", "")}`,
      element("button", { type: "button", class: "danger", "aria-label": `Remove pin ${pin.pin}`, onclick: () => askToRemove(pin, changed) }, "Remove"),
    ]));
}

function sum(entries, name) {
  return entries.reduce((total, each) => total + (each[name] ?? 0), 0);
}

function holders(held) {
  const states = new Map();
  for (const each of held) states.set(each.state, [...(states.get(each.state) ?? []), each]);
  return [...states].map(([state, entries]) => element("div", { class: `status ${state === "ready" ? "good" : state === "failed" ? "bad" : "warn"}`,
    title: entries.map((each) => `${each.worker} ${each.problem}`).join("\n") }, `${count(entries.length)} ${state}`));
}

function askToRemove(pin, changed) {
  confirm({
    title: "Remove this pin?",
    consequences: [`${plural(pin.held.length, "worker")} keep it now. Its blocks stay cached, and are evicted like others from then on.`,
      element("code", {}, pin.text)],
    word: "Remove",
    isDangerous: true,
    call: "pins/remove",
    body: () => ({ pin: pin.pin }),
    command: `twostroke pin remove ${pin.pin}`,
    done: changed,
  });
}

function form(about) {
  const kind = select([["system", "Chats that begin with this system message"], ["text", "Completions that begin with this text"]]);
  const text = element("textarea", { required: true, rows: "4" });
  const owner = element("input", { value: "console", required: true, spellcheck: "false" });
  const tenant = element("input", { spellcheck: "false" });
  const hours = element("input", { type: "number", min: "0", step: "any", value: "0" });
  const role = select([["", "All"], ["prefill", "Prefill"], ["decode", "Decode"]]);
  const model = select([["", about.model], ...about.named_models.map((name) => [name, name])]);
  return element("form", { class: "card stack", onsubmit: (event) => {
    event.preventDefault();
    confirm({
      title: "Pin this prefix?",
      consequences: [
        "Workers compute it now and keep its pages: they have that much less for others, up to their cap for pins.",
        tenant.value ? `It serves requests of tenant ${tenant.value}.` : "It serves requests without a tenant.",
        Number(hours.value) > 0 ? `It ends after ${hours.value} hours.` : "It stays until it is removed.",
      ],
      word: "Pin",
      call: "pins/add",
      body: () => ({ [kind.value]: text.value, owner: owner.value, tenant: tenant.value, model: model.value, role: role.value, ttl_s: HOUR_S * Number(hours.value) }),
      command: "twostroke pin add",
      done: () => { text.value = ""; },
    });
  } },
    element("h3", {}, "Pin a prefix"), field("What", kind), field("Text", text),
    element("div", { class: "fields" }, field("Owner", owner), field("Tenant", tenant), field("Workers", role), field("Model", model), field("Hours, 0: no end", hours)),
    element("div", {}, element("button", { class: "main", type: "submit" }, "Pin …")));
}
