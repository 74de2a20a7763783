/* The banner: shown when a run that is being trained has just raised a page. Notices do not show here. */

import { get } from "./api.js";
import { fill, h, runLink } from "./dom.js";
import { ageMark, clip, now, whole } from "./format.js";
import { onEvent } from "./live.js";
import { acknowledgement, isArchived, onRemarks } from "./remarks.js";
import { onRuns, runs } from "./store.js";

const RECENT = 600;
const place = document.getElementById("banner");

/** @type {Map<string, {run: string, step: number, kind: string, time: number, message?: string}>} */
const alerts = new Map();
const keyOf = ({ run, step, kind }) => `hilbert-monitor alert ${run} ${step} ${kind}`;

/** Show and update the banner from now on. */
export function watch() {
  onEvent((name, data) => {
    if (name !== "alert" || data.status !== "running") return;
    add({ ...data.alert, run: data.run });
  });
  onRuns(() => {
    for (const run of runs.values()) {
      const last = run.last_alert;
      if (run.status === "running" && last && now() - last.time < RECENT) complete({ ...last, run: run.id });
    }
    show();
  });
  onRemarks(show);
}

/** Fetch the message of an alert, once: a run's summary does not have it. */
async function complete(alert) {
  const key = keyOf(alert);
  if (alert.severity !== "page" || alerts.has(key) || requested.has(key) || isDismissed(key)) return;
  requested.add(key);
  const query = new URLSearchParams({ run: alert.run, kind: alert.kind, limit: 5 });
  const answer = await get("/api/alerts", query).catch(() => ({ alerts: [] }));
  add({ ...alert, message: answer.alerts.find((one) => one.step === alert.step)?.message });
}

const requested = new Set();

function add(alert) {
  if (alert.severity !== "page") return;
  const key = keyOf(alert);
  const known = alerts.get(key);
  if (isDismissed(key) || (known && (known.message || !alert.message))) return;
  alerts.set(key, alert);
  show();
}

/** Open alerts of runs that are still running and not archived, the newest first. Those of ended runs are in the list of alerts. */
function current() {
  const alive = ({ run }) => !runs.has(run) || runs.get(run).status === "running";
  const open = (alert) => !isArchived(alert.run) && !acknowledgement(alert.run, alert);
  return [...alerts.values()].filter(alive).filter(open).sort((a, b) => b.time - a.time);
}

function show() {
  const [newest, ...others] = current();
  const state = newest ? `${keyOf(newest)} ${newest.message ?? ""} ${others.length}` : "";
  if (place.dataset.shown === state) return;
  place.dataset.shown = state;
  if (!newest) return fill(place);
  const name = clip(runs.get(newest.run)?.label || newest.run, 60);
  fill(
    place,
    h(
      "div",
      { class: "banner-inner" },
      h(
        "p",
        {},
        h("b", {}, name),
        ` blew up at step ${whole(newest.step)}: `,
        newest.message ? clip(newest.message, 240) : newest.kind,
        " ",
        ageMark(newest.time),
      ),
      h(
        "span",
        { class: "banner-links" },
        runLink(newest.run, "Show the step", newest.step),
        others.length ? h("a", { href: "/alerts" }, `${others.length} more`) : null,
        h("button", { type: "button", class: "tool", "aria-label": "Dismiss this alert", onclick: dismiss }, "Dismiss"),
      ),
    ),
  );
}

function dismiss() {
  for (const alert of current()) {
    alerts.delete(keyOf(alert));
    try {
      sessionStorage.setItem(keyOf(alert), "1");
    } catch {
      dismissals.add(keyOf(alert)); // no storage: it stays dismissed while this page is open
    }
  }
  show();
  document.getElementById("main").focus({ preventScroll: true });
}

const dismissals = new Set();

function isDismissed(key) {
  try {
    return dismissals.has(key) || sessionStorage.getItem(key) !== null;
  } catch {
    return dismissals.has(key);
  }
}
