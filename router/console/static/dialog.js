// Asks before anything is done, and names what will happen.

import { act } from "./api.js";
import { element, fill } from "./dom.js";
import { say } from "./notice.js";

const dialog = document.getElementById("dialog");

/**
 * Ask, then call the router. `what` has a title, sentences that say what will happen, controls, the word on the button,
 * the call and a function that returns its body.
 */
export function confirm({ title, consequences, controls = [], word, isDangerous = false, call, body, command = null, done }) {
  const problem = element("p", { role: "alert" });
  const cancel = element("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const go = element("button", { type: "submit", class: isDangerous ? "danger" : "main" }, word);
  const form = element("form", { class: "stack", method: "dialog", onsubmit: async (event) => {
    event.preventDefault();
    go.disabled = true;
    go.textContent = `${word} …`;
    fill(problem);
    try {
      const said = await act(call, body());
      dialog.close();
      say(said.done);
      done?.();
    } catch (error) {
      problem.className = "status bad";
      fill(problem, error.message);
      go.disabled = false;
      go.textContent = word;
    }
  } },
    element("h2", { id: "dialog-title" }, title),
    consequences.map((sentence) => element("p", {}, sentence)),
    controls,
    command === null ? null : element("p", { class: "small muted" }, "The same on a command line: ", element("code", {}, command)),
    problem,
    element("div", { class: "row" }, go, cancel));
  fill(dialog, form);
  dialog.showModal();
  cancel.focus();
}
