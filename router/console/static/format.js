// Numbers for people.

export function count(value) {
  return value === null || value === undefined ? "–" : Number(value).toLocaleString("en");
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100) return `${value.toFixed(0)} s`;
  if (value >= 1) return `${value.toFixed(2)} s`;
  if (value >= 0.01) return `${(value * 1e3).toFixed(0)} ms`;
  return value === 0 ? "0" : `${(value * 1e3).toFixed(1)} ms`;
}

export function share(value) {
  return value === null || value === undefined ? "–" : `${(100 * value).toFixed(0)} %`;
}

export function rate(value) {
  if (value === null || value === undefined) return "–";
  return value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; value >= 1024 && at < units.length - 1; at += 1) value /= 1024;
  return `${at === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${units[at]}`;
}

export function ago(thenSeconds, nowSeconds) {
  const passed = Math.max(0, nowSeconds - thenSeconds);
  if (passed < 60) return `${passed.toFixed(0)} s ago`;
  return passed < 3600 ? `${Math.round(passed / 60)} min ago` : `${(passed / 3600).toFixed(1)} h ago`;
}

export function plural(number, word) {
  return `${count(number)} ${word}${number === 1 ? "" : "s"}`;
}
