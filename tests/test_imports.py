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


@pytest.mark.parametrize("room", ["geometry", "runs"])
def test_a_room_at_the_start_of_the_arrow_imports_nothing_of_ours(room):
    modules = loaded(f"import hilbert_monitor.{room}")
    ours = {name for name in modules if name.startswith("hilbert_monitor.")}
    assert {name.split(".")[1] for name in ours} == {room}


def test_the_optimizers_see_the_geometry_and_nothing_else_of_ours():
    modules = loaded("import hilbert_monitor.optim")
    ours = {name for name in modules if name.startswith("hilbert_monitor.")}
    assert {name.split(".")[1] for name in ours} == {"geometry", "optim"}
    assert "lightning" not in modules


def test_the_monitor_needs_lightning_for_its_callback_alone():
    modules = loaded("import hilbert_monitor.monitor.probe, hilbert_monitor.monitor.sinks")
    assert "lightning" not in modules
    assert "lightning" in loaded("import hilbert_monitor; hilbert_monitor.HilbertMonitor")


def test_records_and_metrics_need_no_torch():
    assert "torch" not in loaded("import hilbert_monitor.runs.metrics")


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


def test_the_experiment_imports_neither_the_service_nor_what_measures_it():
    rooms = "(service|bench|doctor|cli|demo)"
    ours = rf"^ *(from|import) (hilbert_monitor\.|\.\.){rooms}\b|^ *from (hilbert_monitor|\.\.) import .*\b{rooms}\b"
    for path in (PACKAGE / "pretrain").glob("*.py"):
        assert not re.search(ours, path.read_text(), re.M), path.name


def test_the_service_loads_no_torch():
    modules = loaded("import hilbert_monitor.service.web.server, hilbert_monitor.service.report.page")
    assert not {"torch", "lightning", "pandas"} & modules
