// Asks again and again while the page is looked at, and not at all while it is hidden.

const PERIOD_MS = 1000;
const SLOW_MS = 5000;

/** Call `look` now and every second, one call at a time. Returns what ends it. */
export function live(look, fail, periodMs = PERIOD_MS) {
  let timer = 0;
  let hasEnded = false;
  let isLooking = false;

  async function turn() {
    clearTimeout(timer);
    if (hasEnded || isLooking || document.hidden) return;
    isLooking = true;
    let next = periodMs;
    try {
      await look(() => hasEnded);
    } catch (error) {
      next = SLOW_MS;
      if (!hasEnded) fail(error);
    }
    isLooking = false;
    if (!hasEnded) timer = setTimeout(turn, next);
  }

  document.addEventListener("visibilitychange", turn);
  turn();
  return () => {
    hasEnded = true;
    clearTimeout(timer);
    document.removeEventListener("visibilitychange", turn);
  };
}
