"""Read Dockerfiles and the compose file, and run an image's build stage without a container engine."""

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
    """The stages of a Dockerfile. A stage is a list of instructions, each a pair of keyword and arguments."""
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE)
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    stages = []
    for keyword, _, rest in (line.partition(" ") for line in lines if line.strip()):
        if keyword == "FROM":
            stages.append([])
        stages[-1].append((keyword, rest.strip()))
    return stages


def build(stage, folder):
    """Run the instructions of a build stage in an empty folder that takes the place of the image's root.

    The interpreter that runs the tests comes first on PATH. Returns the environment variables at the end of the stage.
    """
    image_root = re.compile(r"(?<![\w.])/(?=(?:build|opt)\b)")  # paths of the image
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    env["PIP_COMPILE"] = "0"  # a program compiles what it loads, which is little of what is installed
    workdir = folder
    for keyword, rest in stage:
        argument = image_root.sub(f"{folder}/", rest)
        if keyword == "WORKDIR":
            workdir = Path(argument)
            workdir.mkdir(parents=True)
        elif keyword == "ENV":
            name, _, value = argument.partition("=")
            env[name] = value.replace("$PATH", env["PATH"])
        elif keyword == "COPY":
            *sources, target = rest.split()
            for source in sources:
                copy(ROOT / source, workdir / target / (source if target.endswith("/") else ""))
        elif keyword == "RUN":
            process = subprocess.run(["sh", "-c", argument], cwd=workdir, env=env, capture_output=True, text=True)
            assert process.returncode == 0, f"{argument}\n{process.stdout}{process.stderr}"
        else:
            assert keyword == "FROM", f"this function cannot run {keyword}"
    return env


def copy(source, target):
    """Copy a file or a folder, without the compiled files that .dockerignore excludes."""
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


VARIABLE = re.compile(r"\$\{(\w+)(?::([-?])([^}]*))?\}")


def compose(**variables):
    """The compose file as a dict. Variables that are not passed have their defaults."""

    def value(match):
        name, kind, text = match.groups()
        assert name in variables or kind == "-", f"{name} has no default: {text}"
        return variables.get(name, text)

    return yaml.safe_load(VARIABLE.sub(value, (DOCKER / "compose.yml").read_text()))


def mounts(service):
    """The volumes of a service: source, target and mode of each."""
    for volume in service.get("volumes", ()):
        source, target, *mode = volume.split(":")
        yield source, target, (mode or ["rw"])[0]
