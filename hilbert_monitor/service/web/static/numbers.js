/* The numbers of a comparison: three large ones, and a table. */

import { h, optimizerMark, runLink, table } from "./dom.js";
import { DASH, fixed, plural, spread, value, whole } from "./format.js";
import { runs } from "./store.js";

/** Ratios are of the first over the second, differences of the second minus the first. */
export const BASE = "AdamW";
export const OURS = "RowNorm";

/** How many runs an optimizer's means have in them, at most. */
export const most = (found) => Math.max(0, ...Object.values(found).map((one) => one.runs ?? 0));

/** The three figures that matter. */
export function cards({ ratios, difference, pairs = [] }) {
  return [
    factor("diameter", ratios?.diameter, "steps", "Row diameter D(S)", pairs.length),
    factor("perturbation_rms", ratios?.perturbation_rms, "perturbation", "Hilbert RMS on the panel", pairs.length),
    loss(difference ?? {}),
  ];
}

function factor(metric, found, noun, what, pairs) {
  const ratio = value(found?.now);
  const line = `${what}, ${BASE} / ${OURS}`;
  if (ratio === null || !(ratio > 0)) return card(metric, DASH, `no factor of ${noun} yet`, line);
  const [size, word] = ratio >= 1 ? [ratio, "smaller"] : [1 / ratio, "larger"];
  const digits = size < 1000 ? 1 : 0;
  const shown = size.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const some = found.pairs < pairs ? `, ${found.pairs} of ${pairs} pairs` : "";
  const at = value(found.step) === null ? "" : ` at step ${whole(found.step)}${some}`;
  return card(metric, `${shown}×`, size < 1.05 ? `the same ${noun}` : `${word} ${noun}`, line + at);
}

function loss({ mean, deviation, pairs, below, checkpoints }) {
  const line = `${OURS} minus ${BASE}`;
  if (value(mean) === null) return card("difference", DASH, "no paired validation loss yet", line);
  const room = value(deviation) === null ? "" : `, ± ${fixed(deviation)}`;
  const often = checkpoints ? `; below at ${below} of ${plural(checkpoints, "checkpoint")}` : "";
  const about = `${line}${room} over ${plural(pairs ?? 0, "pair")}${often}`;
  return card("difference", fixed(mean, 4, true), "validation loss", about);
}

function card(metric, figure, label, line) {
  const kind = figure === DASH ? "card lacking" : "card";
  const parts = [h("b", {}, figure), h("span", {}, label), h("small", {}, line)];
  return h("div", { class: kind, "data-metric": metric }, parts);
}

/** The numbers as they stand, as in the report. */
export function values({ optimizers, aside = [] }) {
  const row = ([name, found]) => [
    optimizerMark(name),
    spread(found.validation_loss, (mean) => fixed(mean)),
    spread(found.step_diameter ?? found.diameter),
    spread(found.perturbation_rms),
    whole(most(found)),
  ];
  const rows = Object.entries(optimizers).map(row);
  if (!rows.length) return null;
  const links = aside.flatMap((id, i) => [i ? ", " : "", runLink(id, runs.get(id)?.label)]);
  return [
    h("h2", {}, "Values now"),
    h("p", { class: "about" }, "Mean ± one sample standard deviation over seeds"),
    table(["LM head", "Validation loss", "D(S)", "Hilbert RMS", "Runs"], rows),
    links.length ? h("p", { class: "about aside" }, "Drawn, but in no mean: ", links) : null,
  ];
}
