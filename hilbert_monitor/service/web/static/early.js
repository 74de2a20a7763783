/* Runs while the page is parsed, and not after all its modules: a view with panels waits longest for Plotly. */

if (location.pathname === "/" || /^\/runs\/[^/]+$/.test(location.pathname)) {
  const script = document.createElement("script");
  script.id = "plotly";
  script.src = document.querySelector("meta[name=plotly]").content;
  script.onerror = () => script.remove(); // drawing.js tries again
  document.head.append(script);
}
