/* What a panel says to those who do not see it: a summary of its curves, and one value of a curve. */

import { number, percent, plural, seconds, whole } from "./format.js";
import { isMarks, keyOf, plain } from "./traces.js";

const SPOKEN = 8;

/** The curves that can be read, with their places among the traces of a figure: {trace, index, name}. */
export function readable({ data = [] } = {}, hidden = new Set()) {
  const named = data.map((trace, index) => ({ trace, index, name: plain(trace.meta ?? trace.name) }));
  const wanted = ({ trace }) => trace.hoverinfo !== "skip" && !isMarks(trace) && !hidden.has(keyOf(trace));
  return named.filter(({ trace }) => wanted({ trace }) && trace.y.some((y) => y !== null));
}

/** A panel in a few sentences: its axis, and the last value and the range of each of its curves. */
export function summary(title, figure, hidden) {
  const curves = readable(figure, hidden);
  if (!curves.length) return `${title}: no curve is shown.`;
  const more = curves.length > SPOKEN ? ` And ${plural(curves.length - SPOKEN, "more curve")}.` : "";
  const marks = figure.data.filter((trace) => isMarks(trace) && trace.mode === "markers");
  const counted = marks.map((trace) => ` ${plural(trace.x.length, "mark")} of ${plain(trace.name)}.`).join("");
  return `${title}. ${curves.slice(0, SPOKEN).map((curve) => account(curve, figure)).join(" ")}${more}${counted}`;
}

function account({ trace, name }, figure) {
  const places = trace.y.flatMap((y, i) => (y === null ? [] : [i]));
  const least = places.reduce((a, b) => (trace.y[b] < trace.y[a] ? b : a));
  const most = places.reduce((a, b) => (trace.y[b] > trace.y[a] ? b : a));
  const last = places.at(-1);
  const range = `between ${size(trace, least)} and ${size(trace, most)}`;
  return `${name}: ${reading(trace, last)} at ${where(trace.x[last], figure)}, ${range}.`;
}

/** One value of a curve: "AdamW: 0.0123 at 1,250 updates". */
export const point = ({ trace, name }, i, figure) => `${name}: ${reading(trace, i)} at ${where(trace.x[i], figure)}`;

/** A place on the x axis with its unit. */
function where(x, figure) {
  const title = figure.layout?.xaxis?.title?.text ?? "";
  return `${Number.isInteger(x) ? whole(x) : number(x)} ${title}`.trim();
}

/** What the hover box says of a value: the value, a text beside it, or both. */
function reading(trace, i) {
  const valued = !trace.hovertemplate || trace.hovertemplate.includes("%{y");
  return [valued ? size(trace, i) : null, plain(trace.customdata?.[i])].filter(Boolean).join(" ");
}

/** A value in the unit in which the hover box writes it. */
function size({ y, hovertemplate = "" }, i) {
  const [, format = ""] = hovertemplate.match(/%\{y:([^}]*)\}/) ?? [];
  if (format.endsWith("%")) return percent(y[i]);
  return format.endsWith("s") ? seconds(y[i]) : number(y[i]);
}
