/* An alert as a card: its kind, step, value and tokens, and who has acknowledged it. */

import { acknowledgementMark } from "./acknowledging.js";
import { h, optimizerMark, runLink, stateMark } from "./dom.js";
import { ageMark, clip, number, token, value, whole } from "./format.js";
import { runs } from "./store.js";

/** The card. On a run's own page, `own`, the run is left out. */
export function alertCard(alert, own = null) {
  const run = alert.run ?? own;
  const step = h(
    "a",
    { class: "step", href: `/runs/${encodeURIComponent(run)}?step=${alert.step}` },
    `step ${whole(alert.step)}`,
  );
  const who = own ? null : h(
    "span",
    { class: "who" },
    runLink(run, clip(runs.get(run)?.label || alert.name || run, 80), alert.step),
    optimizerMark(alert.optimizer),
    stateMark(alert.status),
  );
  return h(
    "article",
    { class: "alert", "data-kind": alert.kind, "data-severity": alert.severity },
    h("header", {}, h("span", { class: "kind" }, [alert.severity, alert.kind, alert.pattern].filter(Boolean).join(" · ")), step),
    who,
    h(
      "div",
      { class: "account" },
      alert.message ? h("p", { class: "message" }, clip(alert.message, 800)) : null,
      h("p", { class: "measured" }, measured(alert), tokens(alert)),
    ),
    ageMark(alert.time),
    acknowledgementMark(run, alert),
  );
}

/** What was measured, and how it compares with what was expected. */
function measured(alert) {
  const [measurement, expected] = [value(alert.value), value(alert.expected)];
  const factor = expected && Number.isFinite(measurement) ? measurement / expected : null;
  const limit = expected === null ? null : [" against ", number(expected), " expected"];
  return h(
    "span",
    {},
    h("b", {}, number(alert.value)),
    limit,
    factor !== null && factor > 0 ? h("em", {}, `${number(factor, 3)}×`) : null,
  );
}

function tokens(alert) {
  if (!alert.pair_text && !alert.pair) return null;
  const [first, second] = [0, 1].map((i) => token(alert.pair_text?.[i], alert.pair?.[i]));
  return h("span", { class: "pair" }, alert.pair_text ? "tokens " : null, first, " and ", second);
}
