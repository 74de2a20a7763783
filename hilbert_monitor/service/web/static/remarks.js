/* What people say about runs: notes, tags, the archive, acknowledged alerts. Fetched once, then updated by events. */

import { get, post } from "./api.js";
import { coalesce, onEvent } from "./live.js";

const NOTHING = { note: "", tags: [], archived: false, acknowledged: [] };
const known = new Map();
const listeners = new Set();

/** Whether this service keeps remarks, and why not. */
export const offer = { offered: false, problem: "" };

/** Call back after remarks have changed. */
export const onRemarks = (listener) => listeners.add(listener);

/** What is said about a run: {note, tags, archived, acknowledged}. */
export const remarksOf = (id) => known.get(id) ?? NOTHING;

/** Whether a run is archived. */
export const isArchived = (id) => remarksOf(id).archived;

/** How many runs of a list of ids are archived. */
export const archivedAmong = (ids) => ids.filter(isArchived).length;

/** Who acknowledged an alert of a run, and when: {by, at}; undefined if nobody has. */
export function acknowledgement(id, { step, kind, time }) {
  const moment = typeof time === "number" ? time : null;
  return remarksOf(id).acknowledged.find((one) => one.step === step && one.kind === kind && one.time === moment);
}

/** How many alerts of a run nobody has acknowledged; none of an archived one. */
export function openAlerts({ id, alerts }) {
  const { archived, acknowledged } = remarksOf(id);
  return archived ? 0 : Math.max(0, (alerts ?? 0) - acknowledged.length);
}

/** Change the note, the tags or the archive of runs: {note, tag, untag, archived}. */
export const change = async (runs, changes) => learn(await post("/api/remarks", { runs, ...changes }));

/** Acknowledge alerts of a run, or undo that. */
export const acknowledge = async (run, alerts, { by = "", undo = false } = {}) => learn(
  await post(
    "/api/acknowledgements",
    { run, alerts: alerts.map(({ step, kind, time }) => ({ step, kind, time })), by, undo },
  ),
);

/** Remarks that came since all were asked for: they may be newer than the answer. */
const updated = new Map();

function learn({ runs }) {
  for (const [id, remarks] of Object.entries(runs)) known.set(id, remarks), updated.set(id, remarks);
  tell();
}

const tell = () => listeners.forEach((listener) => listener());

async function load() {
  updated.clear();
  try {
    const { runs, offered, problem } = await get("/api/remarks");
    known.clear();
    Object.assign(offer, { offered, problem });
    learn({ runs: { ...runs, ...Object.fromEntries(updated) } });
  } catch (error) {
    if (error.status !== 401) setTimeout(reload.ask, 2500);
  }
}

const reload = coalesce(load, 1000);

onEvent((name, data) => {
  if (name === "remarks") learn(data);
  if (name === "hello" || name === "reset") reload.ask(); // no event tells of what happened before the stream began
});
reload.ask();
