// Signs in, and shows one view at a time.

import * as api from "./api.js";
import { blocks } from "./blocks.js";
import { element, field, fill } from "./dom.js";
import { fleet } from "./fleet.js";
import { say } from "./notice.js";
import { pins } from "./pins.js";
import { playground } from "./playground.js";
import { requests } from "./requests.js";

/** Each view fills the page and returns what ends it, or nothing. It gets the rest of the address. */
const VIEWS = { fleet, requests, blocks, pins, playground };

const main = document.getElementById("main");
const signOut = document.getElementById("sign-out");
let leave = null;
let about = null;

async function show() {
  leave?.();
  leave = null;
  if (about === null && !(await signedIn())) return;
  const [name, ...rest] = location.hash.slice(1).split("/");
  const view = Object.hasOwn(VIEWS, name) ? name : "fleet";
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${view} – twostroke console`;
  fill(main);
  leave = VIEWS[view](main, about, decodeURIComponent(rest.join("/"))) ?? null;
}

async function signedIn() {
  if (api.key()) {
    try {
      about = await api.read("about");
      signOut.hidden = false;
      fill(document.getElementById("about"), `${about.model} · ${about.router} · ${about.version}`);
      return true;
    } catch (error) {
      if (error.status === 401) api.setKey("");
      askForKey(error.status === 401 ? "This key is not an operator's key of this cluster." : error.message);
      return false;
    }
  }
  askForKey("");
  return false;
}

function askForKey(problem) {
  signOut.hidden = true;
  const input = element("input", { type: "password", autocomplete: "off", spellcheck: "false", required: true });
  const form = element("form", { class: "card stack", onsubmit: (event) => {
    event.preventDefault();
    api.setKey(input.value);
    show();
  } },
    element("h2", {}, "Sign in"),
    element("p", { class: "muted" }, "The console shows requests of all tenants and acts on workers. It takes an operator's key: ",
      element("code", {}, "twostroke console"), " prints an address with it, ",
      element("code", {}, "twostroke keys add --operator"), " makes one for a colleague."),
    problem ? element("p", { role: "alert", class: "status bad" }, problem) : null,
    field("Operator's key", input, "It stays in this tab, and is forgotten when the tab is closed."),
    element("div", {}, element("button", { class: "main", type: "submit" }, "Sign in")));
  fill(main, form);
  input.focus();
}

signOut.addEventListener("click", () => {
  api.setKey("");
  about = null;
  fill(document.getElementById("about"));
  say("");
  show();
});

window.addEventListener("hashchange", async () => {
  api.takeKeyFromAddress();
  say("");
  await show();
  // What had the focus may be gone: the keyboard goes on in the new view, not at the top of the page.
  if (document.activeElement === document.body) main.focus();
});
api.takeKeyFromAddress();
show();
