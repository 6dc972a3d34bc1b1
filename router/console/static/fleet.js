// The fleet as it is now, and what an operator can do to a worker.

import * as api from "./api.js";
import { confirm } from "./dialog.js";
import { bar, check, element, field, fill, legend, spark } from "./dom.js";
import { bytes, count, plural, rate, seconds, share } from "./format.js";
import { live } from "./live.js";

const PAGE_STATES = ["active", "arriving", "pinned", "cached", "quarantined", "free"];
const GOOD = new Set(["serving"]);
const BAD = new Set(["dead", "refused"]);
const SAMPLES = 60;

export function fleet(main, about) {
  const speeds = [];
  const figures = element("div", { class: "figures" });
  const roles = element("div", { class: "grid" });
  const listing = element("div", {});
  const trouble = element("p", { role: "alert" });
  const find = element("input", { type: "search", maxlength: "100", spellcheck: "false" });
  const workers = new Map();
  fill(main,
    element("div", { class: "title" }, element("h2", {}, "Fleet"),
      element("p", { class: "small muted" }, `${about.model}, pages in ${about.kv_form ?? "an unknown form"}, blocks of ${count(about.block_size)} tokens`)),
    trouble,
    element("section", { class: "card", "aria-label": "Throughput" }, figures),
    roles,
    element("section", { class: "card stack", "aria-labelledby": "workers-title" },
      element("div", { class: "title" }, element("h3", { id: "workers-title" }, "Workers"), field("Find by name", find)),
      listing,
      legend(PAGE_STATES.map((state) => [state, state]))));

  async function look(isOver) {
    const now = await api.read("fleet", find.value ? { find: find.value } : {});
    if (isOver()) return;
    fill(trouble);
    if (now.tokens_per_s !== null) speeds.push(now.tokens_per_s);
    if (speeds.length > SAMPLES) speeds.shift();
    fill(figures, ...figuresOf(now, speeds));
    fill(roles, now.roles.filter((role) => Object.keys(role.statuses).length > 0).map(roleCard));
    showWorkers(listing, workers, now);
  }

  const stop = live(look, (error) => fill(trouble, element("span", { class: "status bad" }, error.message)));
  find.addEventListener("input", () => workers.clear());
  return stop;
}

function figuresOf(now, speeds) {
  const sum = (name) => now.roles.reduce((total, role) => total + role[name], 0);
  return [
    figure("Tokens per second", rate(now.tokens_per_s), spark(speeds, "tokens per second over the last minute")),
    figure("Prompt tokens reused", share(now.hit_rate), element("span", { class: "small muted" }, `now ${share(now.hit_rate_now)}`)),
    figure("Running", count(sum("running")), element("span", { class: "small muted" }, `${count(sum("waiting"))} waiting`)),
    figure("Tokens to compute", count(sum("queued_tokens")), element("span", { class: "small muted" }, "of prompts, queued")),
    figure("Workers", count(now.worker_count), element("span", { class: "small muted" }, `router is ${now.state}`)),
  ];
}

function figure(name, value, more) {
  return element("div", { class: "figure" }, element("div", { class: "small muted" }, name), element("div", { class: "value" }, value), more);
}

function roleCard(role) {
  const statuses = Object.entries(role.statuses).map(([status, number]) => statusText(status, `${number} ${status}`));
  const total = PAGE_STATES.reduce((sum, state) => sum + role.pages[state], 0);
  return element("section", { class: "card stack", "aria-label": `${role.role} workers` },
    element("h3", {}, role.role === "prefill" ? "Prefill" : "Decode"),
    element("div", { class: "facts" }, statuses),
    pageBar(role.pages, total, `pages of ${role.role} workers`),
    element("div", { class: "facts" }, fact("running", count(role.running)), fact("waiting", count(role.waiting)),
      fact("tokens queued", count(role.queued_tokens))));
}

function statusText(status, text = status) {
  const kind = GOOD.has(status) ? "good" : BAD.has(status) ? "bad" : "warn";
  return element("span", { class: `status ${kind}` }, text);
}

function fact(name, value) {
  return element("span", {}, `${name} `, element("b", {}, value));
}

function pageBar(pages, total, label) {
  const said = PAGE_STATES.filter((state) => pages[state] > 0).map((state) => `${count(pages[state])} ${state}`).join(", ");
  return element("div", {}, bar(PAGE_STATES.map((state) => [state, pages[state] / Math.max(1, total), `${pages[state]} ${state}`]), `${label}: ${said}`),
    element("div", { class: "small muted" }, said || "no pages yet"));
}

/** Draw each worker again in its own place, so that a button keeps the focus. */
function showWorkers(listing, known, now) {
  const names = new Set(now.workers.map((worker) => worker.worker));
  const isSame = names.size === known.size && [...names].every((name) => known.has(name));
  if (!isSame) {
    known.clear();
    const more = now.worker_count - now.workers.length;
    fill(listing, now.workers.map((worker) => {
      const row = workerRow(worker);
      known.set(worker.worker, row);
      return row.drawn;
    }), more > 0 ? element("p", { class: "small muted" }, `${plural(more, "other worker")} not shown: those with the longest queues are.`) : null,
    now.workers.length === 0 ? element("p", { class: "muted" }, "No worker.") : null);
  }
  for (const worker of now.workers) known.get(worker.worker).update(worker);
}

function workerRow(first) {
  let latest = first;
  const name = element("div", {});
  const load = element("div", { class: "facts" });
  const pages = element("div", { class: "pages" });
  const actions = element("div", { class: "row" },
    element("button", { type: "button", "aria-label": `Drain ${first.worker}`, onclick: () => askToDrain(latest) }, "Drain …"),
    element("button", { type: "button", "aria-label": `Change the role of ${first.worker}`, onclick: () => askToSwitch(latest) }, "Role …"));
  return {
    drawn: element("div", { class: "worker", role: "group", "aria-label": first.worker }, name, load, pages, actions),
    update(worker) {
      latest = worker;
      fill(name, element("div", {}, element("strong", {}, worker.worker)), element("div", { class: "small" }, worker.role, " · ", statusText(worker.status)));
      fill(load, fact("runs", worker.slots ? `${worker.running} of ${worker.slots}` : count(worker.running)), fact("waits", count(worker.waiting)),
        worker.queued_tokens ? fact("queue", `${count(worker.queued_tokens)} tokens${worker.queued_s >= 0.001 ? `, ${seconds(worker.queued_s)}` : ""}`) : null,
        worker.busy !== null ? fact("busy with prompts", share(worker.busy)) : null,
        worker.step_s ? fact("step", seconds(worker.step_s)) : null,
        worker.hit_rate !== null ? fact("reused", share(worker.hit_rate)) : null);
      const total = PAGE_STATES.reduce((sum, state) => sum + worker.pages[state], 0);
      const form = worker.form ? ` · ${worker.form}` : "";
      fill(pages, pageBar(worker.pages, total, `pages of ${worker.worker}`),
        element("div", { class: "small muted" }, `${count(total)} pages${form}`,
          worker.tiers.map((tier) => ` · ${tier.tier} ${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}`),
          worker.further_pages ? ` · further pages ${count(Object.values(worker.further_pages).reduce((a, b) => a + b, 0))}` : ""));
      actions.firstChild.disabled = !GOOD.has(worker.status);
      actions.lastChild.disabled = !GOOD.has(worker.status);
    },
  };
}

function askToDrain(worker) {
  const deadline = element("input", { type: "number", min: "0", max: "3600", step: "1", value: "30" });
  const restart = check("Start it again afterwards", true);
  const force = check("Even if it is the last one of its role");
  confirm({
    title: `Drain ${worker.worker}?`,
    consequences: [
      `It takes no new requests. What it runs now (${plural(worker.running, "request")}) ends there, or goes on at other workers with the tokens so far.`,
      "Without a new start it stays away, until a worker is added.",
    ],
    controls: [field("Seconds until what is still open is cut off, and goes on elsewhere", deadline), restart.label, force.label],
    word: "Drain",
    waiting: "It is being drained: it finishes what it runs or hands it over, leaves, and shows up again if it starts again.",
    isDangerous: true,
    call: "drain",
    body: () => ({ worker: worker.worker, deadline_s: Number(deadline.value), restart: restart.box.checked, force: force.box.checked }),
    command: `twostroke drain ${worker.worker} [--restart] [--force] [--deadline S]`,
  });
}

function askToSwitch(worker) {
  const other = worker.role === "prefill" ? "decode" : "prefill";
  confirm({
    title: `Let ${worker.worker} become a ${other} worker?`,
    consequences: [
      `It hands over what it runs now (${plural(worker.running, "request")}), and serves as a ${other} worker with its model and its cache.`,
      "Counts stay as they are from then on, until the planner decides again (twostroke scale --auto).",
    ],
    word: `Switch to ${other}`,
    waiting: "It hands over what it runs, and starts in its new role.",
    isDangerous: true,
    call: "role",
    body: () => ({ worker: worker.worker, role: other }),
    command: `twostroke role ${worker.worker} ${other}`,
  });
}
