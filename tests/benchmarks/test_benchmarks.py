import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import NAMES, main
from benchmarks.data import load_increment
from benchmarks.geometry import all_pairs_cdist, all_pairs_matmul, exponent
from benchmarks.measure import Result, peak_bytes
from benchmarks.optimizers import muon_loop, with_gradient
from benchmarks.sharded import check
from hilbert_monitor.doctor.samples import make_increment
from hilbert_monitor.optim import Muon
from tests.support.references import all_pairs_diameter

ROOT = Path(__file__).parents[2]
WITHIN_SECONDS = {"oracle", "monitor"}


def run(tmp_path, *arguments):
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "benchmarks", *map(str, arguments), "--quick", "--json", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in WITHIN_SECONDS else pytest.mark.sweep) for name in NAMES]
)
def test_every_benchmark_runs_and_each_figure_has_a_baseline_and_a_ratio(tmp_path, name):
    document = run(tmp_path, name)
    assert document["results"]
    assert set(document["machine"]) >= {"processor", "cores", "threads", "torch", "python", "hilbert-monitor"}
    for r in document["results"]:
        assert r["baseline"]
        if r["ratio"] is None:  # one of the two is zero, negative or not finite
            assert min(r["ours"] or 0, r["baseline_value"] or 0) <= 0
        else:
            ratio = r["baseline_value"] / r["ours"]
            assert r["ratio"] == pytest.approx(1 / ratio if r["more_is_better"] else ratio)


@pytest.mark.sweep
def test_an_increment_file_can_be_given(tmp_path):
    increment = make_increment("adamw", 3000, 32, panel=600)
    torch.save({"S": increment.S, "hidden": increment.H}, tmp_path / "step7.pt")
    results = run(tmp_path, "geometry", "--increment", tmp_path / "step7.pt")["results"]
    given = {r["subject"] for r in results if r["case"].startswith("step7")}
    assert given == {"exact D(S)", "bracket of D(S)", "Hilbert perturbation"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["nothing"], "there is no benchmark nothing: choose one of geometry, "),
        (["geometry", "--increment", "none.pt"], "there is no increment file none.pt: check the path"),
        (["sharded", "--increment", "none.pt"], "sharded takes no increment: give it to geometry or oracle"),
        (["oracle", "--json", "no/out.json"], "the folder of no/out.json does not exist: create it first"),
    ],
    ids=["name", "file", "increment", "folder"],
)
def test_a_wrong_argument_is_refused_with_one_sentence(capsys, arguments, sentence):
    with pytest.raises(SystemExit):
        main(arguments)
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"python -m benchmarks: error: {sentence}")


def test_without_a_name_all_are_listed(capsys):
    main([])
    assert tuple(line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]) == NAMES


def test_an_increment_file_holds_a_tensor_or_a_dict(tmp_path):
    S, path = torch.randn(5, 3), tmp_path / "x.pt"
    torch.save({"S_over_lr": S.half(), "lr": 0.5, "hidden": torch.randn(4, 3)}, path)
    assert torch.equal(load_increment(path).S, S.half().float() * 0.5)
    torch.save(S, path)
    assert torch.equal(load_increment(path).S, S)
    torch.save({"weights": S}, path)
    with pytest.raises(ValueError, match="holds no increment"):
        load_increment(path)


def test_baselines_compute_the_same():
    S = make_increment("adamw", 700, 16, panel=1).S
    assert all_pairs_cdist(S, block=100) == pytest.approx(all_pairs_diameter(S), rel=1e-5)
    assert all_pairs_matmul(S, block=100) == pytest.approx(all_pairs_diameter(S), rel=1e-4)
    ours, loops = ([with_gradient(*s) for s in [(8, 8), (16, 4), (4, 16)]] for _ in range(2))
    muon_loop(loops, [torch.zeros_like(p) for p in loops])
    Muon(ours).step()
    for a, b in zip(ours, loops, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_wrong_answer_of_ranks_ends_their_benchmark():
    whole = {"exact D(S)": (2.0, (3, 5))}
    check("exact D(S)", whole, [(2.0, (5, 3))] * 2, width=256)
    for name, found in [("exact D(S)", (2.0, (3, 4))), ("bracket", (2.1, (3, 5)))]:
        with pytest.raises(AssertionError, match="the whole matrix has"):
            check(name, whole, [found] * 2, width=256)


def test_ratio_and_peak_memory():
    def call():
        for _ in range(3):
            torch.ones(1000, 1000)

    assert 4e6 <= peak_bytes(call) < 4.1e6, "of what is held at once"
    assert Result("s", "c", 0.5, "b", 2.0).ratio == 4
    assert exponent([1, 2, 4, 8], [3.0, 12.0, 48.0, 192.0]) == pytest.approx(2)
