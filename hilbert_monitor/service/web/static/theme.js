/* Light or dark: as the system says, or as the visitor chose, which this browser remembers. */

import { fill } from "./dom.js";

const KEY = "hilbert-monitor theme";
const DARK = "(prefers-color-scheme: dark)";
const CHOICES = { auto: ["◐", "as the system"], light: ["☀", "light"], dark: ["☾", "dark"] };
const root = document.documentElement;
const button = document.getElementById("theme-button");
const listeners = new Set();
const system = matchMedia(DARK); // listened to, and never read

const chosen = () => root.dataset.theme ?? "auto";

/** Whether the page is dark now. A query that is read between a change and its event has no event in Chromium. */
export const isDark = () => (chosen() === "auto" ? matchMedia(DARK).matches : chosen() === "dark");

/** Call back whenever the page may have turned light or dark; returns a function that ends it. */
export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

/** Let the button choose, and follow the system and the other tabs. */
export function offerThemes() {
  button.addEventListener("click", () => {
    const names = Object.keys(CHOICES);
    const next = names[(names.indexOf(chosen()) + 1) % names.length];
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // no storage: the choice lasts as long as this page
    }
    take(next);
  });
  system.addEventListener("change", tell);
  addEventListener("storage", ({ key, newValue }) => key === KEY && take(newValue ?? "auto"));
  take(chosen());
}

function take(name) {
  if (name === "light" || name === "dark") root.dataset.theme = name;
  else delete root.dataset.theme;
  const [sign, words] = CHOICES[chosen()];
  fill(button, sign);
  button.title = `Colours: ${words}`;
  button.setAttribute("aria-label", `Colours: ${words}. Change`);
  tell();
}

const tell = () => listeners.forEach((listener) => listener());
