/* The page: it shows the view that the address names, and the bar above it. */

import { onReached } from "./api.js";
import { Alerts } from "./alerts.js";
import { watch } from "./banner.js";
import { STATES } from "./catalogue.js";
import { Compare } from "./compare.js";
import { fill, h, renew, say } from "./dom.js";
import { locked, noPage, refused } from "./empties.js";
import { plural, tick, whole } from "./format.js";
import { listen } from "./keyboard.js";
import { connect, onEvent, onStatus } from "./live.js";
import { isArchived, onRemarks, openAlerts } from "./remarks.js";
import { Run } from "./run.js";
import { Runs } from "./runs.js";
import { go, lastQuery, onChange, route } from "./state.js";
import { about, load, onRuns, runs } from "./store.js";
import { offerThemes } from "./theme.js";
import { countInTitle } from "./title.js";

const VIEWS = { compare: Compare, runs: Runs, run: Run, alerts: Alerts };
const EVENTS = new Set(["run", "records", "alert", "gone"]);
const PAGES = { "/": "compare", "/runs": "runs", "/alerts": "alerts" };

const main = document.getElementById("main");
let view = null;
let at = null;

/** Show the view that the address names. If it is shown already, it takes over the new settings. */
function show(moved) {
  const { view: name, id } = route();
  const place = `${name} ${id}`;
  mark(name);
  if (place === at && view) return view.update();
  view?.end();
  at = place;
  view = null;
  if (!VIEWS[name]) return fill(main, h("div", { class: "view" }, noPage()));
  view = new VIEWS[name](main, fail, id);
  if (moved) {
    scrollTo(0, 0);
    main.querySelector("h1")?.focus({ preventScroll: true });
  }
}

/** Handle a failed request: try again if the server may recover, else show the error in place of the view. */
function fail(error, again) {
  if (error.status === undefined) throw error; // a fault in a script: it belongs into the console
  if (error.status === 401) return lock();
  if (error.status === 0 || error.status >= 500) return setTimeout(again, 2000);
  view?.end();
  view = at = null;
  fill(main, h("div", { class: "view" }, refused(error.message)));
}

function lock() {
  view?.end();
  view = null;
  fill(main, h("div", { class: "view" }, locked()));
}

function mark(name) {
  for (const link of document.querySelectorAll("nav a[data-view]")) {
    const here = link.dataset.view === name || (name === "run" && link.dataset.view === "runs");
    if (here) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}

/** Runs by state, alerts and progress, in the bar. */
function top() {
  if (about.error?.status === 401) lock();
  const counts = new Map();
  let alerts = 0;
  for (const run of runs.values()) {
    if (isArchived(run.id)) continue;
    counts.set(run.status, (counts.get(run.status) ?? 0) + 1);
    alerts += openAlerts(run);
  }
  const shown = STATES.filter((state) => counts.has(state));
  const link = (state) => {
    const about = { href: `/runs?status=${state}`, title: `${plural(counts.get(state), "run")} ${state}` };
    const mark = { class: "state", "data-state": state };
    const word = h("span", { class: "word" }, ` ${state}`);
    return h("a", { ...about, ...mark }, h("i", { "aria-hidden": "true" }), h("span", {}, counts.get(state), word));
  };
  renew(document.getElementById("counts"), [...counts], () => shown.map(link));
  const badge = document.getElementById("alert-count");
  badge.hidden = !alerts;
  say(badge, whole(alerts));
  countInTitle(alerts);
  progress();
}

function progress() {
  const bar = document.getElementById("progress");
  const percent = Math.floor(100 * about.progress);
  bar.hidden = about.progress >= 1;
  bar.setAttribute("aria-valuenow", percent);
  bar.firstElementChild.style.width = `${percent}%`;
  say(bar.lastElementChild, `Reading the logs: ${percent} %`);
}

function connection(status) {
  const place = document.getElementById("live");
  place.dataset.status = status;
  const text = { live: "live", lost: "connection lost, retrying", connecting: "connecting" }[status];
  say(place.lastElementChild, text);
}

/** Links within the page change the view, not the document. */
function follow(event) {
  const link = event.target.closest?.("a[href]");
  const special = event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey;
  if (!link || special || event.defaultPrevented || link.target || link.hasAttribute("download")) return;
  const target = new URL(link.href);
  const inside = target.pathname in PAGES || /^\/runs\/[^/]+$/.test(target.pathname);
  if (target.origin !== location.origin || !inside || target.hash) return;
  event.preventDefault();
  const back = link.closest("nav") && route().view !== PAGES[target.pathname] ? lastQuery(PAGES[target.pathname]) : "";
  go(target.pathname + (target.search || back));
}

document.addEventListener("click", follow);
let stream = "connecting";
onStatus((status) => connection((stream = status)));
onReached((reached) => connection(reached ? stream : "lost"));
onEvent((name, data) => {
  if (EVENTS.has(name)) view?.event(name, data);
  if (name === "reset" || (name === "hello" && data.version !== view?.answer?.version)) {
    view?.refresh.ask(); // no event tells of what happened before the stream began
    view?.details?.ask();
  }
});
onRuns(() => {
  top();
  view?.known();
});
onRemarks(top);
onChange(show);
watch();
listen();
offerThemes();
setInterval(tick, 1000);
connect();
load();
if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", () => show(false));
else show(false);
