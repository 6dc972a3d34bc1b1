// Elements from values. Text goes in as text nodes alone: nothing that a client wrote is ever read as markup.

/** Make an element: element("p", {class: "muted", onclick: f}, "text", child). Null children are left out. */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "value") made.value = value;
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  put(made, ...children);
  return made;
}

/** Replace what an element holds. */
export function fill(parent, ...children) {
  parent.replaceChildren();
  put(parent, ...children);
  return parent;
}

function put(parent, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    parent.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

let fields = 0;

/** A labelled control; `control` is an input, a select or a textarea. */
export function field(label, control, hint = null) {
  const id = (control.id ||= `field-${(fields += 1)}`);
  const about = hint === null ? null : element("span", { class: "small muted", id: `${id}-hint` }, hint);
  if (about !== null) control.setAttribute("aria-describedby", about.id);
  return element("div", {}, element("label", { for: id }, label), control, about);
}

export function select(options, chosen = "") {
  return element("select", {}, options.map(([value, text]) => element("option", { value, selected: value === chosen }, text)));
}

export function check(label, isOn = false) {
  const box = element("input", { type: "checkbox" });
  box.checked = isOn;
  return { box, label: element("label", { class: "check" }, box, label) };
}

/**
 * A table whose rows become cards on narrow screens, with two facts beside each other or, if `isSingle`, one.
 * Columns: [heading, class]. Rows: arrays of cells.
 */
export function table(caption, columns, rows, { rowClass = () => null, isSingle = false } = {}) {
  const head = columns.map(([heading, kind]) => element("th", { scope: "col", class: kind }, heading));
  const lines = rows.map((cells, at) =>
    element("tr", { class: rowClass(at) }, cells.map((cell, column) =>
      element("td", { class: columns[column][1], "data-label": columns[column][0] }, cell))));
  return element("div", { class: "table" },
    element("table", { class: isSingle ? "stacked single" : "stacked" }, element("caption", {}, caption), element("thead", {}, element("tr", {}, head)),
      element("tbody", {}, lines)));
}

/** A bar of parts: [class, share, title]. Widths are set through the style object, which the page's policy allows. */
export function bar(parts, label) {
  return element("div", { class: "bar", role: "img", "aria-label": label },
    parts.filter(([, share]) => share > 0).map(([kind, share, title]) => {
      const part = element("span", { class: kind, title });
      part.style.width = `${(100 * share).toFixed(2)}%`;
      return part;
    }));
}

export function legend(entries) {
  return element("ul", { class: "legend" }, entries.map(([kind, text]) => element("li", {}, element("span", { class: kind }), text)));
}

/** A line of the latest values. */
export function spark(values, label) {
  const space = "http://www.w3.org/2000/svg";
  const drawn = document.createElementNS(space, "svg");
  const line = document.createElementNS(space, "polyline");
  const most = Math.max(1e-9, ...values);
  drawn.setAttribute("viewBox", "0 0 59 20");
  drawn.setAttribute("preserveAspectRatio", "none");
  drawn.setAttribute("class", "spark");
  drawn.setAttribute("role", "img");
  drawn.setAttribute("aria-label", label);
  line.setAttribute("points", values.map((value, at) => `${60 - values.length + at},${(19 - (18 * value) / most).toFixed(1)}`).join(" "));
  drawn.append(line);
  return drawn;
}
