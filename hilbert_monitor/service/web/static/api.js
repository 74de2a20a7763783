/* The JSON API. */

import { setClock } from "./format.js";
import { written } from "./state.js";

/** An answer that is none: its status, and a sentence. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const failures = new Set();

/** Call back with true after an answer, with false when the server cannot be reached. */
export const onReached = (listener) => failures.add(listener);

/**
 * Get an answer.
 * @param {string} path
 * @param {URLSearchParams} [query]
 */
export async function get(path, query = new URLSearchParams()) {
  let response;
  try {
    response = await fetch(
      path + written(query),
      { headers: { Accept: "application/json" }, credentials: "same-origin" },
    );
  } catch {
    failures.forEach((tell) => tell(false));
    throw new ApiError(0, "The server does not answer. Is hilbert-monitor serve still running?");
  }
  failures.forEach((tell) => tell(true));
  setClock(response.headers.get("Date"));
  if (!response.ok) throw new ApiError(response.status, await sentence(response));
  return response.json();
}

/** Where a run is in the API. */
export const runPath = (id) => `/api/runs/${encodeURIComponent(id)}`;

/** The two templates of figures, fetched once. */
export function themes() {
  themes.found ??= get("/api/themes").catch((error) => {
    themes.found = undefined;
    throw error;
  });
  return themes.found;
}

async function sentence(response) {
  if (response.status === 401) return "This page needs its token: open the link that `hilbert-monitor serve` printed.";
  try {
    const { detail, message, error } = await response.json();
    const said = detail ?? message ?? error;
    if (typeof said === "string") return said;
    if (Array.isArray(said)) return said.map((one) => one.msg ?? String(one)).join("; ");
  } catch {
    // not of the API: a proxy's page, perhaps
  }
  return `The server answered ${response.status} ${response.statusText}.`;
}
