"""Quantities with their baselines, and tables from columns."""

import math

import numpy as np

from bert_jax.analysis import quantities
from bert_jax.analysis.quantities import Quantity


def test_a_quantity_is_drawn_and_compared():
    """Baselines along the axis and everywhere; what is undefined is a gap, or left out."""
    baselines = {"random": [0.5, 0.25], "constant": 0.1, "missing": None, "undefined": [0.3, None]}
    one = Quantity("title", "nats", {"model": np.array([1, 2]), "other": [None, 4]}, baselines, log=True)
    drawn = one.curves()
    assert (drawn.title, drawn.x_label, drawn.y_label, drawn.log_y) == ("title", quantities.STATE, "nats", True)
    assert [(line.name, line.y, line.dashed) for line in drawn.series[:1] + drawn.series[2:4]] == [
        ("model", (1, 2), False),
        ("random", (0.5, 0.25), True),
        ("constant", (0.1, 0.1), True),
    ]
    assert [np.isnan(line.y).tolist() for line in (drawn.series[1], drawn.series[4])] == [[True, False], [False, True]]
    assert one.at(-1, 100)[:3] == (200, {"random": 25, "constant": 10}, None)
    assert math.isnan(quantities.compared(None, {"nothing": math.nan}).value)
    twins = Quantity("", "", {"a": [1], "b": [2]}, {"c": [3], "d": [4]}, same_colors=True).curves()
    assert [color for _, color in twins.colored_series] == [0, 1, 0, 1]


def test_tables():
    table = quantities.by_index(
        ("layer", "x", "y"), (["1", "2", "3"], quantities.paired([1, None], [math.nan, 2])), ["all"]
    )
    assert table.header == ("layer", "x", "y")
    assert table.rows == (("0", "1", "1.000 ()"), ("1", "2", " (2.000)"), ("all", "3", ""))
    assert quantities.cells([0.5, None, math.nan], ".0f", 100) == ["50", "", ""] and quantities.cells([3], ",") == ["3"]


def test_maps_by_head():
    found = quantities.by_head("title", np.array([[1.0, 2], [3, 4], [5, 6]]), "unit", center=0.0)
    assert (found.rows, found.columns) == (("0", "1", "2"), ("0", "1"))
    assert found.values[1] == (3, 4) and (found.row_label, found.column_label, found.center) == ("layer", "head", 0)
