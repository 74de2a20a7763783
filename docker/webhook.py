"""Prints the alerts that Alertmanager posts, a line each: a receiver that works until yours takes its place.

`docker compose logs --follow webhook` shows them. The port is the only argument.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Receiver(BaseHTTPRequestHandler):
    """Takes what Alertmanager's webhook sends."""

    def do_POST(self) -> None:
        """Print the alerts of one notification."""
        try:
            posted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            lines = "".join(f"{line(alert)}\n" for alert in posted["alerts"])
        except (ValueError, KeyError, TypeError, AttributeError):
            self.answer(400)
            return
        print(lines, end="", flush=True)  # one write: others may be printing
        self.answer(200)

    def do_GET(self) -> None:
        """Say that it is there."""
        self.answer(200)

    def answer(self, status: int) -> None:
        """Answer with nothing but a status."""
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing: the alerts are the log."""


def line(alert: dict[str, dict[str, str]]) -> str:
    """An alert in a line of JSON, so that nothing in it can break the line."""
    labels, notes = alert["labels"], alert.get("annotations", {})
    return json.dumps({"status": alert["status"], **labels, **notes}, ensure_ascii=False)


if __name__ == "__main__":
    ThreadingHTTPServer(("", int(sys.argv[1])), Receiver).serve_forever()
