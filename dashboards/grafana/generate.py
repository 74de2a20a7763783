"""Writes the two Grafana dashboards beside it, compare.json and run.json, from `record.METRICS`.

    python dashboards/grafana/generate.py            # write them
    python dashboards/grafana/generate.py --check    # exit with 1 if they are not up to date

The tests do not run Grafana. They check each query on a real Prometheus that scraped real runs, and the rules of
Grafana's dashboard linter. The JSON has schema version 39, which Grafana 11 and 12 read.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from compare import compare
from panels import Json
from run import run

FOLDER = Path(__file__).parent


def dashboards() -> dict[str, Json]:
    """Both dashboards, by the names of their files."""
    return {"compare": compare(), "run": run()}


def main() -> int:
    """Write the dashboards, or with --check only say whether they are up to date."""
    parser = argparse.ArgumentParser(description="Writes the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a file is not up to date")
    check = parser.parse_args().check
    stale = []
    for name, board in dashboards().items():
        path, text = FOLDER / f"{name}.json", json.dumps(board, indent=2, ensure_ascii=False) + "\n"
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
            if not check:
                path.write_text(text, encoding="utf-8")
    if stale:
        print("not up to date:" if check else "wrote", ", ".join(stale))
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
