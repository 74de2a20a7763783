/* The summaries of all runs: fetched once, then updated by events. */

import { get } from "./api.js";
import { coalesce, onEvent } from "./live.js";

/** @type {Map<string, any>} summaries by id */
export const runs = new Map();
/** The folder of the runs, how far their logs are read, whether they were fetched. */
export const about = { root: "", progress: 1, version: null, loaded: false, error: null };

const listeners = new Set();
/** Call back after a summary has changed. */
export const onRuns = (listener) => listeners.add(listener);

/** Take summaries of an answer, the newest of each. */
export function learn(summaries) {
  for (const summary of summaries) {
    const known = runs.get(summary.id);
    if (!known || !(known.version > summary.version)) runs.set(summary.id, summary);
  }
}

/** Runs that had an event since all were fetched: the event may be newer than the answer. */
const updated = new Set();

/** Fetch all runs anew. */
export async function load() {
  updated.clear();
  try {
    const answer = await get("/api/runs");
    for (const id of runs.keys()) if (!updated.has(id)) runs.delete(id);
    learn(answer.runs);
    Object.assign(
      about,
      { root: answer.root, progress: answer.progress, version: answer.version, loaded: true, error: null },
    );
  } catch (error) {
    about.error = error;
    if (error.status !== 401) setTimeout(reload.ask, 2500);
  }
  tell();
}

const reload = coalesce(load, 1000);

const tell = () => listeners.forEach((listener) => listener());

let due = 0;
/** Tell soon: many runs may have news at once. */
function tellSoon() {
  due ||= setTimeout(() => {
    due = 0;
    tell();
  }, 50);
}

onEvent((name, data) => {
  if (name === "reset") for (const run of runs.values()) run.version = -1; // another server counts from the start
  if (name === "run") {
    learn([data.summary]);
    updated.add(data.id);
  } else if (name === "gone") runs.delete(data.id);
  else if (name === "progress") about.progress = data.progress;
  else if (name === "reset" || (name === "hello" && data.version !== about.version)) return reload.ask();
  else return;
  tellSoon();
});
