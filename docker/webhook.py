"""Prints the alerts that Alertmanager posts, one line each: an example receiver to replace with your own.

`docker compose logs --follow webhook` shows them. The port is the only argument.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Receiver(BaseHTTPRequestHandler):
    """Handles the requests of Alertmanager's webhook."""

    def do_POST(self) -> None:
        """Print the alerts of one notification."""
        try:
            notification = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            lines = "".join(f"{line(alert)}\n" for alert in notification["alerts"])
        except (ValueError, KeyError, TypeError, AttributeError):
            self.answer(400)
            return
        print(lines, end="", flush=True)  # one write: other threads may print too
        self.answer(200)

    def do_GET(self) -> None:
        """Answer a health check."""
        self.answer(200)

    def answer(self, status: int) -> None:
        """Answer with a status and no body."""
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log no requests: the output is for alerts alone."""


def line(alert: dict[str, dict[str, str]]) -> str:
    """An alert as one line of JSON, in which no text can break the line. Labels of the names of others stay labels."""
    labels, notes = alert["labels"], alert.get("annotations", {})
    return json.dumps({**labels, **notes, "status": alert["status"], "labels": labels}, ensure_ascii=False)


if __name__ == "__main__":
    ThreadingHTTPServer(("", int(sys.argv[1])), Receiver).serve_forever()
