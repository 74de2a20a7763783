/* A shared worker: the one EventSource of a browser, for all its tabs. A browser opens few connections to a server
 * over HTTP/1.1, and with a stream to each tab the seventh would never load. */

import { follow } from "./stream.js";

const ports = new Set();
let status = { kind: "status", status: "connecting" };
let hello = null;

follow((message) => {
  if (message.kind === "status") status = message;
  else if (message.name === "hello" || message.name === "reset") hello = message;
  for (const port of ports) port.postMessage(message);
});

self.onconnect = ({ ports: [port] }) => {
  port.onmessage = ({ data }) => {
    if (data === "bye") return ports.delete(port);
    ports.add(port);
    port.postMessage(status);
    if (hello) port.postMessage({ kind: "joined" });
  };
  port.start();
};
