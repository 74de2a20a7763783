"""The service's rooms see only those before them: following, then figures, then web and report."""

import ast
from pathlib import Path

import pytest

import hilbert_monitor.service

SERVICE = Path(hilbert_monitor.service.__file__).parent
SEES = {
    "following": set(),
    "figures": {"following"},
    "web": {"following", "figures"},
    "report": {"following", "figures"},
}


def imported_rooms(path):
    """The rooms of the service that a module imports from by their full names."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        parts = [name.split(".") for name in names if name.startswith("hilbert_monitor.service.")]
        yield from (part[2] for part in parts)


@pytest.mark.parametrize("room", SEES)
def test_a_room_imports_only_from_those_before_it(room):
    modules = sorted((SERVICE / room).glob("*.py"))
    assert modules
    for module in modules:
        assert {*imported_rooms(module)} - {room} <= SEES[room], module.name


def test_no_module_reaches_into_another_room_by_dots():
    for module in SERVICE.glob("*/*.py"):
        levels = [node.level for node in ast.walk(ast.parse(module.read_text())) if isinstance(node, ast.ImportFrom)]
        assert max(levels, default=0) < 2, module.name
