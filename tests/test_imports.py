"""The arrow of the imports, in fresh interpreters.

Rooms are loaded one after the other in three of them, those of training, of the service, and of reports: each may load
what stands before it.
"""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hilbert_monitor

PACKAGE = Path(__file__).parents[1] / "hilbert_monitor"


@functools.cache
def loaded(*stages):
    """Names of the modules that a fresh interpreter holds after each of some pieces of code."""
    code = "\n".join(["import sys", *(f"{stage}\nprint(*sys.modules)" for stage in stages)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'row_diametre'"):
        _ = hilbert_monitor.row_diametre


def test_help_of_the_command_line_loads_no_torch():
    (modules,) = loaded("import hilbert_monitor.cli")
    assert "torch" not in modules


def test_every_public_name_is_there():
    assert [name for name in hilbert_monitor.__all__ if not hasattr(hilbert_monitor, name)] == []
    assert "HilbertMonitor" in hilbert_monitor.__all__


ROOMS = {
    "geometry": set(),
    "runs": set(),
    "optim": {"geometry"},
    "monitor": {"geometry", "optim", "runs"},
    "pretrain": {"geometry", "optim", "runs", "monitor"},
    "inspection": {
        "geometry",
        "optim",
        "runs",
        "monitor",
        "service",
        "service.following",
        "service.figures",
        "service.report",
    },
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


def imports_of(room):
    """Code that loads every module of a room."""
    return "\n".join(f"import {name}" for name in modules_of(room))


def training():
    """What is loaded after each room of training in turn, and after what comes before them and between them."""
    lightnings = (".callback", ".trust_region")
    without_callback = [line for line in imports_of("monitor").splitlines() if not line.endswith(lightnings)]
    stages = {
        "package": "import hilbert_monitor; dir(hilbert_monitor); hilbert_monitor.__version__",
        "torch name": "hilbert_monitor.row_diameter",
        "geometry": imports_of("geometry"),
        "optim": imports_of("optim"),
        "monitor without its callback": "\n".join(without_callback),
        "callback": "hilbert_monitor.HilbertMonitor",
        "monitor": imports_of("monitor"),
        "pretrain": imports_of("pretrain"),
    }
    return dict(zip(stages, loaded(*stages.values()), strict=True))


def in_turn(*rooms):
    """What is loaded after each of some rooms in turn."""
    return dict(zip(rooms, loaded(*map(imports_of, rooms)), strict=True))


def modules_after(room):
    """What is loaded with a room, after those that stand before it."""
    serving = "runs", "service.following", "service.figures", "service.web", "service"
    reporting = "service.report", "inspection"
    chain = next((rooms for rooms in (serving, reporting) if room in rooms), None)
    return (in_turn(*chain) if chain else training())[room]


@pytest.mark.sweep
def test_importing_the_package_loads_no_torch_until_a_torch_name_is_used():
    assert "torch" not in training()["package"]
    assert "torch" in training()["torch name"]


@pytest.mark.few(3)
@pytest.mark.parametrize("room", ROOMS)
def test_no_module_of_a_room_loads_what_comes_after_it_in_the_way_of_the_data(room):
    modules = modules_after(room)
    assert {*modules_of(room)} <= modules
    rooms = {room_of(name) for name in modules if name.startswith("hilbert_monitor.")}
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
    assert not barred & modules_after(room)


def test_the_monitor_needs_lightning_for_its_callback_alone():
    assert "lightning" not in training()["monitor without its callback"]
    assert "lightning" in training()["callback"]


def test_the_monitor_in_a_loop_of_ones_own_needs_no_trainer():
    modules = training()["monitor without its callback"]
    assert "hilbert_monitor.monitor.watch" in modules
    assert not {"transformers", "accelerate", "lightning"} & modules


def test_adapters_import_their_framework_and_of_ours_the_monitor_and_runs():
    frameworks = {
        "transformers": {"transformers"},
        "__init__": set(),
    }
    adapters = list((PACKAGE / "integrations").glob("*.py"))
    assert {path.stem for path in adapters} == set(frameworks)
    for path in adapters:
        imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        assert {node.module for node in imports if node.level} <= set(frameworks)
        modules = [node.module for node in imports if not node.level]
        ours = {name for name in modules if name.startswith("hilbert_monitor")}
        assert {name.split(".")[1] for name in ours} <= {"monitor", "runs"}
        others = {name.split(".")[0] for name in set(modules) - ours}
        assert others - {"torch", *sys.stdlib_module_names} == frameworks[path.stem]


def test_geometry_imports_torch_and_the_standard_library_only():
    for path in (PACKAGE / "geometry").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert {n.split(".")[0] for n in names} <= {"torch", *sys.stdlib_module_names}, path.name
            assert getattr(node, "level", 0) < 2, f"{path.name} reaches out of its room"


def test_one_module_makes_samples_for_prometheus_and_one_serves_them():
    importers = {
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"^(from|import) prometheus_client", path.read_text(), re.M)
    }
    assert importers == {"runs/exposition.py", "monitor/prometheus.py"}


def test_the_package_imports_neither_benchmarks_nor_tests():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert not {name.split(".")[0] for name in names} & {"benchmarks", "tests"}, path
