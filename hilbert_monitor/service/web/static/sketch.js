/* A first drawing of a panel: its curves alone, without axes. It is there at once, while Plotly is being compiled. */

import { keyOf } from "./traces.js";

const DASHES = { dot: "1 3", dash: "6 4", dashdot: "6 3 1 3", longdash: "10 4" };

/**
 * Curves as SVG, on a ground of one by one that CSS stretches; null if there are none. Marks, and curves with an axis
 * on the right, are left to Plotly.
 * @param {any[]} data traces
 * @param {{xaxis: any, yaxis: any}} layout
 * @param {Set<string>} hidden keys of curves
 */
export function sketch(data, { xaxis, yaxis }, hidden) {
  const [width, height] = [xaxis, yaxis].map((axis) => (axis.type === "log" ? Math.log10 : Number));
  const curves = data.filter((trace) => !trace.yaxis && !hidden.has(keyOf(trace)));
  const [left, right] = xaxis.range ?? extent(curves, "x", width);
  const [bottom, top] = yaxis.range ?? extent(curves, "y", height, (x) => width(x) >= left && width(x) <= right);
  if (!(right > left) || !(top >= bottom)) return null;
  const room = yaxis.range ? 0 : (top - bottom) / 18 || 1;
  const place = (x, y) => [(x - left) / (right - left), (top + room - y) / (top - bottom + 2 * room)];
  const paths = curves.map((trace) => path(trace, (x, y) => place(width(x), height(y))));
  return element("svg", { class: "sketch", viewBox: "0 0 1 1", preserveAspectRatio: "none", "aria-hidden": true }, paths);
}

/** A line through the points of a trace, with a gap where a value is missing. */
function path({ x, y, line = {}, opacity = 1 }, place) {
  let [text, gap] = ["", true];
  x.forEach((_, i) => {
    const at = y[i] === null ? [NaN] : place(x[i], y[i]);
    const there = at.every(Number.isFinite); // a zero has no place on a logarithmic axis
    if (there) text += (gap ? "M" : "L") + at.map((part) => part.toFixed(4)).join(" ");
    gap = !there;
  });
  const dash = DASHES[line.dash] ? { "stroke-dasharray": DASHES[line.dash] } : {};
  return element("path", { d: text, stroke: line.color ?? "currentColor", "stroke-width": line.width ?? 2, opacity, ...dash });
}

/** The smallest and the largest coordinate of some traces, of points whose x is within. */
function extent(traces, name, measure, within = () => true) {
  let [least, most] = [Infinity, -Infinity];
  for (const trace of traces) trace.x.forEach((x, i) => {
    if (trace[name][i] === null || !within(x)) return;
    least = Math.min(least, measure(trace[name][i]));
    most = Math.max(most, measure(trace[name][i]));
  });
  return [least, most];
}

function element(tag, attributes, children = []) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, String(value));
  made.append(...children);
  return made;
}
