/* The stream of events of the server, which is reopened when it breaks. It runs in the shared worker, or in the tab. */

const NAMES = ["hello", "reset", "run", "records", "alert", "remarks", "gone", "progress"];
const PATIENCE = 1500;
/* Milliseconds without a word, of a server that sends a ping every two seconds. */
const SILENCE = 5000;
const LOOK = 500;

/**
 * Follow /api/events for ever. A dropped connection resumes by itself, from the last event; one that the server closed
 * or refused, or on which it fell silent, is opened again after a while, from there too.
 * @param {(message: {kind: "status", status: string} | {kind: "event", name: string, data: any}) => void} tell
 */
export function follow(tell) {
  let last = null;
  let source = null;
  let heard = 0;
  const hear = (event) => {
    heard = performance.now();
    if (event.lastEventId) last = event.lastEventId;
  };
  const open = () => {
    source = new EventSource(`/api/events${last === null ? "" : `?after=${encodeURIComponent(last)}`}`);
    source.onopen = (event) => {
      hear(event);
      tell({ kind: "status", status: "live" });
    };
    source.onerror = ({ target }) => {
      tell({ kind: "status", status: "lost" });
      if (target.readyState === EventSource.CLOSED) setTimeout(open, PATIENCE);
    };
    source.addEventListener("ping", hear);
    for (const name of NAMES) {
      source.addEventListener(name, (event) => {
        hear(event);
        tell({ kind: "event", name, data: event.data ? JSON.parse(event.data) : {} });
      });
    }
  };
  open();
  let looked = performance.now();
  setInterval(() => {
    const late = performance.now() - looked > 4 * LOOK; // the machine slept: events may be waiting
    looked = performance.now();
    if (late) heard = looked;
    if (source.readyState !== EventSource.OPEN || looked - heard < SILENCE) return;
    source.close();
    tell({ kind: "status", status: "lost" });
    open();
  }, LOOK);
}
