/* Events of the server in this tab, and tasks that run after them, but not too often. */

import { follow } from "./stream.js";

/** @type {Set<(name: string, data: any) => void>} */
const listeners = new Set();
const watchers = new Set();

/** Call back for every event of the server. */
export const onEvent = (listener) => listeners.add(listener);

/** Call back with "live", "lost" or "connecting". */
export const onStatus = (watcher) => watchers.add(watcher);

/** Join the browser's stream, or open one where there are no shared workers. */
export function connect() {
  if (typeof SharedWorker === "undefined") return follow(take);
  let heard = false;
  const worker = new SharedWorker(new URL("./worker.js", import.meta.url), { type: "module", name: "hilbert-monitor" });
  worker.onerror = () => heard || ((heard = true), follow(take));
  worker.port.onmessage = ({ data }) => {
    heard = true;
    take(data);
  };
  worker.port.postMessage("hi");
  addEventListener("pagehide", () => worker.port.postMessage("bye"));
  addEventListener(
    "pageshow",
    (event) => event.persisted && (worker.port.postMessage("hi"), take({ kind: "event", name: "reset", data: {} })),
  );
}

function take(message) {
  if (message.kind === "status") watchers.forEach((watch) => watch(message.status));
  if (message.kind === "joined") take({ kind: "event", name: "hello", data: {} }); // events since then may be lost
  if (message.kind === "event") listeners.forEach((listen) => listen(message.name, message.data));
}

/**
 * Run a task at most once every `gap` ms however often it is asked for. It runs once more after the last call of `ask`,
 * never twice at a time, and for at most half of the time. In a hidden tab it waits until the tab is visible again.
 * @param {() => Promise<void>} task
 */
export function coalesce(task, gap = 350) {
  let busy = false;
  let asked = false;
  let timer = 0;
  let ended = false;
  let next = -Infinity;
  const run = async () => {
    timer = 0;
    if (ended || busy || document.hidden) return;
    busy = true;
    asked = false;
    const began = performance.now();
    try {
      await task();
    } finally {
      busy = false;
      next = began + Math.min(1000, Math.max(gap, 2 * (performance.now() - began)));
      if (asked) ask();
    }
  };
  const ask = () => {
    asked = true;
    if (!ended && !busy && !timer) timer = setTimeout(run, Math.max(0, next - performance.now()));
  };
  const shown = () => !document.hidden && asked && ask();
  document.addEventListener("visibilitychange", shown);
  return {
    ask,
    end() {
      ended = true;
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", shown);
    },
  };
}
