/* The columns of the table of runs: those that are always offered, and those that the reader adds. */

import { STATES } from "./catalogue.js";
import { h, optimizerMark, runLink, stateMark } from "./dom.js";
import { DASH, ageMark, clip, number, plural, value, whole } from "./format.js";
import { openAlerts } from "./remarks.js";
import { remarkMarks } from "./remark_marks.js";
import { getAll } from "./state.js";

export const LAST = "last:";
const FIRST = 3;
const measured = (key) => ({ key, sort: (run) => value(run[key]), cell: (run) => number(run[key]), class: "number" });

/** The columns that are shown unless the reader hides them: how a run is sorted by one, and what its cell shows. */
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

/** The names of the columns that the reader has added. */
export const added = () => [...new Set(getAll("show"))].slice(0, 30);

/** The columns as the address has them. Added ones come before the usual numbers, where they can be seen. */
export function shownColumns(cells) {
  const hidden = new Set(getAll("hide"));
  const usual = (part) => part.filter(({ key }) => key === "name" || !hidden.has(key));
  const more = added().map((name) => addedColumn(name, cells));
  return [...usual(COLUMNS.slice(0, FIRST)), ...more, ...usual(COLUMNS.slice(FIRST))];
}

/** Any column by its key, for sorting: also one that is not shown. */
export const columnOf = (key, cells) => COLUMNS.find((one) => one.key === key) ?? (key ? addedColumn(key, cells) : null);

/** The heading of an added column: the end of a setting's key, or the name of a field. */
export const labelOf = (name) => (name.startsWith(LAST) ? name.slice(LAST.length).replaceAll("_", " ") : name);

function addedColumn(name, cells) {
  const given = (run) => cells.of(name, run.id);
  if (name.startsWith(LAST)) return {
    key: name,
    label: labelOf(name),
    sort: (run) => value(given(run)),
    cell: (run) => number(given(run)),
    class: "number",
  };
  return {
    key: name,
    label: labelOf(name),
    sort: (run) => sortable(given(run)),
    cell: (run) => (given(run) === null ? DASH : clip(given(run), 60)),
    class: "setting",
  };
}

/** A setting as what it is sorted by: a number where it is one. */
function sortable(text) {
  if (text === null) return null;
  return text.trim() !== "" && Number.isFinite(Number(text)) ? Number(text) : text.toLowerCase();
}

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
    remarkMarks(run.id),
  ];
}

function alertsCell(run) {
  if (!run.alerts) return "0";
  const open = openAlerts(run);
  const link = { href: `/alerts?run=${encodeURIComponent(run.id)}`, class: open ? "alert-link" : null };
  return h("a", { ...link, title: `${plural(open, "alert")} not acknowledged` }, whole(run.alerts));
}
