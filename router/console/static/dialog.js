// Asks before anything is done, and names what will happen.

import { act } from "./api.js";
import { element, fill } from "./dom.js";
import { say } from "./notice.js";

const dialog = document.getElementById("dialog");

/**
 * Ask, then call the router. `what` has a title, sentences that say what will happen, controls, the word on the button,
 * the call, a function that returns its body, and what is said until the router has answered.
 */
export function confirm({ title, consequences, controls = [], word, isDangerous = false, call, body, command = null, done, waiting = "It is being done." }) {
  const problem = element("p", { role: "alert" });
  const progress = element("p", { class: "small muted", role: "status" });
  const cancel = element("button", { type: "button", onclick: () => dialog.close() }, "Cancel");
  const go = element("button", { type: "submit", class: isDangerous ? "danger" : "main" }, word);
  const form = element("form", { class: "stack", method: "dialog", onsubmit: async (event) => {
    event.preventDefault();
    const asks = [go, cancel].map((button) => button.textContent);
    go.disabled = true;
    cancel.textContent = "Close";
    fill(problem);
    fill(progress, `${waiting} Closing this window stops nothing.`);
    try {
      const said = await act(call, body());
      if (form.isConnected) dialog.close();
      say(said.done);
      done?.();
    } catch (error) {
      if (!form.isConnected || !dialog.open) say(error.message, { isBad: true });
      problem.className = "status bad";
      fill(problem, error.message);
      fill(progress);
      go.disabled = false;
      [go.textContent, cancel.textContent] = asks;
    }
  } },
    element("h2", { id: "dialog-title" }, title),
    consequences.map((sentence) => element("p", {}, sentence)),
    controls,
    command === null ? null : element("p", { class: "small muted" }, "The same on a command line: ", element("code", {}, command)),
    progress,
    problem,
    element("div", { class: "row" }, go, cancel));
  fill(dialog, form);
  dialog.showModal();
  cancel.focus();
}
