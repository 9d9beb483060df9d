"""What `edgefl-train methods` says of methods and settings: taken from where they are declared, and complete."""

import json
import re
from pathlib import Path

import pytest
from tests.trainer.conftest import edgefl_train

from edgefl_trainer.contract import declared
from edgefl_trainer.engine.hyper_parameters import build, hyper_types
from edgefl_trainer.engine.settings import resolve
from edgefl_trainer.errors import SettingError
from edgefl_trainer.methods import METHODS
from edgefl_trainer.reports.described import purpose, settings_of

ROOT = Path(__file__).parents[2]
SOURCE = r"ours|docs/decisions/\d{4}|(public code of )?arXiv \d{4}\.\d{5}(, default ours)?"


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_says_for_whom_and_every_setting_what_it_is(name):
    assert " For " in purpose(METHODS[name])
    found = settings_of(name)
    assert [one.key for one in found] == list(hyper_types(METHODS[name]))
    for one in found:
        assert one.allowed and re.fullmatch(SOURCE, one.source), one
        page = re.match(r"docs/decisions/\d{4}", one.source)
        assert page is None or list((ROOT / "docs/decisions").glob(f"{page[0][-4:]}-*.md")), one


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_meaning_says_what_the_setting_is(name, asked):
    """Three words at least, which do not begin by explaining one of the values; a mark of the source is read off."""
    for one in settings_of(name, asked=asked):
        assert len(one.meaning.split()) >= 3, one
        assert one.meaning.partition(":")[0] not in [value.strip() for value in one.allowed.split(",")], one
        assert not re.search(r"\bours\b|arXiv|docs/decisions|public code", one.meaning), one


# What docs/methods.md says of each: 1.8 and decision 0023; 1.6; 5; 2.2 (noise on shared features); 5.1 (rho is not
# printed); 1.1 (the paper's rates); 5.6 (the paper's rate, which the method gives to the recipe of its family); 2.5
# (FedBN); 5.5 (the code); 4.4 (federated distillation as first proposed); 11 (what the abstract holds).
@pytest.mark.parametrize(
    ("method", "key", "source"),
    [
        ("fedevprompt", "discount", "docs/decisions/0023"),
        ("fedevprompt", "head_norm", "ours"),
        ("local", "readout", "ours"),
        ("sgpt", "readout", "ours"),
        ("fedclf", "dp_noise", "ours"),
        ("pep-fedpt", "rho", "arXiv 2510.25372, default ours"),
        ("fedevprompt", "lr_b", "arXiv 2411.10071"),
        ("head", "lr", "arXiv 2510.25372"),
        ("pfedpg", "lr", "arXiv 2308.15367"),
        ("fedclf", "bn", "arXiv 2102.07623, default ours"),
        ("sgpt", "groups", "public code of arXiv 2310.18285"),
        ("feddistill", "exclude_own", "arXiv 1811.11479, default ours"),
        ("fedavg", "weighting", "arXiv 1602.05629"),
        ("pfl-vqa", "alpha", "arXiv 2402.09677, default ours"),
        ("pfl-vqa", "heads", "ours"),
        ("pfl-vqa", "beta", "arXiv 2402.09677, default ours"),
        ("pfl-vqa", "lr_prompts", "ours"),
    ],
)
def test_a_setting_names_the_paper_that_has_it(method, key, source):
    assert {one.key: one.source for one in settings_of(method)}[key] == source


def test_defaults_are_those_that_a_run_gets():
    """Of `run METHOD` as typed, the preset bench84."""
    for name in METHODS:
        hyper = resolve(name, {"data": ("folder:x",)}, None, []).hyper
        for one in settings_of(name):
            assert one.presets.get("bench84", one.default) == hyper.get(one.key, one.default), (name, one.key)


@pytest.mark.parametrize(
    ("method", "key", "allowed", "meaning"),
    [
        # protocol's rules.bounds, a check in the class, a choice, and a comment above its field
        ("fedevprompt", "maps_per_class", "1 to 100", "M, most maps of a class that a site sends"),
        ("fedsimclr", "temperature", "0.001 to 10", "tau, what similarities are divided by"),
        ("head", "augment", "none, dihedral", "how training images vary; dihedral: turned by quarters"),
        ("fedclf", "momentum_encoder", "averaged, local, reset", "what a round begins with as momentum encoder: the "),
    ],
)
def test_allowed_and_meaning_stand_where_the_setting_is_declared(method, key, allowed, meaning):
    one = next(one for one in settings_of(method) if one.key == key)
    assert one.allowed == allowed and one.meaning.startswith(meaning)


def test_what_is_called_allowed_is_what_a_run_takes():
    one = next(one for one in settings_of("fedevprompt") if one.key == "maps_per_class")
    least, most = map(int, one.allowed.split(" to "))
    for value in (least, most):
        build(METHODS["fedevprompt"], {"maps_per_class": value})
    for value in (least - 1, most + 1):
        with pytest.raises(SettingError):
            build(METHODS["fedevprompt"], {"maps_per_class": value})


def test_a_method_is_shown_with_its_settings():
    text = edgefl_train("methods", "fedevprompt").out
    assert "lr_b" in text and "0.00025 (bench84 0.0025)" in text and "mu1, learning rate" in text
    found = json.loads(edgefl_train("methods", "fedevprompt", "--json").out)
    assert (
        found["name"] == "fedevprompt"
        and {"key", "default", "allowed", "meaning", "source"} <= found["settings"][0].keys()
    )
    assert "It has no settings." in edgefl_train("methods", "random-init").out
    outcome = edgefl_train("methods", "fedevpromt")
    assert outcome.code == 2 and "did you mean fedevprompt" in outcome.sentence()


def test_settings_of_answers_stand_beside_those_of_pictures():
    """`edgefl-train methods NAME`: what a run over questions takes, in one table of its own."""
    for name, kind in METHODS.items():
        answers = declared(kind).asked
        expected = [] if answers is None else list(hyper_types(answers.make()))
        assert [one.key for one in settings_of(name, asked=True)] == expected
    found = {one.key: one for one in settings_of("fedavg", asked=True)}
    assert found["width"].presets == {"tiny": 64} and found["prompt_site"].allowed == "image, text, both"
    assert all(one.meaning for one in found.values())
    text = edgefl_train("methods", "fedavg").out
    assert "Where the data asks questions" in text and text.count("prompt_site") == 1
    assert "Where the data" not in edgefl_train("methods", "pfl-vqa").out
    assert "settings_of_questions" in edgefl_train("methods", "local", "--json").json()
