"""The arrow of the imports, each case in a fresh interpreter."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hilbert_monitor

PACKAGE = Path(__file__).parents[1] / "hilbert_monitor"


def loaded(code):
    """Names of the modules that a fresh interpreter holds after `code`."""
    command = [sys.executable, "-c", f"{code}\nimport sys\nprint(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())


def test_importing_the_package_loads_no_torch_until_a_torch_name_is_used():
    assert "torch" not in loaded("import hilbert_monitor; dir(hilbert_monitor); hilbert_monitor.__version__")
    assert "torch" in loaded("import hilbert_monitor; hilbert_monitor.row_diameter")


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'row_diametre'"):
        _ = hilbert_monitor.row_diametre


def test_help_of_the_command_line_loads_no_torch():
    assert "torch" not in loaded("import hilbert_monitor.cli")


def test_every_public_name_is_there():
    code = "import hilbert_monitor as h\nfor name in h.__all__: getattr(h, name)"
    assert "hilbert_monitor.geometry" in loaded(code)


ROOMS = {
    "geometry": set(),
    "runs": set(),
    "optim": {"geometry"},
    "monitor": {"geometry", "optim", "runs"},
    "pretrain": {"geometry", "optim", "runs", "monitor"},
    "service": {"runs"},
    "service.following": {"runs", "service"},
    "service.figures": {"runs", "service", "service.following"},
    "service.web": {"runs", "service", "service.following", "service.figures"},
    "service.report": {"runs", "service", "service.following", "service.figures"},
}
"""Which rooms of the package each room may load, besides itself. `monitor` may use `optim` to form increments."""


def modules_of(room):
    """Every module of a room by its full name."""
    folder = PACKAGE.joinpath(*room.split("."))
    names = [path.relative_to(PACKAGE).with_suffix("").parts for path in sorted(folder.rglob("*.py"))]
    return [".".join(("hilbert_monitor", *parts)).removesuffix(".__init__") for parts in names]


def room_of(module):
    """The innermost room that a module of the package is in; None for one beside the rooms."""
    parts = module.split(".")[1:]
    return next((room for n in (2, 1) if (room := ".".join(parts[:n])) in ROOMS), None)


@pytest.mark.parametrize("room", ROOMS)
def test_no_module_of_a_room_loads_what_comes_after_it_in_the_way_of_the_data(room):
    code = "\n".join(f"import {name}" for name in modules_of(room))
    rooms = {room_of(name) for name in loaded(code) if name.startswith("hilbert_monitor.")}
    inner = {name for name in ROOMS if name.startswith(f"{room}.")}
    assert rooms <= {room, *ROOMS[room], *inner}


@pytest.mark.parametrize(
    ("room", "barred"),
    [
        ("geometry", {"lightning", "numpy.testing", "prometheus_client"}),
        ("runs", {"torch", "lightning"}),
        ("optim", {"lightning"}),
        ("service", {"torch", "lightning", "pandas"}),
    ],
)
def test_no_module_of_a_room_loads_a_package_that_it_does_not_need(room, barred):
    assert not barred & loaded("\n".join(f"import {name}" for name in modules_of(room)))


def test_the_monitor_needs_lightning_for_its_callback_alone():
    names = [name for name in modules_of("monitor") if not name.endswith(".callback")]
    assert "lightning" not in loaded("\n".join(f"import {name}" for name in names))
    assert "lightning" in loaded("import hilbert_monitor; hilbert_monitor.HilbertMonitor")


def test_geometry_imports_torch_and_the_standard_library_only():
    for path in (PACKAGE / "geometry").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert {n.split(".")[0] for n in names} <= {"torch", *sys.stdlib_module_names}, path.name
            assert getattr(node, "level", 0) < 2, f"{path.name} reaches out of its room"


def test_one_module_knows_prometheus():
    importers = [
        path.name
        for path in PACKAGE.rglob("*.py")
        if re.search(r"^(from|import) prometheus_client", path.read_text(), re.M)
    ]
    assert importers == ["exposition.py"]
