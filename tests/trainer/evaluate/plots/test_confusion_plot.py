"""The picture of a confusion matrix: its fields, and its title."""

import io

import numpy as np
from matplotlib.text import Text
from PIL import Image

from edgefl_trainer.evaluate.plots import confusion_plot
from edgefl_trainer.evaluate.plots.confusion_plot import plot_confusion


def test_the_picture_has_a_field_for_each_pair():
    with Image.open(io.BytesIO(plot_confusion(np.array([[3, 1, 0], [0, 2, 0]]), ("MEL", "NV"), "x"))) as picture:
        assert picture.format == "PNG" and min(picture.size) > 400


def test_the_title_stands_within_the_picture(monkeypatch):
    """Its longest lines were cut off at both sides: few classes, a loan, learned pictures and an untrained network."""
    drawn = []
    monkeypatch.setattr(confusion_plot, "png", lambda figure, **_: drawn.append(figure) or b"")
    title = (
        "fedevprompt, model of vidir_molemax, 3,809 pictures (test rows) of 6 sites\nTOO HIGH: the run learned from "
        "1,234 of these pictures\nUNTRAINED NETWORK: this trial shows the steps, not what a model can do"
    )
    for classes in (2, 8):
        plot_confusion(np.ones((classes, classes + 1), dtype=int), [f"c{k}" for k in range(classes)], title)
        figure = drawn.pop()
        figure.draw_without_rendering()
        (said,) = [text for text in figure.findobj(Text) if "fedevprompt" in text.get_text()]
        assert said.get_text().split() == title.split()
        box = said.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height


def test_a_pair_that_never_happened_is_0_and_a_class_without_pictures_is_empty(monkeypatch):
    """An empty field was read as a missing figure."""
    drawn = []
    monkeypatch.setattr(confusion_plot, "png", lambda figure, **_: drawn.append(figure.axes[0]) or b"")
    plot_confusion(np.array([[3, 0, 0, 0], [1, 2, 0, 0], [0] * 4]), ("MEL", "NV", "BCC"), "x")
    assert [text.get_text() for text in drawn[0].texts] == ["3", "0", "0", "1", "2", "0"]
