"""The environment that `make` builds, with Pythons that only pretend to install, and the versions that it installs."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.programs import needs

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
DEV = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
DIRECT = [
    requirement
    for part in (PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    for requirement in part
    if not requirement.startswith(PROJECT["name"])
]

FAKE = r"""#!/bin/sh
# Python {version}, whose venv copies this file and whose pip writes down its arguments.
if [ "$1" = -c ]; then
    code=$2; shift 2
    exec {real} -c 'import sys
sys.version_info, sys.executable = tuple(map(int, "{version}".split("."))), sys.argv.pop(1)
exec(sys.argv.pop(1))' "$0" "$code" "$@"
fi
echo "{version}: $*" >> "{log}"
case "$2" in
    venv) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
    pip) [ ! -e "{log}.fails" ] ;;
esac
"""


class Checkout:
    """A copy of what `make setup` reads, and fake Pythons in front of PATH."""

    def __init__(self, folder):
        self.folder, self.log, self.programs = folder / "checkout", folder / "log", folder / "bin"
        self.venv = self.folder / ".venv"
        for name in ("Makefile", "pyproject.toml", "constraints.txt", ".ci/setup"):
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, self.folder / name)
            os.utime(self.folder / name, (0, 0))
        self.programs.mkdir()
        self.python("python3", "3.11.7")

    def python(self, name, version):
        """Put a fake Python in front of PATH."""
        (self.programs / name).write_text(FAKE.format(version=version, real=sys.executable, log=self.log))
        (self.programs / name).chmod(0o755)

    def setup(self, *variables):
        """Run `make setup`; return its exit code and what it printed."""
        env = {name: os.environ[name] for name in ("HOME", "PATH") if name in os.environ}
        env["PATH"] = f"{self.programs}:{env['PATH']}"
        done = subprocess.run(
            [needs("make"), "setup", *variables],
            cwd=self.folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def steps(self):
        """What the fake Pythons were asked to do since the last call: version, module and the first word after it."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [(line.split()[0].rstrip(":"), line.split()[2]) for line in lines]


BUILT = [("3.11.7", module) for module in ("venv", "pip", "pip", "compileall")]
UPDATED = BUILT[1:]
TORCH = re.search(r"^torch==.*", (ROOT / "constraints.txt").read_text(), re.M)[0]
INSTALLED = (0, f"Installing {TORCH}, the package and its tools into .venv: one to five minutes\n")


@pytest.fixture
def checkout(tmp_path):
    return Checkout(tmp_path)


@pytest.mark.parametrize("version", ["2.7.18", "3.6.15", "3.10.13"])
def test_an_old_python_is_refused_in_one_sentence_before_anything_is_installed(checkout, version):
    checkout.python("python3", version)
    code, text = checkout.setup()
    found = version.rpartition(".")[0]
    sentence = (
        f"python3 is Python {found}. Python 3.11 or newer is needed: say which to use, as in `make PYTHON=python3.12`"
    )
    assert (code, text.splitlines()[0]) == (2, sentence)
    assert checkout.steps() == []
    assert not checkout.venv.exists()


def test_a_python_that_is_not_there_is_named(checkout):
    code, text = checkout.setup("PYTHON=python3.77")
    assert code == 2
    assert text.startswith("python3.77 does not run. Python 3.11 or newer is needed")


def test_setup_installs_once(checkout):
    assert checkout.setup() == INSTALLED
    log = checkout.log.read_text()
    assert checkout.steps() == BUILT
    assert "--constraint .venv/constraints.txt --build-constraint .venv/constraints.txt torch==" in log
    assert "--editable .[all] --group dev" in log
    assert checkout.setup() == (0, "")
    assert checkout.steps() == []


def test_what_failed_leaves_no_stamp_and_is_built_anew(checkout):
    broken = checkout.log.with_name("log.fails")
    broken.touch()
    assert checkout.setup()[0] == 2
    assert not (checkout.venv / ".installed").exists()
    checkout.steps()
    broken.unlink()
    (checkout.venv / "rest").touch()
    assert checkout.setup() == INSTALLED
    assert checkout.steps() == BUILT
    assert not (checkout.venv / "rest").exists()


@pytest.mark.few(1)
@pytest.mark.parametrize("change", ["pyproject.toml", "constraints.txt", "TORCH"])
def test_a_change_of_the_requirements_is_installed(checkout, change):
    checkout.setup()
    checkout.steps()
    variables = []
    if change == "TORCH":
        variables = ["TORCH=torch==2.99.0"]
    elif change == "constraints.txt":
        with (checkout.folder / change).open("a") as file:
            file.write("another==1.0\n")
    else:
        os.utime(checkout.folder / change, (2**32, 2**32))
    code, text = checkout.setup(*variables)
    assert (code, text.startswith("Installing torch==")) == (0, True)
    assert checkout.steps() == UPDATED
    if change != "pyproject.toml":  # whose time stays ahead
        assert checkout.setup(*variables) == (0, "")
        assert checkout.steps() == []


def test_a_failed_update_leaves_no_stamp(checkout):
    checkout.setup()
    checkout.log.with_name("log.fails").touch()
    assert checkout.setup("TORCH=torch==2.99.0")[0] == 2
    assert not (checkout.venv / ".installed").exists()


def test_another_python_builds_the_environment_anew_and_is_kept_from_then_on(checkout):
    checkout.setup()
    checkout.steps()
    checkout.python("python3.12", "3.12.1")
    assert checkout.setup("PYTHON=python3.12") == INSTALLED
    assert checkout.steps() == [("3.12.1", module) for _, module in BUILT]
    assert checkout.setup() == (0, "")
    assert checkout.steps() == []


@pytest.mark.few(1)
@pytest.mark.parametrize("state", ["too old", "gone", "unknown"])
def test_an_environment_whose_python_is_of_no_use_is_built_anew(checkout, state):
    checkout.setup()
    checkout.steps()
    python = checkout.venv / "bin" / "python"
    if state == "too old":
        checkout.python("old", "3.9.18")
        shutil.copy(checkout.programs / "old", python)
        (checkout.venv / ".installed").write_text("3.9 torch==2.13.0\n")
    elif state == "gone":
        python.unlink()
    else:  # an empty stamp says neither which Python nor which torch
        (checkout.venv / ".installed").write_text("")
    assert checkout.setup() == INSTALLED
    assert [module for _, module in checkout.steps()] == ["venv", "pip", "pip", "compileall"]


def test_the_python_of_an_active_environment_builds_that_environment_anew(checkout):
    checkout.setup()
    (checkout.venv / ".installed").unlink()
    (checkout.venv / "bin" / "python3").symlink_to(checkout.programs / "python3")
    checkout.programs, programs = checkout.venv / "bin", checkout.programs
    checkout.steps()
    assert checkout.setup() == INSTALLED
    assert checkout.steps() == BUILT
    assert (programs / "python3").exists()


def test_a_folder_of_somebody_else_is_left_alone(checkout):
    checkout.venv.mkdir()
    (checkout.venv / "precious").touch()
    code, text = checkout.setup()
    assert code == 2
    assert text.startswith(".venv was not made by make: remove it, or name another folder, as in `make VENV=")
    assert (checkout.venv / "precious").exists()


# Versions


def printed(command):
    """What a command with variables of the Makefile prints."""
    make = [needs("make"), "--no-print-directory", f"--eval=printed: ; @{command}", "printed"]
    return subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()


def test_the_lowest_versions_are_the_lower_bounds_of_every_direct_dependency():
    bounds = [re.match(r"([a-z-]+)>=([\d.]+)", requirement).groups() for requirement in DIRECT]
    assert sorted(printed("$(LOWEST)")) == sorted(f"{name}=={version}" for name, version in bounds)


def constraints():
    """Versions of constraints.txt by the names of their packages."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "a name and an exact version, no address"
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("text", [*DIRECT, *DEV], ids=lambda text: Requirement(text).name)
def test_a_constraint_is_a_version_that_the_project_allows(text):
    requirement = Requirement(text)
    assert requirement.specifier.contains(constraints()[canonicalize_name(requirement.name)])


def test_constraints_name_the_torch_that_make_installs_and_not_the_project():
    assert PROJECT["name"] not in constraints()
    assert printed("echo $(TORCH)") == [f"torch=={constraints()['torch']}"]
