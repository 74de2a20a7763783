/* The columns of the table of runs. */

import { STATES } from "./catalogue.js";
import { h, optimizerMark, runLink, stateMark } from "./dom.js";
import { DASH, ageMark, clip, number, plural, value, whole } from "./format.js";

const measured = (key) => ({ key, sort: (run) => value(run[key]), cell: (run) => number(run[key]), class: "number" });

/** The columns: how a run is sorted by one, and what its cell shows. */
export const COLUMNS = [
  { key: "name", label: "Run", sort: (run) => (run.label || run.id).toLowerCase(), cell: nameCell },
  { key: "status", label: "State", sort: (run) => STATES.indexOf(run.status), cell: (run) => stateMark(run.status) },
  { key: "optimizer", label: "LM head", sort: (run) => run.optimizer, cell: (run) => optimizerMark(run.optimizer) },
  {
    key: "seed",
    label: "Seed",
    sort: (run) => run.seed,
    cell: (run) => (run.seed === null ? DASH : String(run.seed)),
    class: "number",
  },
  { key: "model", label: "Model", sort: (run) => run.model, cell: (run) => run.model || DASH, class: "model" },
  { key: "step", label: "Last step", sort: (run) => run.step, cell: (run) => whole(run.step), class: "number" },
  { ...measured("train_loss"), label: "Train loss" },
  { ...measured("validation_loss"), label: "Val. loss" },
  { ...measured("diameter"), label: "D(S)" },
  { ...measured("perturbation_rms"), label: "Hilbert RMS" },
  { key: "alerts", label: "Alerts", sort: (run) => run.alerts, cell: alertsCell, class: "number" },
  {
    key: "time",
    label: "Age",
    sort: (run) => -(value(run.time) ?? 0),
    cell: (run) => ageMark(run.time),
    class: "number",
  },
];

function nameCell(run) {
  const id = run.label && run.label !== run.id ? h("small", {}, run.id) : null;
  const problem = run.problem || [run.error, run.message].filter(Boolean).join(": ");
  const torn = run.torn ? h("small", {}, `${plural(run.torn, "torn line")} skipped`) : null;
  const reading = run.indexed < 1 ? h("small", {}, `${Math.round(100 * run.indexed)} % read`) : null;
  return [
    runLink(run.id, clip(run.label || run.id, 100)),
    id,
    problem ? h("small", { class: "trouble" }, clip(problem, 300)) : null,
    torn,
    reading,
  ];
}

function alertsCell(run) {
  if (!run.alerts) return "0";
  return h("a", { href: `/alerts?run=${encodeURIComponent(run.id)}`, class: "alert-link" }, whole(run.alerts));
}
