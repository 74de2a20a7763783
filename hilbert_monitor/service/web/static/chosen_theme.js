/* Runs before the first paint, so that a chosen theme does not flash: see theme.js. */

try {
  const theme = localStorage.getItem("hilbert-monitor theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // no storage: the page follows the system
}
