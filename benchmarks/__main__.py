"""``python -m benchmarks NAME [--quick] [--json FILE] [--increment FILE]``: run one benchmark and print its table."""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NAMES = ("geometry", "sharded", "optimizers", "oracle", "monitor", "service", "detection", "faults", "guard")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark that the arguments name, or list all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", usage="%(prog)s NAME [options]")
    parser.add_argument("name", nargs="?", metavar="NAME", help="without it, list the benchmarks")
    parser.add_argument("--quick", action="store_true", help="small sizes: show in seconds that it runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    parser.add_argument(
        "--increment",
        type=Path,
        metavar="FILE",
        action="append",
        help="measure on this (V, d) tensor that torch.save wrote, not on synthetic ones; may be given several times",
    )
    given = parser.parse_args(arguments)
    if given.name is None:
        _list()
        return
    if given.name not in NAMES:
        parser.error(f"there is no benchmark {given.name}: choose one of {', '.join(NAMES)}")
    if given.json is not None and not given.json.absolute().parent.is_dir():
        parser.error(f"the folder of {given.json} does not exist: create it first")
    run = importlib.import_module(f"benchmarks.{given.name}").run
    options: dict[str, Any] = {}
    if given.increment:
        if "increments" not in inspect.signature(run).parameters:
            parser.error(f"{given.name} takes no increment: give it to geometry or oracle")
        try:
            options["increments"] = _load(given.increment)
        except ValueError as error:
            parser.error(str(error))
    results = run(quick=given.quick, **options)
    from .measure import print_results, write_json

    print_results(results)
    if given.json is not None:
        write_json(results, given.json)


def _list() -> None:
    """Print the names, each with the first line of its module's docstring; import none of them."""
    print("python -m benchmarks NAME [--quick] [--json FILE]\n")
    for name in NAMES:
        text = ast.get_docstring(ast.parse((Path(__file__).parent / f"{name}.py").read_text())) or ""
        print(f"  {name:<12}{text.partition(chr(10))[0]}")


def _load(paths: Sequence[Path]) -> list[Any]:
    from .data import load_increment

    return [load_increment(path) for path in paths]


if __name__ == "__main__":
    main()
