/* The JSON API. */

import { setClock } from "./format.js";
import { written } from "./state.js";

/** An error of the API: its status, and a sentence. Status 0 means that the server cannot be reached. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

const listeners = new Set();

/** Call back with true after an answer, with false when the server cannot be reached. */
export const onReached = (listener) => listeners.add(listener);

/**
 * Get an answer.
 * @param {string} path
 * @param {URLSearchParams} [query]
 */
export const get = (path, query = new URLSearchParams()) => ask(path + written(query));

/** Send a change, and get its answer. */
export const post = (path, change) => ask(
  path,
  { method: "POST", body: JSON.stringify(change), headers: { "Content-Type": "application/json" } },
);

async function ask(address, { headers, ...options } = {}) {
  let response;
  try {
    response = await fetch(
      address,
      { headers: { Accept: "application/json", ...headers }, credentials: "same-origin", ...options },
    );
  } catch {
    listeners.forEach((tell) => tell(false));
    throw new ApiError(0, "The server does not answer. Is hilbert-monitor serve still running?");
  }
  listeners.forEach((tell) => tell(true));
  setClock(response.headers.get("Date"));
  if (!response.ok) throw new ApiError(response.status, await sentence(response));
  return response.json();
}

/** The path of a run in the API. */
export const runPath = (id) => `/api/runs/${encodeURIComponent(id)}`;

/** The templates of figures for light and dark pages, fetched once. */
export function themes() {
  themes.answer ??= get("/api/themes").catch((error) => {
    themes.answer = undefined;
    throw error;
  });
  return themes.answer;
}

/** The error of a response, in a sentence. */
async function sentence(response) {
  if (response.status === 401) return "This page needs its token: open the link that `hilbert-monitor serve` printed.";
  try {
    const { detail, message, error } = await response.json();
    const text = detail ?? message ?? error;
    if (typeof text === "string") return text;
    if (Array.isArray(text)) return text.map((part) => part.msg ?? String(part)).join("; ");
  } catch {
    // not an answer of the API: perhaps the page of a proxy
  }
  return `The server answered ${response.status} ${response.statusText}.`;
}
