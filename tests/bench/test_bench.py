import json
import re

import pytest
import torch
from typer.testing import CliRunner

from hilbert_monitor.bench import optimizers, sharded, suite
from hilbert_monitor.bench.diameter import exponent
from hilbert_monitor.bench.increments import load_increment, make_increment
from hilbert_monitor.bench.measure import BenchResult, peak_bytes
from hilbert_monitor.bench.opponents import all_pairs_cdist, all_pairs_matmul, muon_loop
from hilbert_monitor.cli import app
from hilbert_monitor.geometry import row_diameter
from hilbert_monitor.optim import Muon
from hilbert_monitor.optim.pretraining import HEAD_LR
from tests.support.references import all_pairs_diameter
from tests.support.warm import warm_ranks_fixture  # noqa: F401


def run(*args):
    result = CliRunner().invoke(app, [str(a) for a in args], env={"COLUMNS": "200", "NO_COLOR": "1"})
    return result, re.sub(r"[│╭╮╰╯─\s]+", " ", result.output)


def test_geometry_prints_every_subject_with_its_opponent_and_writes_json(tmp_path):
    increment = make_increment("adamw", 3000, 32, panel=600)
    torch.save({"S": increment.S, "hidden": increment.H}, tmp_path / "step7.pt")
    given = "--increment", tmp_path / "step7.pt"
    result, text = run("bench", "geometry", "--quick", *given, "--json", tmp_path / "out.json")
    assert result.exit_code == 0, text
    document = json.loads((tmp_path / "out.json").read_text())
    assert set(document["machine"]) >= {"processor", "threads", "torch", "python"}
    subjects = {r["subject"] for r in document["results"]}
    assert subjects == {"diameter", "bracket", "perturbation", "hard cases", "growth"}
    for r in document["results"]:
        assert r["opponent"] in text
        assert r["ratio"] == pytest.approx(r["opponent_amount"] / r["amount"])
    assert "step7" in text
    assert "exponent" in text


def test_plain_bench_has_the_jobs_of_the_geometry_and_of_the_monitor(monkeypatch):
    jobs = []
    monkeypatch.setattr(suite, "run", lambda some, console: jobs.append([label for label, _ in some]) or [])
    for subcommand in ([], ["geometry"], ["monitor"]):
        result, text = run("bench", *subcommand, "--quick")
        assert result.exit_code == 0, text
    plain, geometry, monitor = jobs
    assert plain == geometry + monitor
    assert len(set(plain)) == 10


@pytest.mark.sweep
def test_the_monitor_is_measured_under_both_heads(tmp_path):
    result, text = run("bench", "monitor", "--quick", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, text
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert [(r["subject"], r["case"].split()[0]) for r in results] == [
        ("monitored training step", "adamw"),
        ("monitored training step", "rownorm"),
        ("layers of a training step", "rownorm"),
    ]


@pytest.mark.usefixtures("warm_ranks")
def test_bench_of_the_optimizers_has_time_and_memory(tmp_path):
    result, text = run("bench", "optimizers", "--quick", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, text
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert {(r["subject"], r["unit"]) for r in results} == {
        ("optimizer step", "s"),
        ("optimizer memory", "B"),
        ("optimizer traffic", "B"),
    }
    gather = "a full gather on every rank"
    assert {r["opponent"] for r in results} == {"AdamW(fused=True)", "one by one, fp32", "torch.optim.Muon", gather}
    memory, traffic = (r for r in results if r["unit"] == "B")
    assert memory["ratio"] > 1.9, "RowNorm holds one buffer and no scratch of the head's size, AdamW two buffers"
    numbers = 16 * 32 * 32  # of a block's matrices; each of two ranks receives one half and sends the other
    assert traffic["opponent_amount"] == 2 * 4 * numbers / 2
    assert traffic["amount"] == pytest.approx(4 * 4 * numbers / 4, rel=0.1), "there and back, of what others own"


@pytest.mark.sweep
@pytest.mark.usefixtures("warm_ranks")
def test_ranks_that_share_rows_are_counted_and_timed(tmp_path):
    result, text = run("bench", "sharded", "--quick", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, text
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    moved = [r for r in results if r["unit"] == "B"]
    assert {r["case"].split(",")[0] for r in moved} == {"bracket", "exact", "perturbation"}
    for r in moved:
        assert 0 < r["amount"] < 0.15 * r["opponent_amount"] == 0.15 * 4096 * 64 * 4 / 2
        assert int(re.search(r"(\d+) collectives", r["note"])[1]) <= (8 if "exact" not in r["case"] else 40)
    timed = [r for r in results if r["unit"] == "s"]
    assert {r["opponent"] for r in timed} == {"one process"}
    assert {r["case"].split(",")[0] for r in timed} == {"bounds", "exact D(S)"}


def test_a_wrong_answer_of_the_ranks_ends_their_bench():
    whole = {"exact": (2.0, (3, 5)), "perturbation": (1.0, (0, 1))}
    right = [("exact", (2.0, (3, 5))), ("bracket", (1.5, (1, 5))), ("perturbation", (1 + 1e-6, (1, 0)))]
    wrong = [
        *[("exact", (2.0 + 1e-9, (3, 5))), ("exact", (2.0, (3, 4)))],
        *[("bracket", (2.1, (3, 5))), ("perturbation", (1 + 1e-5, (0, 1)))],
    ]
    for name, found in right:
        sharded._check(name, whole, [found] * 2, width=256)
    for name, found in wrong:
        with pytest.raises(AssertionError, match="the whole matrix has"):
            sharded._check(name, whole, [found] * 2, width=256)
    with pytest.raises(AssertionError, match="different answers"):
        sharded._check("exact", whole, [(2.0, (3, 5)), (2.0, (3, 6))], width=256)


@pytest.mark.parametrize("subcommand", ["optimizers", "monitor", "service", "faults", "sharded"])
def test_only_the_geometry_and_the_oracle_take_an_increment(tmp_path, subcommand):
    result, text = run("bench", subcommand, "--increment", tmp_path / "x.pt")
    assert result.exit_code == 2
    assert re.search(r"No such option:? '?--increment", text)  # versions of click differ


@pytest.mark.parametrize(
    ("arguments", "form"),
    [
        (["--optim"], "optimizers"),
        (["--faults", "--quick"], "faults"),
        (["--service"], "service"),
        (["--oracle", "--increment", "x.pt"], "oracle"),
        (["--increment", "x.pt"], "geometry --increment FILE"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_switch_that_became_a_subcommand_is_refused_with_its_new_form(arguments, form):
    result, text = run("bench", *arguments)
    assert result.exit_code == 2
    assert f"{arguments[0]}: this is a subcommand now: write hilbert-monitor bench {form}" in text.replace("'", "")
    assert arguments[0] not in run("bench", "--help")[1]


@pytest.mark.parametrize("option", [["--quick"], ["--json", "out.json"]], ids=lambda option: option[0])
def test_an_option_before_the_subcommand_is_refused(option):
    result, text = run("bench", *option, "geometry")
    assert result.exit_code == 2
    assert f"options stand after the subcommand: write hilbert-monitor bench geometry {' '.join(option)}" in text


@pytest.mark.parametrize("subcommand", ["geometry", "sharded", "optimizers", "monitor", "service", "faults", "oracle"])
def test_help_of_every_subcommand_has_an_example(subcommand):
    result, text = run("bench", subcommand, "--help")
    assert result.exit_code == 0
    assert f"Example: hilbert-monitor bench {subcommand} " in text
    assert {"--json", "--quick"} <= set(re.findall(r"--[a-z]+", text))


@pytest.mark.sweep
def test_the_oracle_is_measured_beside_simpler_bounds(tmp_path):
    result, text = run("bench", "oracle", "--quick", "--json", tmp_path / "gaps.json")
    assert result.exit_code == 0, text
    gaps = json.loads((tmp_path / "gaps.json").read_text())["results"]
    assert {r["rows"] for r in gaps} == {1024, 2048}
    for r in gaps:
        assert 0 < r["lower"] <= r["upper"]
        assert (
            1 <= r["gap"] <= r["jung_gap"] * (1 + 1e-6)
        )  # equal at once, where no two rows have a direction in common
        assert r["violation"] < 1e-9
    result, text = run("bench", "oracle", "--increment", tmp_path / "none.pt")
    assert result.exit_code == 2
    assert "there is no increment file" in text


def test_the_loop_that_muon_is_measured_against_makes_its_step():
    ours, theirs = ([optimizers._with_gradient(*s) for s in [(8, 8), (16, 4), (4, 16)]] for _ in range(2))
    buffers = [torch.zeros_like(p) for p in theirs]
    muon = Muon(ours)
    for _ in range(3):
        muon.step()
        muon_loop(theirs, buffers)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "there is no increment file"),
        (b"not a tensor", "torch.load can read"),
        ({"weights": torch.zeros(3)}, "holds no increment"),
    ],
    ids=["missing", "garbage", "other keys"],
)
def test_a_bad_increment_file_is_one_sentence_before_anything_runs(tmp_path, content, words):
    path = tmp_path / "x.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    result, text = run("bench", "geometry", "--increment", path)
    assert result.exit_code == 2
    assert words in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    "subcommand", ["", "geometry", "sharded", "optimizers", "monitor", "service", "faults", "oracle"]
)
def test_json_into_a_missing_folder_is_refused_before_anything_runs(tmp_path, subcommand):
    path = tmp_path / "no" / "out.json"
    result, text = run("bench", *filter(None, [subcommand]), "--json", path)
    assert result.exit_code == 2
    assert f"the folder of {path} does not exist: create it first" in text


def test_increments_are_read_in_both_forms(tmp_path):
    S = torch.randn(5, 3)
    torch.save(S, tmp_path / "a.pt")
    torch.save({"S_over_lr": S.half(), "lr": 0.5, "hidden": torch.randn(4, 3)}, tmp_path / "b.pt")
    assert torch.equal(load_increment(tmp_path / "a.pt").S, S)
    assert load_increment(tmp_path / "a.pt").H is None
    b = load_increment(tmp_path / "b.pt")
    assert torch.equal(b.S, S.half().float() * 0.5)
    assert b.H is not None


def test_synthetic_increments_are_repeatable_and_of_their_optimizer():
    adamw, rownorm = (make_increment(head, 2000, 32, panel=8) for head in ("adamw", "rownorm"))
    assert torch.equal(make_increment("adamw", 2000, 32, panel=8).S, adamw.S)
    lr = HEAD_LR["rownorm"] / 32
    norms = rownorm.S.norm(dim=1)
    assert norms.max() <= lr * (1 + 1e-6)
    assert row_diameter(rownorm.S).value <= 2 * lr * (1 + 1e-6) < row_diameter(adamw.S).value


def test_opponents_find_the_diameter_too():
    S = make_increment("adamw", 700, 16, panel=1).S
    expected = all_pairs_diameter(S)
    assert all_pairs_cdist(S, block=100) == pytest.approx(expected, rel=1e-5)
    assert all_pairs_matmul(S, block=100) == pytest.approx(expected, rel=1e-4)


def test_exponent_of_a_power_law():
    assert exponent([1, 2, 4, 8], [3.0, 12.0, 48.0, 192.0]) == pytest.approx(2)


def test_ratio_is_how_many_times_faster():
    assert BenchResult("s", "c", "ours", 0.5, "theirs", 2.0).ratio == 4


def test_peak_memory_counts_what_is_held_at_once():
    def call():
        for _ in range(3):
            a = torch.ones(1000, 1000)
            del a

    assert 4e6 <= peak_bytes(call) < 4.1e6
