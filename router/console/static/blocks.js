// Where a prompt's blocks lie: which worker holds how many of its first ones, and on which tier.

import * as api from "./api.js";
import { bar, element, field, fill, legend, select, table } from "./dom.js";
import { count, plural } from "./format.js";

const TIERS = ["device", "host", "disk"];

export function blocks(main, about) {
  const kind = select([["chat", "A chat with this message"], ["text", "A completion of this text"]], "chat");
  const system = element("textarea", { rows: "2" });
  const text = element("textarea", { required: true, rows: "4" });
  const tenant = element("input", { spellcheck: "false" });
  const salt = element("input", { spellcheck: "false" });
  const model = select([["", about.model], ...about.named_models.map((name) => [name, name])]);
  const systemField = field("System message", system);
  const shown = element("div", { class: "stack", "aria-live": "polite" });
  kind.addEventListener("change", () => { systemField.hidden = kind.value !== "chat"; });
  const form = element("form", { class: "card stack", onsubmit: async (event) => {
    event.preventDefault();
    fill(shown, element("p", { class: "muted" }, "Asking …"));
    const messages = [...(system.value ? [{ role: "system", content: system.value }] : []), { role: "user", content: text.value }];
    const prompt = kind.value === "chat" ? { messages } : { prompt: text.value };
    try {
      fill(shown, ...mapOf(await api.act("blocks", { ...prompt, tenant: tenant.value, cache_salt: salt.value, model: model.value })));
    } catch (error) {
      fill(shown, element("p", { role: "alert", class: "status bad" }, error.message));
    }
  } },
    field("Prompt", kind), systemField, field("Text", text),
    element("details", {}, element("summary", {}, "Whose prompt"),
      element("div", { class: "fields" }, field("Tenant", tenant), field("cache_salt", salt), field("Model", model))),
    element("div", {}, element("button", { class: "main", type: "submit" }, "Find its blocks")));
  fill(main, element("div", { class: "title" }, element("h2", {}, "Where a prompt's blocks lie")), form, shown);
}

function mapOf(found) {
  const rest = found.rest_tokens ? `, and ${plural(found.rest_tokens, "token")} that fill no block` : "";
  const publics = found.public_blocks ? ` The first ${count(found.public_blocks)} are public: all tenants share them.` : "";
  return [
    element("section", { class: "card stack", "aria-labelledby": "holders" },
      element("div", {}, element("h3", { id: "holders" }, "Holders"),
        element("p", {}, `${plural(found.tokens, "token")} make ${plural(found.block_count, "block")} of ${count(found.block_size)}${rest}.${publics}`)),
      found.holders.length === 0 ? element("p", { class: "muted" }, "No worker holds the first block: all of it would be computed.") :
        table(`${plural(found.holder_count, "worker")} hold the beginning of it`, [["Worker", "wide"], ["Blocks", "number"], ["On which tier", "wide"]],
          found.holders.map((holder) => [holder.worker, count(deepest(holder)), holderBar(holder, found.block_count)])),
      legend(TIERS.map((tier) => [tier, tier]).concat([["free", "held by nobody there"]]))),
    element("section", { class: "card stack", "aria-labelledby": "block-list" },
      element("h3", { id: "block-list" }, "Blocks"),
      element("div", { class: "blocks" }, found.blocks.map((block, at) => blockChip(block, at, found.holders)),
        found.rest_text ? element("span", { class: "block" }, found.rest_text) : null),
      found.block_count > found.blocks.length ? element("p", { class: "small muted" }, `${plural(found.block_count - found.blocks.length, "later block")} not shown.`) : null),
  ];
}

function deepest(holder) {
  return Math.max(...Object.values(holder.down_to));
}

function holderBar(holder, total) {
  let before = 0;
  const parts = TIERS.filter((tier) => tier in holder.down_to).map((tier) => {
    const own = Math.max(0, holder.down_to[tier] - before);
    before = Math.max(before, holder.down_to[tier]);
    return [tier, own / Math.max(1, total), `${own} on ${tier}`];
  });
  return bar(parts, `${holder.worker}: ${parts.map(([, , title]) => title).join(", ")}, of ${total}`);
}

function blockChip(block, at, holders) {
  const tier = TIERS.find((each) => holders.some((holder) => (holder.down_to[each] ?? 0) > at));
  const where = holders.filter((holder) => deepest(holder) > at).map((holder) => holder.worker);
  const held = where.length ? `held by ${where.slice(0, 8).join(", ")}${where.length > 8 ? ` and ${where.length - 8} more` : ""}` : "held by nobody";
  return element("span", { class: `block${tier ? ` on-${tier}` : ""}`, title: `block ${at}, hash ${block.hash}, ${held}` }, block.text);
}
