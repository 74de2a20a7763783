/* Loads Plotly, which is large: the browser fetches and compiles it beside the page as soon as there are panels. */

import { ApiError } from "./api.js";
import { h } from "./dom.js";

const ADDRESS = document.querySelector("meta[name=plotly]").content;
let started = null;

/** Load it, once; the promise resolves when it can draw. */
export function startPlotly() {
  started ??= new Promise((resolve, reject) => {
    const failed = () => {
      started = null;
      reject(new ApiError(0, "The server does not answer. Is hilbert-monitor serve still running?"));
    };
    document.head.append(h("script", { src: ADDRESS, async: true, onload: resolve, onerror: failed }));
  });
  return started;
}
