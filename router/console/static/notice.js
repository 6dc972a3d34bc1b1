// One line at the bottom of the page that tells what has happened; screen readers read it out.

const notice = document.getElementById("notice");
let clearing = 0;

export function say(text, { isBad = false } = {}) {
  clearTimeout(clearing);
  notice.classList.toggle("bad", isBad);
  notice.textContent = text;
  if (text) clearing = setTimeout(() => { notice.textContent = ""; }, isBad ? 20_000 : 10_000);
}
