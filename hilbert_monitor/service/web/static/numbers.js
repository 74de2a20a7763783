/* The numbers of a comparison: three large ones, and a table. */

import { h, optimizerMark, runLink, table } from "./dom.js";
import { DASH, fixed, plural, spread, value, whole } from "./format.js";
import { runs } from "./store.js";

/** Ratios are BASE over OURS, differences OURS minus BASE. */
export const BASE = "AdamW";
export const OURS = "RowNorm";

/** The largest number of runs in any mean of an optimizer. */
export const most = (spreads) => Math.max(0, ...Object.values(spreads).map((spread) => spread.runs ?? 0));

/** Three large numbers: two ratios, and the difference of the losses. */
export function cards({ ratios, difference, pairs = [] }) {
  return [
    factor("diameter", ratios?.diameter, "steps", "Row diameter D(S)", pairs.length),
    factor("perturbation_rms", ratios?.perturbation_rms, "perturbation", "Hilbert RMS on the panel", pairs.length),
    loss(difference ?? {}),
  ];
}

function factor(metric, current, noun, what, pairs) {
  const ratio = value(current?.now);
  const line = `${what}, ${BASE} / ${OURS}`;
  if (ratio === null || !(ratio > 0)) return card(metric, DASH, `no ratio of ${noun} yet`, line);
  const [size, word] = ratio >= 1 ? [ratio, "smaller"] : [1 / ratio, "larger"];
  const digits = size < 1000 ? 1 : 0;
  const shown = size.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  const some = current.pairs < pairs ? `, ${current.pairs} of ${pairs} pairs` : "";
  const at = value(current.step) === null ? "" : ` at step ${whole(current.step)}${some}`;
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

/** The present means, in the table that the report has too. */
export function values({ optimizers, aside = [] }) {
  const row = ([name, spreads]) => [
    optimizerMark(name),
    spread(spreads.validation_loss, (mean) => fixed(mean)),
    spread(spreads.step_diameter ?? spreads.diameter),
    spread(spreads.perturbation_rms),
    whole(most(spreads)),
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
