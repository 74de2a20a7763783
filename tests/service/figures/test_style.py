"""Colours and templates of the figures."""

import plotly.graph_objects as go
import pytest

from hilbert_monitor.service.figures import compare_figures
from hilbert_monitor.service.figures.comparison import compare
from hilbert_monitor.service.figures.style import INK, colour, template
from tests.support.run_series import make_run


def test_an_optimizer_has_the_same_colour_in_every_figure():
    for runs in (
        [make_run("RowNorm", diameter=[1.0])],
        [make_run(name, diameter=[1.0]) for name in ("AdamW", "RowNorm")],
    ):
        (comparison,) = compare(runs)
        assert compare_figures.diameter(comparison)["data"][-1]["line"]["color"] == colour("RowNorm")
    assert colour("Lion") == colour("Lion")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_a_template_is_valid_plotly_and_has_the_text_colour_of_its_theme(theme):
    assert go.layout.Template(template(theme)).layout.font.color == INK[theme][0]
