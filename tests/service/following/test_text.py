"""CSV cells that a spreadsheet would take for formulas."""

import pytest

from hilbert_monitor.service.following.text import cell


@pytest.mark.parametrize(
    "text", ["=1", "+1", "-1", "@a", "\t=1", "\r=1", "\n=1", "\uff1d1", "\uff0b1", "\uff0d1", "\uff20a"]
)
def test_a_text_that_starts_like_a_formula_is_quoted(text):
    assert cell(text) == "'" + text


@pytest.mark.parametrize("value", [-1.5, None, "a=1", "", 3])
def test_any_other_value_is_unchanged(value):
    assert cell(value) is value
