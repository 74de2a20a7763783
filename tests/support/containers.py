"""Dockerfiles and the compose file as tests read them, and an image's build stage done without a container engine."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"


def instructions(dockerfile):
    """The instructions of a Dockerfile, stage by stage: pairs of a keyword and the rest."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    stages = []
    for keyword, _, rest in (line.partition(" ") for line in lines if line.strip()):
        if keyword == "FROM":
            stages.append([])
        stages[-1].append((keyword, rest.strip()))
    return stages


def build(stage, folder):
    """Do what a build stage does in a folder that stands for the root; return the environment it leaves.

    Nothing is there but what is copied. Programs in front of PATH are those of the interpreter that runs the tests.
    """
    inside = re.compile(r"(?<![\w.])/(?=(?:build|opt)\b)")  # paths of the image
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    place = folder
    for keyword, rest in stage:
        here = inside.sub(f"{folder}/", rest)
        if keyword == "WORKDIR":
            place = Path(here)
            place.mkdir(parents=True)
        elif keyword == "ENV":
            name, _, value = here.partition("=")
            env[name] = value.replace("$PATH", env["PATH"])
        elif keyword == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copy(ROOT / source, place / target / (source if target.endswith("/") else ""))
        elif keyword == "RUN":
            done = subprocess.run(["sh", "-c", here], cwd=place, env=env, capture_output=True, text=True)
            assert done.returncode == 0, f"{here}\n{done.stdout}{done.stderr}"
        else:
            assert keyword == "FROM", f"{keyword} is not known here"
    return env


def copy(source, target):
    """Copy a file or a folder, without what .dockerignore leaves out."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def compose(**given):
    """The compose file, with variables as given or else as they are by default."""

    def value(match):
        name, kind, text = match.groups()
        assert name in given or kind == "-", f"{name} has no default: {text}"
        return given.get(name, text)

    return yaml.safe_load(VARIABLE.sub(value, (DOCKER / "compose.yml").read_text()))


def mounts(service):
    """What a service mounts: source, target, mode."""
    for volume in service.get("volumes", ()):
        source, target, *mode = volume.split(":")
        yield source, target, (mode or ["rw"])[0]
