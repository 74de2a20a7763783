"""The sdist and the wheel: what is in them, and that the wheel works in an environment that was empty before."""

import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from hatch_build import for_package_index

ROOT = Path(__file__).parents[2]


def run(*command, **options):
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)


def build(kind, source, target):
    """Build a distribution of a source tree; return its file."""
    done = run(sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", target, cwd=source)
    assert done.returncode == 0, done.stderr
    (file,) = target.iterdir()
    return file


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The tree that is in the sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", ROOT, folder / "dist")) as archive:
        archive.extractall(folder, filter="data")
    (tree,) = folder.glob("hilbert_monitor-*")
    return tree


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    """The wheel that the sdist builds."""
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def tracked(*folders):
    """Files of the repository, or of the tree where there is no repository."""
    done = run("git", "ls-files", *folders, cwd=ROOT)
    listed = [name for name in done.stdout.splitlines() if (ROOT / name).exists()]
    return listed or [
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]


def test_the_sdist_has_what_it_takes_to_build_test_and_read_the_project(source):
    assert (source / "hatch_build.py").exists()
    everything = [".ci", "dashboards", "docker", "docs", "examples", "hilbert_monitor", "tests"]
    files = [".dockerignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "Makefile", "README.md", "constraints.txt"]
    here = [name for name in (*everything, *files) if (ROOT / name).exists()]
    assert [name for name in tracked(*here) if not (source / name).exists()] == []


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(names):
    package = set(tracked("hilbert_monitor"))
    assert {"hilbert_monitor/py.typed", "hilbert_monitor/service/report/report.css"} <= package
    assert any(name.startswith("hilbert_monitor/service/web/static/") for name in package)
    runbooks = {name.replace("dashboards", "hilbert_monitor/service/web", 1) for name in tracked("dashboards/runbooks")}
    assert runbooks
    assert package | runbooks <= names
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"hilbert_monitor"}


def test_the_wheel_names_its_licence_extras_and_python(metadata):
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra")) == {"train", "serve", "all"}
    assert metadata["Requires-Python"] == ">=3.11"


# The README on a package index


def test_the_description_has_no_picture_and_no_link_to_a_file(metadata):
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert text.startswith("# hilbert-monitor")
    assert "](dashboards/" not in text
    assert ".png" not in text


def test_pictures_go_links_to_files_keep_their_words_and_code_stays():
    markdown = "\n\n".join(
        [
            "![a picture\nof two lines](a.png)",
            "[![a badge](badge.svg)](page.md) <img src='b.png' width=3>",
            "See [the *map*](docs/map.md), [a site](https://example.com) and [below](#below).",
            "`table[name](value)` stays",
            "```python\ntable[name](value)\n```",
        ]
    )
    assert for_package_index(markdown).split("\n\n") == [
        "",
        " ",
        "See the *map*, [a site](https://example.com) and [below](#below).",
        "`table[name](value)` stays",
        "```python\ntable[name](value)\n```",
    ]


# The wheel in an empty environment


@pytest.fixture(scope="module")
def programs(wheel, tmp_path_factory):
    """The folder of the programs of an environment that holds the wheel and what it needs, without extras."""
    folder = tmp_path_factory.mktemp("empty")
    pip = [sys.executable, "-m", "pip", "--python", folder / "bin" / "python"]  # quicker than a pip of its own
    for command in ([sys.executable, "-m", "venv", "--without-pip", folder], [*pip, "install", "--no-compile", wheel]):
        done = run(*command)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder / "bin"


def test_the_wheel_helps_without_extras(programs):
    done = run(programs / "hilbert-monitor", "--help")
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout


@pytest.mark.parametrize(("arguments", "extra"), [(["serve"], "serve"), (["pretrain", "--size", "demo"], "train")])
def test_the_wheel_says_which_extra_a_command_needs(programs, arguments, extra):
    done = run(programs / "hilbert-monitor", *arguments)
    assert done.returncode == 1
    assert done.stderr.endswith(f'which is not installed: pip install "hilbert-monitor[{extra}]"\n')
