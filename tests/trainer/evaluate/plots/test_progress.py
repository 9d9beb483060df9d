"""docs/methods.md, "evaluation": the picture of the rounds."""

import io
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from edgefl_trainer.evaluate.chance import Chance
from edgefl_trainer.evaluate.plots import progress as drawing
from edgefl_trainer.evaluate.plots.progress import plot_progress, spread_out
from edgefl_trainer.evaluate.plots.tracks import FEW_BYTES, bytes_by_round, curves

LINES = [{"round": r, "site": s, "balanced_accuracy": 0.5 + 0.1 * r} for r in (2, 1) for s in ("b", "a")]


def test_curves_are_picked_by_site_and_round():
    extra = [{"round": 1, "site": "a", "balanced_accuracy": 0.9}, {"round": 3, "site": "a", "balanced_accuracy": None}]
    found = curves([*LINES, *extra, {"phase": "warm"}])
    assert found == {"a": {2: 0.7, 1: 0.9}, "b": {2: 0.7, 1: 0.6}}


ABOVE = [{"round": r, "site": "b", "balanced_accuracy": 0.7 + 0.1 * r} for r in (1, 2)]


@pytest.mark.parametrize("runs", [{"one": [[*LINES, *ABOVE]]}, {"one": [LINES, ABOVE], "two": [ABOVE], "empty": [[]]}])
def test_the_picture_is_a_drawn_png(runs):
    """Over rounds on the left, over bytes on the right: the first colour's line runs across both halves."""
    data = plot_progress(runs, title="rounds")
    picture = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    assert min(picture.shape[:2]) > 400
    _, columns = np.nonzero(np.abs(picture.astype(int) - [0x00, 0x72, 0xB2]).sum(axis=2) < 60)
    half = picture.shape[1] // 2
    assert np.ptp(columns[columns < half]) > 300  # px
    assert (columns > half).any()
    assert data == plot_progress(runs, title="rounds")


@pytest.fixture
def progress(monkeypatch):
    """Draw, and give the axes over rounds."""
    drawn = []
    monkeypatch.setattr(drawing, "png", lambda figure, **_: drawn.append(figure) or b"")

    def draw(runs, **more):
        plot_progress(runs, **more)
        return drawn[-1].axes[0]

    return draw


def data_lines(axes):
    return {
        line.get_label().removesuffix(drawing.EQUAL): line
        for line in axes.lines
        if line.get_transform() == axes.transData and line.get_label()[0] != "_"
    }


def test_of_lines_that_are_the_same_each_is_seen(progress):
    lines = data_lines(progress({"a": [LINES], "b": [LINES], "c": [ABOVE]}))
    assert [line.get_label() for line in lines.values()] == ["a (equal)", "b (equal)", "c"]
    below, above, other = lines.values()
    assert below.get_linewidth() - above.get_linewidth() >= 3 and above.get_linewidth() == other.get_linewidth()
    assert below.get_markersize() - above.get_markersize() >= 2


def test_beside_the_axes_nothing_looks_like_data(progress):
    """Threads were as bold as lines and ended in a marker, as a line does."""
    axes = progress({"a": [LINES], "b": [ABOVE]})
    threads = [text.arrow_patch for text in axes.texts if getattr(text, "arrow_patch", None)]
    assert len(threads) == 2 and all(len(set(thread.get_edgecolor()[:3])) == 1 for thread in threads)  # grey
    assert axes.spines["right"].get_visible()
    outside = [line for line in axes.lines if line.get_transform() == axes.transAxes]
    assert len(outside) == 2 and min(np.min(line.get_xdata()) for line in outside) > drawing.LEADS_TO


def test_chance_is_drawn(progress):
    """Runs that learned nothing looked like any other."""
    axes = progress({"a": [LINES], "b": [ABOVE]}, chance=dict.fromkeys("ab", Chance({}, 0.5)))
    assert any(set(line.get_ydata()) == {0.5} for line in axes.lines)
    assert "chance 0.5" in [text.get_text() for text in axes.texts]
    assert axes.get_ylim()[0] < 0.5


def test_sites_that_differ_in_chance_have_a_line_each(progress):
    """0.50 at a site of two classes was drawn as twice chance."""
    chance = Chance({"a": 0.5, "b": 0.25}, 0.375)
    axes = progress({"one": [LINES]}, chance={"one": chance})

    def drawn(axes):
        lines = [line for line in axes.lines if line.get_transform() != axes.transAxes]  # without samples of lines
        return {line.get_label(): line.get_ydata()[0] for line in lines if line.get_label().startswith("chance")}

    told = drawn(axes)
    assert told == {"chance 0.5: a": 0.5, "chance 0.25: b": 0.25, "chance 0.375: the mean": 0.375}
    axes = progress({"one": [LINES], "two": [LINES]}, chance={"one": chance, "two": chance})
    assert drawn(axes) == {"chance 0.375": 0.375}


def test_a_line_that_a_longer_one_begins_with_frames_it(progress):
    """docs/guides/first-run.md: of a run of 2 rounds under one of 3 nothing could be seen, as they agree so far."""
    longer = [*LINES, *({"round": 3, "site": s, "balanced_accuracy": 0.9} for s in "ab")]
    lines = data_lines(progress({"short": [LINES], "long": [longer], "other": [ABOVE]}))
    assert lines["short"].get_linewidth() == lines["long"].get_linewidth() + drawing.WIDER
    assert lines["long"].get_linewidth() == lines["other"].get_linewidth()


def test_a_method_that_sends_nothing_stands_at_no_bytes(progress):
    """The axis is logarithmic: it had no place for 0, and said 1 B."""
    axes = progress({"a": [LINES]}).figure.axes[1]
    assert set(data_lines(axes)["a"].get_xdata()) == {FEW_BYTES}
    assert [axes.xaxis.get_major_formatter()(value, 0) for value in (0.5, 1.0, 16.0, 2048.0)] == [
        "",
        "0 B",
        "16 B",
        "2 KiB",
    ]


def test_a_mean_that_is_drawn_is_without_sites_of_one_class(progress):
    """LINES: a and b at 0.6, 0.7; a third site of one class at 1."""
    alone = [{"round": r, "site": "c", "balanced_accuracy": 1.0} for r in (1, 2)]
    axes = progress({"one": [[*LINES, *alone]]}, one_class={"one": {"c"}})
    lines = data_lines(axes)
    assert list(lines) == ["a", "b", "c*", "mean of 2 sites without *"]
    assert list(lines["mean of 2 sites without *"].get_ydata()) == pytest.approx([0.6, 0.7])
    axes = progress({"one": [[*LINES, *alone]], "two": [LINES]}, one_class={"one": {"c"}})
    assert list(data_lines(axes)["one"].get_ydata()) == pytest.approx([0.6, 0.7])
    assert "without sites of one class" in axes.get_ylabel()
    with pytest.raises(ValueError, match="no mean to draw"):
        progress({"one": [alone], "two": [LINES]}, one_class={"one": {"c"}})


SEEDS = [[{"round": r, "site": s, "balanced_accuracy": f + 0.1 * r} for r in (1, 2) for s in "ab"] for f in (0.2, 0.4)]


def test_seeds_of_one_method_share_a_colour_and_their_mean_is_bold(progress):
    """Three seeds of two methods were six lines in six colours."""
    axes = progress({"one": SEEDS, "two": [LINES]})
    lines = [line for line in axes.lines if line.get_transform() == axes.transData]
    mean = data_lines(axes)["one (2 seeds)"]
    assert list(mean.get_ydata()) == pytest.approx([0.4, 0.5])  # by hand: (0.3 + 0.5) / 2, (0.4 + 0.6) / 2
    thin = [line for line in lines if line.get_color() == mean.get_color() and line is not mean]
    assert [list(line.get_ydata()) for line in thin] == [pytest.approx([0.3, 0.4]), pytest.approx([0.5, 0.6])]
    assert all(line.get_linewidth() < mean.get_linewidth() / 2 for line in thin)
    assert "thin: one seed; thick: mean over seeds" in axes.get_ylabel()
    assert data_lines(axes).keys() == {"one (2 seeds)", "two"}
    assert "thin" not in progress({"one": [LINES], "two": [LINES]}).get_ylabel()


def test_seeds_of_one_method_alone_are_no_sites(progress):
    """Of several seeds the first one's sites were drawn, as if there were no other."""
    assert list(data_lines(progress({"one": SEEDS}))) == ["one (2 seeds)"]


def test_a_curve_says_on_how_many_rows_it_is(progress):
    rows = {"a": 24, "b": 8}
    told = [line | {"tune_rows": rows[line["site"]]} for line in LINES]
    axes = progress({"one": [told]})
    assert list(data_lines(axes)) == ["a (n = 24)", "b (n = 8)", "mean of 2 sites"]
    assert "n: how many a site has" in axes.get_ylabel()
    axes = progress({"one": [told], "two": [[line for line in told if line["site"] == "a"]]})
    assert "mean over 1 to 2 sites, n = 24 to 32 tune rows together" in axes.get_ylabel()
    axes = progress({"one": [told], "two": [told]}, one_class={"one": {"b"}, "two": {"b"}})
    assert "mean over 1 site, n = 24 tune rows together" in axes.get_ylabel()
    assert "tune rows" not in progress({"one": [told], "two": [LINES]}).get_ylabel()  # of a run from before


def test_where_a_part_of_the_sites_is_in_each_round_the_mean_is_said_to_be_over_those(progress):
    """`--participation 0.34` judged one site of three a round, and the axis counted the sites of all rounds."""
    one_each = [
        {"round": number, "site": site, "balanced_accuracy": 0.5, "tune_rows": 5}
        for number, site in enumerate("abb", 1)
    ]
    both = [{"round": 4, "site": site, "balanced_accuracy": 0.5, "tune_rows": 5} for site in "ab"]
    axes = progress({"one": [one_each], "two": [one_each]})
    assert "mean over 1 site of each round, n = 5 tune rows together" in axes.get_ylabel()
    axes = progress({"one": [one_each], "two": [[*one_each, *both]]})
    assert "mean over 1 to 2 sites of each round, n = 5 to 10 tune rows together" in axes.get_ylabel()
    assert "mean of the sites of each round" in data_lines(progress({"one": [one_each]}))


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_progress({"one": [[{"round": 1, "site": "a"}]]})


def test_more_lines_than_names_fit_is_an_error():
    with pytest.raises(ValueError, match="there are 21 lines"):
        plot_progress({f"run {i}": [ABOVE] for i in range(21)})


def test_bytes_add_up_over_sites_ways_and_rounds():
    """A warm phase (round 0) counts, so a method that asks first is not drawn as free."""
    lines = [{"round": r, "site": s, "bytes_up": 10 * r + 1, "bytes_down": 100} for r in (0, 1, 2) for s in "ab"]
    assert bytes_by_round(lines) == {0: 202, 1: 202 + 222, 2: 202 + 222 + 242}


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_names_keep_their_order_and_distance(wanted):
    placed = spread_out(wanted, 0.05)
    assert [placed[i] for i in np.argsort(wanted, kind="stable")] == sorted(placed)
    assert all(b - a >= 0.05 - 1e-9 for a, b in itertools.pairwise(sorted(placed)))
    assert min(placed) >= -1e-9 and max(placed) <= 1 + 1e-9


def test_a_name_with_room_stays_where_its_line_ends():
    assert spread_out([0.9, 0.1, 0.5], 0.05) == pytest.approx([0.9, 0.1, 0.5])
    assert spread_out([0.5, 0.5], 0.1) == pytest.approx([0.45, 0.55])
