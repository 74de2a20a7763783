"""``python -m hilbert_monitor`` is ``hilbert-monitor``."""

import sys

from ._extras import missing_extra
from .cli import app


def main() -> None:
    """Run the command line. A command whose extra is not installed ends with one sentence that names it."""
    try:
        app()
    except ModuleNotFoundError as error:
        command = " ".join(["hilbert-monitor", *sys.argv[1:2]])
        sentence = missing_extra(command, error)
        if sentence is None:
            raise
        sys.exit(str(sentence))


if __name__ == "__main__":
    main()
