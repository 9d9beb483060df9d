"""Summaries of finished runs, written by hand, and the axes of a picture instead of its bytes."""

import pytest

from edgefl_trainer.evaluate.metrics import federation_summary
from edgefl_trainer.evaluate.plots import metric_plot
from edgefl_trainer.evaluate.tables.rows import table_rows


def summary(method, seed, figures, **more):
    sites = {name: {"balanced_accuracy": value} for name, value in figures.items()}
    base = {"method": method, "task": "nevus", "seed": seed, "preset": "bench84", "rounds": 5, "reported_rows": "val"}
    traffic = {"bytes_up_per_round": 1536.0, "bytes_down_per_round": 3 * 2**20}
    return base | traffic | {"sites": sites} | federation_summary(sites) | more


ONE = summary("local", 0, {"b": 0.6, "a": 0.8})


@pytest.fixture
def drawn_rows(monkeypatch):
    """Draw a figure of runs; give the axes."""
    drawn = []
    monkeypatch.setattr(metric_plot, "png", lambda figure, **_: drawn.append(figure.axes[0]) or b"")

    def draw(runs, metric="balanced_accuracy", **more):
        metric_plot.plot_metric(table_rows(runs, metric), metric, **more)
        return drawn[-1]

    return draw


@pytest.fixture
def drawn_metric(drawn_rows):
    """Draw a figure of one run's sites; give the axes, and the ends of the bar across the mean."""

    def draw(sites, metric, **more):
        axes = drawn_rows([ONE | {"sites": sites}], metric, **more)
        bars = [one for one in axes.containers if one.has_xerr]
        return axes, bars[0].lines[2][0].get_segments()[0][:, 0] if bars else None

    return draw
