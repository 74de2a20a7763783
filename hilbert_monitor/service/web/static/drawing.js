/* Loads Plotly, which is large: the browser fetches and compiles it beside the page. early.js has begun already, if the
 * page was opened at a view with panels. */

import { ApiError } from "./api.js";
import { h } from "./dom.js";

const ADDRESS = document.querySelector("meta[name=plotly]").content;
let started = null;

/** Whether it can draw. */
export const isPlotlyThere = () => Boolean(window.Plotly);

/** Load it, once; the promise resolves when it can draw. */
export function startPlotly() {
  started ??= new Promise((resolve, reject) => {
    if (isPlotlyThere()) return resolve();
    const begun = document.getElementById("plotly");
    const script = begun ?? h("script", { id: "plotly", src: ADDRESS, async: true });
    script.onload = resolve;
    script.onerror = () => {
      script.remove();
      started = null;
      reject(new ApiError(0, "The server does not answer. Is hilbert-monitor serve still running?"));
    };
    if (!begun) document.head.append(script);
  });
  return started;
}
