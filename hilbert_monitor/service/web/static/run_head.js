/* The top of a run's page, and the list of its alerts. */

import { alertCard } from "./alerts.js";
import { h, optimizerMark, stateMark } from "./dom.js";
import { ageMark, clip, duration, number, percent, plural, seconds, value, whole } from "./format.js";
import { liveMarks } from "./remark_marks.js";

const ALERTS = 100;

/** The state of a run, its optimizer, model and seed, in a line. */
export function line(summary, { last_step: last } = {}) {
  const { id, label, status, optimizer, model, seed, attempts, step, time } = summary;
  const facts = [model, seed === null ? null : `seed ${seed}`, attempts > 1 ? plural(attempts, "attempt") : null];
  return [
    stateMark(status),
    optimizerMark(optimizer),
    facts.filter(Boolean).map((fact) => h("span", {}, fact)),
    h("span", {}, `step ${whole(step)}`, last ? ` of ${whole(last)}` : null, time ? [", ", ageMark(time)] : null),
    label && label !== id ? h("span", { class: "id" }, id) : null,
    liveMarks(summary),
  ];
}

/** The error that ended a run, and problems of its log. */
export function troubles({ status, problem, error, message, torn }) {
  const failed = error || message;
  const lost = `${plural(torn, "torn line")} of its log ${torn === 1 ? "is" : "are"} skipped.`;
  return [
    problem ? h("p", { class: "trouble" }, problem) : null,
    failed ? h("p", { class: "trouble" }, h("b", {}, error || (status === "killed" ? "Killed" : "Failed")), " ", clip(message ?? "", 2000)) : null,
    torn ? h("p", { class: "about" }, lost) : null,
  ];
}

/** How quickly a run goes, and how long it will still take. */
function speed({ steps_per_second: steps, tokens_per_second: tokens, seconds_left: left }) {
  const pace = value(steps);
  const round = (x) => whole(Number(value(x).toPrecision(3)));
  return [
    pace === null ? null : pace >= 1 ? ["steps a second", number(pace, 3)] : ["a step", seconds(1 / pace)],
    value(tokens) === null ? null : ["tokens a second", value(tokens) < 10 ? number(tokens, 3) : round(tokens)],
    value(left) === null ? null : ["left", duration(left)],
  ].filter(Boolean);
}

/** The last values of a run, and its pace, as far as that is known. */
export function figures(summary, pace = {}) {
  const entries = [
    ["D(S)", number(summary.diameter)],
    ["of its ceiling", value(summary.saturation) === null ? null : percent(summary.saturation)],
    ["Hilbert RMS", number(summary.perturbation_rms)],
    ["validation loss", number(summary.validation_loss)],
    ["training loss", number(summary.train_loss)],
    ["learning rate", number(summary.learning_rate, 3)],
    ["alerts", whole(summary.alerts)],
    ...speed(pace),
  ];
  const bad = (name) => (name === "alerts" && summary.alerts ? "bad" : null);
  const figure = ([name, text]) => h("div", { class: bad(name) }, h("dd", {}, text), h("dt", {}, name));
  return entries.filter(([, text]) => text !== null).map(figure);
}

/** The alerts of a run, newest first. */
export function alertList(id, alerts) {
  const title = h("h2", {}, "Alerts");
  if (!alerts.length) return [title, h("p", { class: "about" }, "No step has blown up.")];
  const shown = alerts.slice(-ALERTS).reverse();
  const left = `The last ${shown.length} of ${whole(alerts.length)}.`;
  const item = (alert) => h("li", { "data-step": alert.step }, alertCard(alert, id));
  return [
    title,
    shown.length < alerts.length ? h("p", { class: "about" }, left) : null,
    h("ol", { class: "alerts" }, shown.map(item)),
  ];
}
