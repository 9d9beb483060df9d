"""`edgefl-train report`: the page says what summary.json says, asks for nothing, and runs nothing."""

import json
import re
import shutil
import tarfile
from dataclasses import replace
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.trainer.conftest import edgefl_train

from edgefl_trainer.reports.blocks import figure
from edgefl_trainer.reports.findings import in_short
from edgefl_trainer.reports.page import report_page
from edgefl_trainer.reports.run_facts import read_run

OLD_RUN = Path(__file__).resolve().parents[2] / "vectors/old_folders/run.tar.gz"
NOW = datetime(2026, 11, 26, 12, tzinfo=UTC)
VOID = {"meta", "img", "br", "link"}


class Read(HTMLParser):
    """What a browser sees: tags with their attributes, all text, and the figures with their paths."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.figures: list[tuple[list[str | int], str]] = []
        self.path: list[str | int] | None = None
        self.feed(page)
        assert self.open == [], "a tag is not closed"

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)
        if "data-figure" in dict(attributes):
            self.path = json.loads(dict(attributes)["data-figure"] or "")
            self.figures.append((self.path, ""))
        elif tag == "small":
            self.path = None  # an interval is another figure

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag in ("td", "dd", "small"):
            self.path = None

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.path is not None:
            self.figures[-1] = (self.path, self.figures[-1][1] + data)


@pytest.fixture(scope="module")
def page(finished) -> str:
    return report_page([read_run(finished["fedevprompt"])], NOW)


def at(summary, path):
    for step in path:
        summary = summary[step]
    return summary


def shown_number(text: str) -> tuple[float, float]:
    """The number that a cell shows, and half a unit of its last place."""
    number, digits, unit = re.fullmatch(r"([\d,]+(?:\.(\d+))?)( %)?", text.strip()).groups()
    scale = 0.01 if unit else 1.0
    return float(number.replace(",", "")) * scale, 0.5 * scale * 10 ** -len(digits or "") + 1e-9


def test_every_figure_is_that_of_the_summary(page, finished):
    """Each cell that names a place of summary.json shows what stands there, and most of it is shown."""
    summary = json.loads((finished["fedevprompt"] / "summary.json").read_text())
    figures = Read(page).figures
    checked = 0
    for path, text in figures:
        value = at(summary, path)
        if isinstance(value, str):
            assert text == value
        elif value is None:
            assert text == "–" or "no " in text
        elif not str(path[-1]).startswith("bytes_") and path[-1] not in ("full_model_bytes", "seconds"):
            number, unit = shown_number(text)
            assert abs(number - value) <= unit, (path, text, value)
            checked += 1
    paths = {tuple(path) for path, _ in figures}
    for site in ("east", "west"):
        assert {("sites", site, name) for name in ("balanced_accuracy", "ece", "brier", "aurc", "n_train")} <= paths
        assert {("sites", site, "recall", k) for k in range(2)} <= paths
        assert ("sites", site, "referral", "referred") in paths
    assert ("pooled", "auroc") in paths and ("state_sha256",) in paths and checked > 40


def test_intervals_stand_below_their_figures(page, finished):
    summary = json.loads((finished["fedevprompt"] / "summary.json").read_text())
    low, high = summary["sites"]["east"]["brier_interval"]
    assert f"<small>{low:.3f} to {high:.3f}</small>" in page


def test_the_page_asks_for_nothing_and_runs_nothing(page):
    read = Read(page)
    pictures = 0
    for tag, attributes in read.tags:
        assert tag not in {"script", "link", "iframe", "object", "embed", "form", "base", "a"}
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href", "srcset", "action", "data", "background", "poster"):
            if (value := attributes.get(name)) is not None:
                assert value.startswith("data:image/png;base64,")
                pictures += 1
        assert "url(" not in (attributes.get("style") or "")
    assert pictures >= 3
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert "@import" not in style and "url(" not in style
    policy = [attributes["content"] for tag, attributes in read.tags if "http-equiv" in attributes]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_the_page_tells_whose_pictures_and_what_travels(page, finished):
    read = Read(page)
    for words in ("For research only", "maps", "east", "west", "nevus", "arXiv 2411.10071", "anneal_epochs"):
        assert words in read.text
    summary = json.loads((finished["fedevprompt"] / "summary.json").read_text())
    assert summary["sites"]["east"]["learned_images"] == [7, 6] or sum(summary["sites"]["east"]["learned_images"]) == 13
    assert summary["state_sha256"] in read.text and summary["partition_sha256"] in read.text


def renamed(facts, site: str, label: str, folder: str):
    """The same run with another name of a site, of a class, and of its folder."""
    text = json.dumps({**facts.summary})
    summary = json.loads(text)
    summary["sites"] = {site if name == "east" else name: one for name, one in summary["sites"].items()}
    for key in ("confusion", "curves"):
        summary[key] = {site if name == "east" else name: one for name, one in summary[key].items()}
    summary["classes"] = [label, *summary["classes"][1:]]
    return replace(facts, run=replace(facts.run, summary=summary, folder=Path(folder)), suspicion={site: label})


odd = st.text(st.characters(exclude_categories=["Cs", "Cc", "Cn", "Co"]), min_size=1, max_size=30)


@pytest.mark.parametrize("pictures", ["drawn"], indirect=True)
@pytest.mark.filterwarnings("ignore:Glyph")  # a font of pictures has no sign for each
@settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(odd, odd)
def test_odd_names_are_words(finished, drawn_nothing, site, label):
    facts = renamed(read_run(finished["local"]), "s" + site, "c" + label, "run")
    read = Read(report_page([facts], NOW))
    assert "s" + site in read.text and "c" + label in read.text
    assert {tag for tag, _ in read.tags} == drawn_nothing


@pytest.fixture(scope="module")
def drawn_nothing(finished):
    """The tags of a page with ordinary names."""
    return {tag for tag, _ in Read(report_page([renamed(read_run(finished["local"]), "s", "c", "run")], NOW)).tags}


@pytest.mark.parametrize(
    ("name", "pictures"),
    [
        ("<script>alert(1)</script>", "drawn"),
        *((name, "left out") for name in ('"><img src=http://x>', "</style>&lt;", "{{ 7*7 }}", "'x")),
    ],
    indirect=["pictures"],
)
def test_a_name_that_is_markup_stays_a_name(finished, drawn_nothing, name):
    page = report_page([renamed(read_run(finished["local"]), name, name, name.replace("/", "-"))], NOW)
    read = Read(page)
    assert "<script" not in page and "http://x>" not in page
    assert {tag for tag, _ in read.tags} == drawn_nothing
    assert name in read.text


def test_a_run_from_before_a_figure_says_that_it_is_not_recorded(tmp_path):
    with tarfile.open(OLD_RUN) as archive:
        archive.extractall(tmp_path, filter="data")
    (config,) = tmp_path.rglob("config.toml")
    summary = json.loads((config.parent / "summary.json").read_text())
    assert "curves" not in summary
    read = Read(report_page([read_run(config.parent)], NOW))
    assert "Curves of calibration and of risk are not recorded" in read.text
    assert "How many pictures of each class the sites learned from is not recorded" in read.text
    for path, text in read.figures:
        try:
            at(summary, path)
        except (KeyError, IndexError, TypeError):
            assert text in ("not recorded", "–"), (path, text)


def test_several_runs_are_compared_first(finished, tmp_path):
    out = tmp_path / "two.html"
    outcome = edgefl_train("report", finished["local"], finished["fedavg"], "-o", out)
    assert outcome.code == 0 and outcome.out == "", outcome.err
    read = Read(out.read_text())
    assert read.text.index("The runs compared") < read.text.index("What was learned, and from whom")
    headings = [tag for tag, _ in read.tags].count("h1")
    assert headings == 3
    table = edgefl_train("table", finished["local"], finished["fedavg"], "--format", "json").json()
    for row in table["rows"]:
        assert f"{row['mean']['mean']:.3f} ± {row['mean']['std']:.3f}" in read.text


def test_a_comparison_has_every_column_of_which_its_caption_speaks(finished, tmp_path):
    """The caption was that of `table`, whose columns of shares and of means without some sites the page lacked."""
    shutil.copytree(finished["local"], tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    summary["sites"]["east"] |= {"classes_tested": 1, "took_part": {"rounds": 0, "of": 5}}
    (tmp_path / "run/summary.json").write_text(json.dumps(summary))
    runs = [finished["fedavg"], tmp_path / "run"]
    page = report_page([read_run(run) for run in runs], NOW)
    compared = page.partition("The runs compared")[2].partition("</figure>")[0]
    columns = re.findall(r'<th scope="col"[^>]*>([^<]*)</th>', compared)
    of_table = edgefl_train("table", *runs).out.splitlines()[0].strip("| ").split(" | ")
    assert columns == of_table and {"of full model", "mean without *", "mean without ‡"} <= set(columns)
    for words in ("of full model is up / round", "left out of mean without *", "left out of mean without ‡"):
        assert words in compared
    assert "*‡</td>" in compared  # the site that the marks are of


def head_of(page: str) -> str:
    """What stands above the first section of a run."""
    return re.sub(r"<[^>]*>", " ", page.partition("<h1>")[2].partition("<h2>")[0])


def test_the_head_says_what_chance_is_and_that_a_network_was_never_trained(finished):
    """A bare 52 % of two classes read as a result; that the network was a random one stood pages below."""
    facts = read_run(finished["local"])
    told = head_of(report_page([facts], NOW))
    assert re.search(r"balanced accuracy, mean of sites\s+[\d.]+ %\s+(?:[\d.]+ to [\d.]+; )?chance 50\.0 %", told), told
    assert re.search(r"balanced accuracy, worst site\s+[\d.]+ %\s+chance 50\.0 %", told), told
    assert "never trained" not in told
    trial = replace(facts, run=replace(facts.run, settings=replace(facts.run.settings, backbone="tiny")))
    told = head_of(report_page([trial], NOW))
    assert "The network was never trained: this trial shows the steps, not what a model can do." in told


def test_chance_is_that_of_the_site_and_of_questions_the_usual_answer(finished):
    """By hand: the mean of 1/4 and 1/2; the worst site is judged on four classes; a site of one class has none."""
    facts = read_run(finished["local"])
    summary = json.loads(json.dumps(dict(facts.summary)))
    summary |= {"several_classes": {"one_class": ["x"]}, "worst_balanced_accuracy": 0.3}
    summary["sites"]["east"] |= {"classes_tested": 4, "balanced_accuracy": 0.3}
    below = {term: cell.below for term, cell in in_short(replace(facts, run=replace(facts.run, summary=summary)))}
    assert below["balanced accuracy, mean of sites"].endswith("chance 37.5 % of sites with several classes")
    summary["several_classes"]["mean_balanced_accuracy"] = 0.45
    below = {term: cell.below for term, cell in in_short(replace(facts, run=replace(facts.run, summary=summary)))}
    assert below["balanced accuracy, mean of sites"].endswith("sites with several classes: 45.0 %, chance 37.5 %")
    assert below["balanced accuracy, worst site"] == "chance 25.0 %"
    summary["sites"]["east"]["classes_tested"] = 1
    below = {term: cell.below for term, cell in in_short(replace(facts, run=replace(facts.run, summary=summary)))}
    assert below["balanced accuracy, worst site"] == ""
    summary |= {"mean_accuracy": 0.7, "worst_accuracy": 0.6, "usual_answer": {"mean_accuracy": 0.5}}
    below = {term: cell.below for term, cell in in_short(replace(facts, run=replace(facts.run, summary=summary)))}
    assert (below["accuracy, mean of sites"], below["accuracy, worst site"]) == ("usual answer 50.0 %", "")


def test_a_network_without_labels_is_told_by_its_probe_and_chance(mae):
    """The page said that it was not judged between its rounds, and of a probe neither chance nor why no interval."""
    facts = read_run(mae)
    text = Read(report_page([facts], NOW)).text
    chance = 100 / len(facts.summary["classes"])
    assert f"No interval is kept of a probe. Chance is {chance:.1f} %" in text
    assert "judged by a linear probe alone" in text and "not judged between its rounds" not in text


def test_a_mean_of_an_old_run_has_no_interval_where_a_site_has_none():
    """An older run kept one in which such a site counted as certain; the terminal withholds it, too."""
    site = {"balanced_accuracy": 0.4, "balanced_accuracy_interval": [0.3, 0.5]}
    sites = {"a": site, "b": site | {"balanced_accuracy_interval": [1.0, 1.0]}}
    summary = {"sites": sites, "mean_balanced_accuracy": 0.7, "mean_balanced_accuracy_interval": [0.6, 0.8]}
    assert figure(summary, ("mean_balanced_accuracy",)).below == "no interval"
    sites["b"] = site
    assert figure(summary, ("mean_balanced_accuracy",)).below == "60.0 to 80.0"


def test_rows_that_do_not_vary_have_no_interval():
    """The page had "50.0 to 50.0" of eight pictures, which reads as certainty; the terminal withheld it."""
    summary = {"a": 0.5, "a_interval": [0.5, 0.5], "b": 0.5, "b_interval": [0.4, 0.6]}
    assert [figure(summary, (name,)).below for name in "ab"] == ["no interval", "40.0 to 60.0"]


def test_nothing_is_overwritten_unasked(finished, tmp_path):
    out = tmp_path / "a.html"
    out.write_text("mine")
    assert "add --force" in edgefl_train("report", finished["local"], "-o", out).sentence()
    assert out.read_text() == "mine"
    assert edgefl_train("report", finished["local"], "-o", out, "--force").code == 0
    assert out.read_text().startswith("<!DOCTYPE html>")
    assert [path.name for path in tmp_path.iterdir()] == ["a.html"]


def test_what_is_no_finished_run_is_one_sentence(finished, tmp_path):
    (tmp_path / "empty").mkdir()
    assert "is not a run directory" in edgefl_train("report", tmp_path / "empty", "-o", tmp_path / "a.html").sentence()
    shutil.copytree(finished["local"], tmp_path / "begun")
    (tmp_path / "begun/summary.json").unlink()
    found = edgefl_train("report", tmp_path / "begun", "-o", tmp_path / "a.html").sentence()
    assert "is not finished" in found and "--resume" in found
    for out, said in (("a.txt", "does not end in .html"), ("none/a.html", "there is no folder")):
        outcome = edgefl_train("report", finished["local"], "-o", tmp_path / out)
        assert outcome.code == 2 and said in outcome.err
    assert not (tmp_path / "a.html").exists()


def test_a_figure_that_is_taken_away_is_missed(finished):
    """A summary without the figures of a site shows none for it."""
    facts = read_run(finished["local"])
    summary = json.loads(json.dumps(dict(facts.summary)))
    del summary["sites"]["east"]["auroc"]
    read = Read(report_page([replace(facts, run=replace(facts.run, summary=summary))], NOW))
    assert {tuple(path): text for path, text in read.figures}["sites", "east", "auroc"] == "not recorded"


def test_a_run_that_went_on_elsewhere_shows_both_places(finished, tmp_path):
    """docs/reference/runs.md, `environment.json` and `inputs.json`: what it ran on first, and what it began with."""
    folder = shutil.copytree(finished["local"], tmp_path / "run")
    here, kept = (json.loads((folder / name).read_text()) for name in ("environment.json", "inputs.json"))
    first = {
        "versions": {"torch": "1.2.3"},
        "commit": "a" * 40,
        "machine": {"processor": "Old CPU", "cuda": "Old card"},
    }
    (folder / "environment.json").write_text(json.dumps({**here, "earlier": [first]}))
    (folder / "inputs.json").write_text(json.dumps({**kept, "hyper": {**kept["hyper"], "lr_head": 0.1234}}))
    text = Read(report_page([read_run(folder)], NOW)).text
    for words in ("processor before the run went on", "Old CPU", "Old card", "torch 1.2.3", "a" * 40, "0.1234"):
        assert words in text, words
    assert here["machine"]["processor"] in text and here["versions"]["torch"] in text
