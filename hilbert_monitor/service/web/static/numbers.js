/* The numbers of a comparison: three large ones, and a table. */

import { h, runLink, table } from "./dom.js";
import { DASH, fixed, grouped, number, plural, spread, value, whole } from "./format.js";
import { runs } from "./store.js";

/** The largest number of runs in any mean of a group. */
export const most = (spreads) => Math.max(0, ...Object.values(spreads).map((spread) => spread.runs ?? 0));

/** Three large numbers: two ratios and the difference of the losses, or the values of an optimizer that is alone. */
export function cards(answer) {
  const alone = new Set(answer.groups.map(({ optimizer }) => optimizer)).size === 1;
  if (!answer.contrasts.length && alone) return own(answer);
  return [
    factor("diameter", answer, "steps", "Row diameter D(S)"),
    factor("perturbation_rms", answer, "perturbation", "Hilbert RMS on the panel"),
    loss(answer),
  ];
}

function factor(metric, { contrasts, sides, pairs }, noun, what) {
  const known = contrasts.map(({ ratios }) => ratios[metric]).filter(({ now }) => value(now) > 0);
  const line = `${what}, ${sides.join(" / ")}`;
  if (!known.length) return card(metric, DASH, `no ratio of ${noun} yet`, line);
  const ratios = known.map(({ now }) => value(now));
  const [least, largest] = [Math.min(...ratios), Math.max(...ratios)];
  if (known.length > 1) {
    const [word, ends] = least >= 1 ? [`smaller ${noun}`, [least, largest]]
      : largest <= 1 ? [`larger ${noun}`, [1 / largest, 1 / least]]
      : [`ratio of ${noun}`, [least, largest]];
    return card(metric, `${span(ends.map(times), "–")}×`, word, `${line}: least and largest of ${whole(known.length)}`);
  }
  const [size, word] = least >= 1 ? [least, "smaller"] : [1 / least, "larger"];
  const [current] = known;
  const some = current.pairs < pairs.length ? `, ${current.pairs} of ${pairs.length} pairs` : "";
  const at = value(current.step) === null ? "" : ` at step ${whole(current.step)}${some}`;
  return card(metric, `${times(size)}×`, size < 1.05 ? `the same ${noun}` : `${word} ${noun}`, line + at);
}

/** The least and the largest, or one of them if they read alike. */
const span = ([least, largest], between) => (least === largest ? least : least + between + largest);

/** A ratio in one decimal, or in two digits where it is small. */
function times(size) {
  const digits = size < 0.95 ? 2 : size < 1000 ? 1 : 0;
  return Number.isFinite(size) ? grouped(size.toFixed(digits)) : number(size);
}

function loss({ contrasts, sides }) {
  const line = `${sides[1]} minus ${sides[0]}`;
  const known = contrasts.map(({ difference }) => difference).filter(({ mean }) => value(mean) !== null);
  if (!known.length) return card("difference", DASH, "no paired validation loss yet", line);
  if (known.length > 1) {
    const means = known.map(({ mean }) => value(mean));
    const ends = [Math.min(...means), Math.max(...means)].map((mean) => fixed(mean, 4, true));
    return card("difference", span(ends, " to "), "validation loss", `${line}: least and largest of ${whole(known.length)}`);
  }
  const [{ mean, deviation, pairs, below, checkpoints }] = known;
  const room = value(deviation) === null ? "" : `, ± ${fixed(deviation)}`;
  const often = checkpoints ? `; below at ${below} of ${plural(checkpoints, "checkpoint")}` : "";
  const about = `${line}${room} over ${plural(pairs ?? 0, "pair")}${often}`;
  return card("difference", fixed(mean, 4, true), "validation loss", about);
}

/** The values of the only optimizer: of its group with the lowest validation loss. */
function own({ optimizers }) {
  const groups = Object.entries(optimizers);
  const order = ([, { validation_loss: { mean } }]) => value(mean) ?? Infinity;
  const [name, spreads] = groups.reduce((best, group) => (order(group) < order(best) ? group : best), groups[0] ?? []);
  if (!spreads) return [card("diameter", DASH, "no run is counted yet", "")];
  const lowest = groups.length > 1 && order([name, spreads]) < Infinity;
  const where = lowest ? `${name}: the lowest loss of ${plural(groups.length, "group")}` : name;
  const shown = (metric, key, label, form) => {
    const { mean, deviation, runs: count } = spreads[key];
    if (value(mean) === null) return card(metric, DASH, `no ${label} yet`, where);
    const room = value(deviation) === null ? "" : ` ± ${number(deviation, 2)}`;
    return card(metric, form(mean), label, `${where}, ${plural(count, "run")}${room}`);
  };
  const digits = (mean) => number(mean, 3);
  return [
    shown("diameter", "step_diameter", "row diameter D(S)", digits),
    shown("perturbation_rms", "perturbation_rms", "Hilbert RMS", digits),
    shown("difference", "validation_loss", "validation loss", (mean) => fixed(mean)),
  ];
}

function card(metric, figure, label, line) {
  const kind = ["card", figure === DASH && "lacking", figure.length > 8 && "long"].filter(Boolean).join(" ");
  const parts = [h("b", {}, figure), h("span", {}, label), h("small", {}, line)];
  return h("div", { class: kind, "data-metric": metric }, parts);
}

/** The present means, in the table that the report has too; and the runs that are in none. */
export function values({ optimizers, groups, aside = [] }, drawn) {
  const colours = new Map(groups.map(({ name, colour }) => [name, colour]));
  const row = ([name, spreads]) => [
    groupMark(name, colours.get(name)),
    spread(spreads.validation_loss, (mean) => fixed(mean)),
    spread(spreads.step_diameter ?? spreads.diameter),
    spread(spreads.perturbation_rms),
    whole(most(spreads)),
  ];
  const rows = Object.entries(optimizers).map(row);
  if (!rows.length) return null;
  const links = aside.flatMap((id, i) => [i ? ", " : "", runLink(id, runs.get(id)?.label)]);
  const words = drawn ? "In no mean, and drawn as dotted lines: " : "In no mean, and not drawn: ";
  return [
    h("h2", {}, "Values now"),
    h("p", { class: "about" }, "Mean ± one sample standard deviation over runs that differ in the seed alone"),
    table(["LM head", "Validation loss", "D(S)", "Hilbert RMS", "Runs"], rows),
    links.length ? h("p", { class: "about aside" }, words, links) : null,
  ];
}

/** A group's name beside its colour. */
function groupMark(name, colour = "var(--soft)") {
  const dot = h("i", { class: "dot", style: { background: colour }, "aria-hidden": "true" });
  return h("span", { class: "optimizer" }, dot, name || DASH);
}
