/* The stream of events of the server, which is reopened when it breaks. It runs in the shared worker, or in the tab. */

const NAMES = ["hello", "reset", "run", "records", "alert", "remarks", "gone", "progress"];
const PATIENCE = 1500;

/**
 * Follow /api/events for ever. A dropped connection resumes by itself, from the last event; one that the server closed
 * or refused is opened again after a while, from there too.
 * @param {(message: {kind: "status", status: string} | {kind: "event", name: string, data: any}) => void} tell
 */
export function follow(tell) {
  let last = null;
  const open = () => {
    const source = new EventSource(`/api/events${last === null ? "" : `?after=${encodeURIComponent(last)}`}`);
    source.onopen = () => tell({ kind: "status", status: "live" });
    source.onerror = () => {
      tell({ kind: "status", status: "lost" });
      if (source.readyState === EventSource.CLOSED) setTimeout(open, PATIENCE);
    };
    for (const name of NAMES) {
      source.addEventListener(name, (event) => {
        if (event.lastEventId) last = event.lastEventId;
        tell({ kind: "event", name, data: event.data ? JSON.parse(event.data) : {} });
      });
    }
  };
  open();
}
