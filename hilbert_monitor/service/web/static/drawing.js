/* Loads Plotly, which is large and takes a second to start: it is fetched as soon as there are panels, and started when
 * the rest of the page is on the screen. */

import { ApiError } from "./api.js";
import { h } from "./dom.js";

const ADDRESS = document.querySelector("meta[name=plotly]").content;
let started = null;
let fetched = false;

/** Begin to fetch it. It is no preload: browsers complain about one that is not used. */
export function fetchPlotly() {
  if (!fetched) document.head.append(h("link", { rel: "prefetch", href: ADDRESS }));
  fetched = true;
}

/** Start it, once; the promise resolves when it can draw. */
export function startPlotly() {
  started ??= painted().then(run).catch((error) => {
    started = null;
    throw error;
  });
  return started;
}

const painted = () => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)));

function run() {
  return new Promise((resolve, reject) => {
    const failed = () => reject(new ApiError(0, "The server does not answer. Is hilbert-monitor serve still running?"));
    document.head.append(h("script", { src: ADDRESS, onload: resolve, onerror: failed }));
  });
}
