/* The title of the browser's tab begins with the number of alerts that nobody has acknowledged. */

const title = document.querySelector("title");
let prefix = "";

/** Show a number; zero is not shown. */
export function countInTitle(count) {
  prefix = count ? `(${count}) ` : "";
  mark();
}

function mark() {
  const text = title.textContent.replace(/^\(\d+\) /, "");
  if (title.textContent !== prefix + text) title.textContent = prefix + text;
}

new MutationObserver(mark).observe(title, { childList: true, characterData: true, subtree: true }); // views rename it
