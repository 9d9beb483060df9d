"""The models in examples/models: a stranger scores a photograph with the commands of their page, and its figures hold.

The page's figures are those of the signed cards; licence and size are what the page says.
"""

import json
import os
import re
import shlex
import tomllib
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from edgefl_client import Asker
from edgefl_client.cli import cli as device_cli
from edgefl_export.cli import main as export_cli
from edgefl_protocol.bundle import Card, load_bundle
from edgefl_protocol.envelopes.key_files import read_public_key
from edgefl_protocol.pictures.answer import read_question
from edgefl_trainer.data import load_federation
from edgefl_trainer.data.lesions import draw_lesion
from edgefl_trainer.data.questions import Vocabulary

FOLDER = Path(__file__).resolve().parents[2] / "examples/models"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
FILES = ("nevus", "eight-diagnoses")  # in the order of the page's columns
ASKED = "chest-questions"
MOST_BYTES = 8_000_000
MOST_BYTES_ASKED = 10_000_000


@pytest.fixture(scope="module", params=FILES)
def opened(request: pytest.FixtureRequest) -> tuple[str, Card]:
    """One of the models, verified under the key beside it."""
    data = (FOLDER / f"{request.param}.edgefl").read_bytes()
    assert len(data) <= MOST_BYTES
    signer = read_public_key(FOLDER / "signing.pub").public
    bundle = load_bundle(data, [signer], 1_800_000_000_000)
    assert bundle.signers[0] in PAGE
    return request.param, bundle.card


def row(words: str) -> dict[str, str]:
    """A row of the page's table, by model."""
    found = re.search(rf"^\| {re.escape(words)}[^|]*\| ([^|]*) \| ([^|]*) \|$", PAGE, re.M)
    assert found, words
    return dict(zip(FILES, found.groups(), strict=True))


def test_the_page_tells_the_cards_figures(opened: tuple[str, Card]) -> None:
    name, card = opened
    site, federation = card.metrics["site"], card.metrics["federation"]
    assert isinstance(site, dict) and isinstance(federation, dict) and card.site == "rosendahl" and card.metrics["int8"]
    low, high = site["balanced_accuracy_interval"]
    told = row("balanced accuracy on `val` pictures")[name]
    assert told.startswith(f"{site['balanced_accuracy']:.3f} (") and f"{low:.3f} to {high:.3f}" in told
    assert row("mean of the six centres")[name] == f"{federation['mean_balanced_accuracy']:.3f}"
    rule = card.suspicion
    assert rule is not None and rule.threshold is not None
    assert rule.sensitivity is not None and rule.specificity is not None
    missed, asked = round((1 - rule.sensitivity) * rule.suspicious), round((1 - rule.specificity) * rule.benign)
    assert row("`tune` pictures that pass")[name] == f"{missed} of {rule.suspicious}"
    assert row("`tune` pictures of benign classes")[name] == f"{asked} of {rule.benign}"
    assert ("vacuity" in row("uncertainty")[name]) is (card.method == "fedevprompt")
    assert "CC BY-NC 4.0" in card.licence_note and "CC BY-NC 4.0" in (FOLDER / "LICENSE").read_text(encoding="utf-8")


def test_the_second_command_scores_a_photograph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's commands, typed where `photo.jpg` lies."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(FOLDER.parent)
    Image.fromarray(draw_lesion("MEL", site=0, number=7, px=256)[0]).save("photo.jpg", quality=90)
    commands = re.findall(r"^\$ edgefl (score .*)$", PAGE, re.M)
    assert len(commands) == len(FILES)
    for command in commands:
        done = CliRunner().invoke(device_cli, [*shlex.split(command), "--home", "home", "--json"])
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert sum(found["probabilities"].values()) == pytest.approx(1, abs=1e-4) and found["refer"] is not None
    assert list((tmp_path / "heatmaps").glob("photo-*.png"))


def test_the_model_that_answers_is_what_its_page_says(tmp_path, monkeypatch):
    """Figures of the card and of the table of questions; licence, size and signature as the others'."""
    data = (FOLDER / f"{ASKED}.edgefl").read_bytes()
    bundle = load_bundle(data, [read_public_key(FOLDER / "signing.pub").public], 1_800_000_000_000)
    site, knows = bundle.card.metrics["site"], bundle.questions
    assert (
        len(data) <= MOST_BYTES_ASKED
        and bundle.card.site == "rad-chest"
        and isinstance(site, dict)
        and knows is not None
    )
    told = dict(re.findall(r"^\| ([^|]*) \| ([^|]*) \|$", PAGE.partition("## A model that answers")[2], re.M))
    low, high = site["accuracy_interval"]
    assert told["accuracy on held-out questions of its site"].startswith(
        f"{site['accuracy']:.3f} (95 % interval {low:.3f} to {high:.3f}); {site['n_test']} "
    )
    for words, figure in (
        ("of open questions", site["accuracy_open_questions"]),
        ("of closed questions", site["accuracy_closed_questions"]),
        ("the usual answer to each kind of question", site["usual_answer"]["accuracy"]),
    ):
        assert told[words] == f"{figure:.3f}"
    tried, other = knows.tried, knows.tried.other_picture
    assert told["`tune` questions that it answers, rightly"] == (
        f"{tried.answered} of {tried.questions}, {tried.answered_right}"
    )
    own = told["`tune` questions right with their own picture, with another one's"]
    assert own == f"{tried.right}, {other.right} of {tried.questions}"
    assert other.low <= 0 and "not found to\nlook at the picture" in PAGE
    met, listed = sum(bundle.labels.seen), len(bundle.labels.classes)
    assert f"one of {met} answers that its own questions had, of {listed} of" in told["answers"]
    warned = " ".join(Asker(bundle, threads=1).model.warnings)
    assert "On 210 closed questions of the site rad-chest" in warned and "not found better than the usual" in warned
    assert f"it knows {len(knows.vocabulary.words)} words and was taught {sum(knows.taught)}" in told["answers"]
    assert "VQA-RAD is CC0 1.0" in bundle.card.licence_note and "CC BY-NC 4.0" in bundle.card.licence_note
    assert f"{ASKED}.edgefl" in (FOLDER / "LICENSE").read_text(encoding="utf-8")


def test_a_bundle_carries_the_words_and_answers_of_all_sites():
    """What the guide and docs/security.md 2.8 tell of it, by the command that they name."""
    done = CliRunner().invoke(export_cli, ["inspect", str(FOLDER / f"{ASKED}.edgefl"), "--json"])
    told = json.loads(done.stdout)
    words, answers = told["questions"], told["labels"]
    guide = (FOLDER.parents[1] / PAGES[0]).read_text(encoding="utf-8").replace("\n", " ")
    assert f"{len(words['words'])} words, {words['taught'].count(False)} of them not taught at its site" in guide
    assert f"{len(answers['classes'])} answers, {answers['seen'].count(False)} of which no question of its" in guide
    assert (
        json.loads(CliRunner().invoke(export_cli, ["inspect", str(FOLDER / "nevus.edgefl"), "--json"]).stdout)[
            "questions"
        ]
        is None
    )


NORMAL = re.compile(r"(?<!than )\bnormal\b")  # asks whether something is normal, as "larger than normal" does not
REFUSED = {  # by the pages, to show it
    "Is there tuberculosis?": "unknown_word",
    "Tuberculosis?": "no_known_word",
    "Is there hydrocephalus?": "untaught_word",
    "Is there no pneumothorax?": "negation",
}
PAGES = ("docs/guides/medical-vqa.md", "examples/models/README.md")


def questions_of_pages() -> set[str]:
    """Every question that a page asks, on the command line or in Python."""
    text = "".join((FOLDER.parents[1] / page).read_text(encoding="utf-8") for page in PAGES)
    return {*re.findall(r'edgefl ask \S+ "([^"]+)"', text), *re.findall(r'\.ask\(.*, "([^"]+)"\)', text)}


def test_the_pages_ask_in_words_that_a_model_of_vqa_rad_knows() -> None:
    data = (FOLDER / f"{ASKED}.edgefl").read_bytes()
    table = load_bundle(data, [read_public_key(FOLDER / "signing.pub").public], 1_800_000_000_000).questions
    assert table is not None
    asked = questions_of_pages()
    assert len(asked) >= 4 and set(REFUSED) <= asked
    for question in asked:
        read = read_question(question, table.vocabulary, table.taught_words)
        rules = {"no_known_word": not read.known, "unknown_word": read.missed, "untaught_word": read.never_taught}
        rules["negation"] = read.negations
        found = None if read.whole else next(reason for reason, fires in rules.items() if fires)
        assert found == REFUSED.get(question), question


@pytest.mark.data
@pytest.mark.skipif("EDGEFL_DATA" not in os.environ, reason="EDGEFL_DATA is not set: no VQA-RAD")
def test_the_pages_ask_what_pictures_of_the_chest_are_asked() -> None:
    """As VQA-RAD has it, but for those that show a refusal."""
    with zipfile.ZipFile(Path(os.environ["EDGEFL_DATA"]) / "vqa_rad.zip") as archive:
        rows = json.loads(archive.read("trainset.json"))
    real = {row["question"].strip() for row in rows if row["image_organ"] == "CHEST"}
    assert questions_of_pages() - set(REFUSED) <= real


@pytest.mark.data
@pytest.mark.slow
@pytest.mark.skipif("EDGEFL_DATA" not in os.environ, reason="EDGEFL_DATA is not set: no VQA-RAD")
def test_the_page_counts_what_a_device_answers(tmp_path: Path) -> None:
    """Of the site's withheld questions, which no seed moves, and of the `tune` questions of seed 0."""
    data = (FOLDER / f"{ASKED}.edgefl").read_bytes()
    bundle = load_bundle(data, [read_public_key(FOLDER / "signing.pub").public], 1_800_000_000_000)
    assert bundle.questions is not None
    known = Vocabulary(bundle.labels.classes, bundle.questions.vocabulary)
    source = f"vqa-rad:{Path(os.environ['EDGEFL_DATA']) / 'vqa_rad.zip'}"
    found = load_federation([source], image_px=bundle.preprocess.size, vocabulary=known, cache_dir=tmp_path)
    asker, site = Asker(bundle, threads=1), found.sites["rad-chest"]
    assert found.questions is not None
    words, light, unsure, answered = (
        0,
        0,
        0,
        list[tuple[str, str | None, str]](),
    )  # it says, what is right, the question
    for row, place in zip(site.test, found.places(site.test), strict=True):
        given = asker.ask(found.images[place], found.questions.texts[row])
        words += not given.question.whole
        light += given.question.whole and "light" in given.refuse_reasons
        unsure += given.refuse_reasons == ("unsure",)
        if given.answer is not None:
            true = dict(enumerate(found.classes)).get(found.labels[row])
            answered.append((given.answer, true, found.questions.texts[row]))
    right = [one for one, true, _ in answered if one == true]
    said = (
        f"of the {len(site.test)} it answers {len(answered)}, {len(right)} of these rightly; {words} it refuses for "
        "their words"
    )
    assert (
        f"{said}, {light} more for the light of the picture (one picture), {unsure} more for it is too unsure |" in PAGE
    )
    there = [one for one, true, _ in answered if true == "yes"]
    normal = [one for one, true, text in answered if true == "yes" and NORMAL.search(text)]
    denied, no = there.count("no"), sum(one == "no" for one, _, _ in answered)
    row = f'| of the {len(answered)}, questions whose right answer is "yes" | {len(there)}, five of which ask whether '
    said = f'It says "no" to {no} of the {len(answered)}, whatever is asked, and to {denied} of these {len(there)}: '
    findings = len(there) - len(normal)
    left = f"{denied - normal.count('no')} of the {findings} others |"
    assert len(normal) == normal.count("no") == 5
    assert f"{row}something is normal. {said}all five, and {left}" in PAGE
    absent = sum(true == "no" for _, true, _ in answered)
    assert f'| of the {len(right)} right ones, "no" | {right.count("no")}; a model that says "no" to all' in PAGE
    assert f"{len(answered)} would be right for {absent} |" in PAGE
    untaught = sum(bool(asker.read(found.questions.texts[row]).never_taught) for row in site.tune)
    assert f"| of the {len(site.tune)}, refused for a word that it was never taught | {untaught} |" in PAGE


def test_the_command_that_asks(tmp_path, monkeypatch):
    """As a stranger types it, on a drawn picture in grey: an answer, and that it does not look; in colour none."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(FOLDER.parent)
    drawn = Image.fromarray(draw_lesion("MEL", site=0, number=7, px=256)[0])
    drawn.convert("L").save("chest.png")
    (command,) = re.findall(r"^\$ edgefl (ask .*)$", PAGE, re.M)
    done = CliRunner().invoke(device_cli, [*shlex.split(command), "--home", "home"])
    assert done.exit_code == 0 and "not found to look at the picture" in done.output, done.output
    found = json.loads(CliRunner().invoke(device_cli, [*shlex.split(command), "--home", "home", "--json"]).stdout)
    assert (found["answer"], found["model"]["better_than_chance"]) == ("no", False)
    drawn.save("chest.png")
    found = json.loads(CliRunner().invoke(device_cli, [*shlex.split(command), "--home", "home", "--json"]).stdout)
    assert (found["answer"], found["refuse_reasons"], found["light"]) == (None, ["light"], "redder")


def test_they_stay_out_of_what_is_installed() -> None:
    """CC BY-NC 4.0: the wheel holds packages only, and the source distribution leaves them out."""
    targets = tomllib.loads((FOLDER.parents[1] / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert "/examples/models" in targets["sdist"]["exclude"]
    assert not any("examples" in place for place in (*targets["wheel"]["packages"], *targets["wheel"]["force-include"]))
