"""What the sections of a report say: captions, settings, software, and the order of the runs."""

import re
from xml.etree import ElementTree

from hilbert_monitor.runs.record import Alert
from hilbert_monitor.service.report import summary
from hilbert_monitor.service.report.illustrations import illustrations
from tests.service.report.test_report import (
    ParsedPage,
    comparisons_of,
    figures_in,
    invoke,
    page_of,
    write_run,
    write_six_runs,
)


def captions_of(root):
    return {one.name: one.caption for some in illustrations(summary.load(root), comparisons_of(root)) for one in some}


def section(text, title, following):
    return re.search(rf"{title}(.*?){following}", text, re.S)[1]


# Captions and figures


def test_captions_say_what_lines_and_bands_are_and_over_how_many_seeds(tmp_path):
    captions = captions_of(write_six_runs(tmp_path))
    lines = "Lines are means over 3 seeds; faint lines are single seeds."
    bands = f"{lines} Bands are the mean ± one sample standard deviation over the seeds."
    for name in ("loss", "diameter", "perturbation"):
        assert bands in captions[name]
        assert "Dotted" not in captions[name]
    assert "over 3 pairs of runs with one seed, model and panel" in captions["ratio"]
    text = ParsedPage(page_of(tmp_path)).text
    assert f"Figure 1. Loss. Validation loss, and thinner the mean training loss. {bands}" in text
    assert "Figure 4. AdamW over RowNorm." in text


def test_captions_count_uneven_groups_single_runs_and_runs_without_a_seed(tmp_path):
    for seed in range(3):
        write_run(tmp_path / "uneven", seed=seed)
    for seed in range(2):
        write_run(tmp_path / "uneven", "RowNorm", seed=seed)
    write_run(tmp_path / "uneven", "SGD", error=RuntimeError())
    caption = captions_of(tmp_path / "uneven")["diameter"]
    assert "Lines are means over 3 seeds of AdamW and 2 of RowNorm; faint" in caption
    assert caption.endswith("Dotted: runs that are in no mean.")
    write_run(tmp_path / "uneven", "Muon")
    assert captions_of(tmp_path / "uneven")["loss"].endswith(
        "Lines are means over 3 seeds of AdamW, 2 of RowNorm and 1 of Muon; faint lines are single seeds. Bands are the"
        " mean ± one sample standard deviation over the seeds. A line of one seed has no band. Dotted: runs that are in"
        " no mean."
    )
    for optimizer in ("AdamW", "RowNorm"):
        write_run(tmp_path / "single", optimizer)
    assert captions_of(tmp_path / "single")["diameter"].endswith("Each line is one run.")
    for number in range(2):
        write_run(tmp_path / "seedless", seed=None, name=f"run {number}")
    assert captions_of(tmp_path / "seedless")["diameter"].endswith("one sample standard deviation over the runs.")


def test_every_figure_of_the_page_has_titles_on_both_axes(tmp_path):
    for figure in figures_in(page_of(write_six_runs(tmp_path)))["figures"]:
        assert figure["layout"]["yaxis"]["title"]["text"]
        assert figure["layout"]["xaxis"]["title"]["text"] == "training tokens"


def test_a_single_run_has_the_panels_of_its_page(tmp_path):
    write_run(tmp_path)
    titles = re.findall(r"<b>Figure \d+\. (.*?)\.</b>", page_of(tmp_path))
    assert titles == ["Row diameter D(S)", "Hilbert perturbation", "Loss"]
    assert "Final values: mean" not in page_of(tmp_path)
    write_run(tmp_path, seed=1)
    assert "Hilbert RMS perturbation" in page_of(tmp_path)


def test_figures_are_written_as_svg_with_the_model_in_the_name_if_there_are_several(tmp_path):
    write_six_runs(tmp_path / "runs")
    code, text = invoke("report", tmp_path / "runs", "--out", tmp_path / "r.html", "--figures", tmp_path / "figures")
    assert code == 0, text
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        *("diameter.svg", "loss.svg", "perturbation.svg", "ratio.svg")
    ]
    for path in (tmp_path / "figures").iterdir():
        root = ElementTree.parse(path).getroot()
        assert "training tokens" in ["".join(element.itertext()) for element in root.iter()]
    write_run(tmp_path / "runs", config={"size": "an/other"}, name="x")
    invoke("report", tmp_path / "runs", "--out", tmp_path / "r.html", "--figures", tmp_path / "more")
    assert {"tiny-loss.svg", "an-other-loss.svg"} <= {path.name for path in (tmp_path / "more").iterdir()}


# Settings and software


def test_settings_that_differ_come_first_and_the_shared_ones_follow(tmp_path):
    versions = {"torch": "2.13.0", "python": "3.11.7"}
    for seed, rate in enumerate((0.5, 0.25, 0.25)):
        config = {"size": "tiny", "lr": {"head": rate}, "warmup": 100}
        write_run(tmp_path, seed=seed, config=config, versions=versions)
    write_run(tmp_path, seed=3, config=config, versions={**versions, "torch": "2.12.0"})
    text = ParsedPage(page_of(tmp_path)).text
    assert re.match(r"lr\.head0\.5 AdamW-00\.25 AdamW-1, AdamW-2, AdamW-3$", section(text, "between the runs", "What"))
    shared = section(text, "What all runs share", "Software")
    assert "warmup100" in shared
    assert "lr.head" not in shared
    assert "torch" not in shared
    software = section(text, "Software", "$")
    assert "python3.11.7" in software
    assert "2.12.0 AdamW-3" in software


def test_a_single_run_has_its_settings_and_software(tmp_path):
    write_run(tmp_path, config={"size": "tiny", "lr": 0.5}, versions={"torch": "2.13.0"})
    text = ParsedPage(page_of(tmp_path)).text
    assert "lr0.5" in section(text, "Settings", "Software")
    assert "torch2.13.0" in text
    assert "What differs" not in text


def test_the_runs_of_a_sweep_are_in_the_order_of_their_losses_with_what_is_their_own(tmp_path):
    for number, rate in enumerate((0.01, 0.02, 0.03)):
        write_run(tmp_path, loss=4.0 - number, name=f"run {number}", config={"size": "tiny", "opt": {"lr": rate}})
    write_run(tmp_path, loss=float("nan"), name="broken", config={"size": "tiny", "opt": {"lr": 9}})
    runs = section(ParsedPage(page_of(tmp_path)).text, "The lowest", "Alerts")
    assert re.findall(r"run \d|broken", re.sub("run-", "", runs)) == ["run 2", "run 1", "run 0", "broken"]
    assert "lr=0.03" in runs
    assert "size=" not in runs


def test_an_alert_without_message_and_texts_names_its_tokens_by_their_ids(tmp_path):
    writer = write_run(tmp_path, close=False)
    writer.alert(Alert(step=10, time=1.0, kind="diameter", value=0.5, pair=(11, 198)))
    writer.close()
    assert "diameter: 0.5, tokens 11 and 198" in ParsedPage(page_of(tmp_path)).text
