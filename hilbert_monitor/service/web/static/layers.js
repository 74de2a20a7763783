/* The layers of a run: a strip for each, a column for some steps, coloured by how far a step is from the usual. */

import { h, say, table } from "./dom.js";
import { number, whole } from "./format.js";

const SPAN = 3; // doublings at which a colour is full
const RULERS = { matrix: "spectral norm", embedding: "largest row", vector: "RMS", "D(S)": "D(S)" };

/** The heat map of an answer of /api/runs/{id}/layers, or a sentence where there is none. */
export function layerMap({ steps, rows }) {
  const title = h("h2", {}, "Layers");
  if (!rows.length) return [title, about("Not measured: HilbertMonitor(layers=True) does.")];
  const reading = h("p", { class: "about reading", "aria-live": "off" }, legend());
  const line = (row) => [
    h("span", { title: row.name }, row.name),
    RULERS[row.ruler] ?? row.ruler,
    number(row.usual),
    strip(row, steps, (text) => say(reading, text ?? legend())),
  ];
  return [
    title,
    about("Each step over the weight, in the ruler of its layer; the head in D(S). From step " +
      `${whole(steps[0])} to ${whole(steps[steps.length - 1])}.`),
    table(["Layer", "Ruler", "Usual", "Steps"], rows.map(line), { class: "layers" }),
    reading,
  ];
}

const about = (text) => h("p", { class: "about" }, text);
const legend = () => "Red: above what is usual for the layer, full at 8 times. Blue: below, full at an eighth.";

/** One row of the map. The pointer reads it. */
function strip({ name, cells }, steps, tell) {
  const canvas = h("canvas", { width: cells.length, height: 1, role: "img", "aria-label": spoken(name, cells, steps) });
  const pen = canvas.getContext("2d");
  cells.forEach((cell, x) => {
    if (cell === null) return;
    pen.fillStyle = colour(cell);
    pen.fillRect(x, 0, 1, 1);
  });
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const x = Math.min(cells.length - 1, Math.max(0, Math.floor((cells.length * (event.clientX - box.left)) / box.width)));
    const value = cells[x] === null ? "not measured" : `${number(cells[x])} times the usual`;
    tell(`${name}, up to step ${whole(steps[x])}: ${value}`);
  });
  canvas.addEventListener("pointerleave", () => tell(null));
  return canvas;
}

/** What the row says to somebody who does not see it. */
function spoken(name, cells, steps) {
  const most = Math.max(...cells.map((cell) => cell ?? 0));
  return `${name}: at most ${number(most)} times the usual, up to step ${whole(steps[cells.indexOf(most)] ?? 0)}`;
}

/** Red above one and blue below it, the stronger the more doublings away. */
function colour(multiple) {
  const size = multiple > 0 ? Math.max(-1, Math.min(1, Math.log2(multiple) / SPAN)) : -1;
  return size > 0 ? `rgba(208, 49, 45, ${0.08 + 0.92 * size})` : `rgba(0, 114, 178, ${0.08 - 0.92 * size})`;
}
