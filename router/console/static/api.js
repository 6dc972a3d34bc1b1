// Calls to the router, with the operator's key. The key is kept for as long as the tab is open.

const STORED = "twostroke-operator-key";
const FRAGMENT = "#key=";

export class CallFailed extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** Take the key out of the address, as `twostroke console` prints it: it must not stay in the history. */
export function takeKeyFromAddress() {
  if (!location.hash.startsWith(FRAGMENT)) return;
  setKey(decodeURIComponent(location.hash.slice(FRAGMENT.length)));
  history.replaceState(null, "", "/console#fleet");
}

export function key() {
  return sessionStorage.getItem(STORED) ?? "";
}

export function setKey(value) {
  if (value) sessionStorage.setItem(STORED, value.trim());
  else sessionStorage.removeItem(STORED);
}

export function read(name, parameters = {}) {
  const query = new URLSearchParams(parameters).toString();
  return call(`/console/api/${name}${query ? `?${query}` : ""}`, { method: "GET" });
}

export function act(name, body) {
  return call(`/console/api/${name}`, { method: "POST", body: JSON.stringify(body) });
}

/** A request whose response is read as it comes. */
export async function open(path, body, signal) {
  const response = await send(path, { method: "POST", body: JSON.stringify(body), signal });
  if (!response.ok) throw await failure(response);
  return response;
}

async function call(path, options) {
  const response = await send(path, options);
  if (!response.ok) throw await failure(response);
  return response.json();
}

async function send(path, options) {
  const headers = { authorization: `Bearer ${key()}` };
  if (options.body !== undefined) headers["content-type"] = "application/json";
  try {
    return await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit", redirect: "error" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new CallFailed(0, "the router does not answer");
  }
}

async function failure(response) {
  let message = `status ${response.status}`;
  try {
    const body = await response.json();
    message = body.error?.message ?? message;
  } catch {
    // Not JSON: a proxy in between, say.
  }
  return new CallFailed(response.status, message);
}
