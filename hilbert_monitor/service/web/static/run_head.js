/* The top of a run's page, and the list of its alerts. */

import { alertCard } from "./alerts.js";
import { h, optimizerMark, stateMark } from "./dom.js";
import { ageMark, clip, number, percent, plural, value, whole } from "./format.js";
import { liveMarks } from "./remark_marks.js";

const ALERTS = 100;

/** The state of a run, its optimizer, model and seed, in a line. */
export function line(summary) {
  const { id, label, status, optimizer, model, seed, attempts, step, time } = summary;
  const facts = [model, seed === null ? null : `seed ${seed}`, attempts > 1 ? plural(attempts, "attempt") : null];
  return [
    stateMark(status),
    optimizerMark(optimizer),
    facts.filter(Boolean).map((fact) => h("span", {}, fact)),
    h("span", {}, `step ${whole(step)}`, time ? [", ", ageMark(time)] : null),
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

/** The last values of a run. */
export function figures(summary) {
  const entries = [
    ["D(S)", number(summary.diameter)],
    ["of its ceiling", value(summary.saturation) === null ? null : percent(summary.saturation)],
    ["Hilbert RMS", number(summary.perturbation_rms)],
    ["validation loss", number(summary.validation_loss)],
    ["training loss", number(summary.train_loss)],
    ["learning rate", number(summary.learning_rate, 3)],
    ["alerts", whole(summary.alerts)],
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
