"""The table in LaTeX: its numbers, and that no name can break it. It is compiled where LaTeX is installed."""

import re
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hilbert_monitor.service.report import latex
from tests.service.report.test_report import ParsedPage, comparisons_of, invoke, page_of, write_run, write_six_runs

HOSTILE = r"a_b & 100% $x$ #1 {c} \input{x} ~^<>|[]* 🦉 é" + "\n\x00"


def rows_of(text):
    """The cells of each row of the tables, after checks that everything that is opened is closed."""
    bare = re.sub(r"\\[\\{}$&%#_]", " ", text)
    assert bare.count("{") == bare.count("}")
    assert bare.count("$") % 2 == 0
    for environment in ("table", "tabular"):
        assert text.count(rf"\begin{{{environment}}}") == text.count(rf"\end{{{environment}}}")
    lines = [line for line in text.splitlines() if line.endswith(r"\\")]
    rows = [[cell.strip() for cell in re.split(r"(?<!\\)&", line.removesuffix(r"\\"))] for line in lines]
    assert {len(row) for row in rows} == {5}
    return rows


def test_the_table_has_means_deviations_ratios_and_the_difference(tmp_path):
    head, adamw, rownorm, ratio, difference = rows_of(latex.tables(comparisons_of(write_six_runs(tmp_path))))
    assert head == ["LM head", "Validation loss", "$D(S)$", "Hilbert RMS", "Runs"]
    assert adamw[:3] == ["AdamW", r"$3.2500 \pm 0.2500$", r"$(5.000 \pm 2.500) \times 10^{-1}$"]
    assert rownorm[0] == "RowNorm"
    assert rownorm[-1] == "3"
    assert ratio == ["AdamW / RowNorm", "", r"$16.0\times$", r"$1.0\times$", "3 pairs"]
    assert difference == ["RowNorm $-$ AdamW", r"$+0.2500 \pm 0.1250$", "", "", "3 pairs"]


def test_one_run_has_neither_deviation_nor_ratio(tmp_path):
    write_run(tmp_path)
    text = latex.tables(comparisons_of(tmp_path))
    assert [row[:2] for row in rows_of(text)[1:]] == [["AdamW", "$3.0000$"]]
    assert r"\pm" not in text
    assert text.count(r"\midrule") == 1


def test_a_size_of_the_paper_stands_beside_its_numbers(tmp_path):
    for optimizer in ("AdamW", "RowNorm"):
        write_run(tmp_path, optimizer, config={"size": "190M"})
    rows = {row[0]: row for row in rows_of(latex.tables(comparisons_of(tmp_path)))}
    assert rows["AdamW, paper"][1:3] == [r"$3.1588 \pm 0.0027$", r"$(2.870 \pm 0.140) \times 10^{-2}$"]


def test_sides_that_differ_in_the_optimizer_alone_share_one_row_and_say_their_settings_once(tmp_path):
    for rate in (0.1, 0.2):
        for seed in range(2):
            for optimizer in ("AdamW", "RowNorm"):
                config = {"size": "tiny", "lr": rate}
                write_run(tmp_path, optimizer, seed, name=f"{optimizer} {seed} {rate}", config=config)
    rows = rows_of(latex.tables(comparisons_of(tmp_path)))[5:]
    assert [row[0] for row in rows] == [f"RowNorm against AdamW, lr={rate}" for rate in (0.1, 0.2)]
    assert rows[0][1:] == [r"$+0.0000 \pm 0.0000$", r"$1.0\times$", r"$1.0\times$", "2 pairs"]
    text = ParsedPage(page_of(tmp_path)).text
    assert "RowNorm against AdamW, lr=0.1+0.0000 ± 0.00001.0×1.0×2 pairs" in text  # noqa: RUF001


def test_each_model_has_a_table_with_a_label_of_its_own(tmp_path):
    for size in ("a b", "a/b", "c_d"):
        write_run(tmp_path, config={"size": size}, name=size)
    labels = re.findall(r"\\label\{(.*?)\}", latex.tables(comparisons_of(tmp_path)))
    assert len(set(labels)) == 3
    assert all(re.fullmatch(r"[a-zA-Z0-9:.-]+", label) for label in labels)


@given(st.text(max_size=100) | st.just(HOSTILE))
def test_any_name_is_set_as_text(name):
    text = latex.escape(name)
    assert "\n" not in text
    assert rows_of(rf"{text} & & & & \\")
    assert not re.search(r"(?<!\\)[&%#_$]", text)
    assert set(re.findall(r"\\([a-zA-Z]+)", text)) <= {
        *("textbackslash", "textasciitilde", "textasciicircum", "textless", "textgreater", "textbar")
    }
    assert not text.startswith(("[", "*"))


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not installed")
def test_it_compiles(tmp_path):
    write_six_runs(tmp_path / "runs")
    write_run(tmp_path / "runs", HOSTILE, config={"size": HOSTILE})
    code, text = invoke("report", tmp_path / "runs", "--out", tmp_path / "r.html", "--latex", tmp_path / "table.tex")
    assert code == 0, text
    document = r"\documentclass{article}\usepackage{booktabs}\begin{document}\input{table}\end{document}"
    (tmp_path / "main.tex").write_text(document)
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "main"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-3000:]
