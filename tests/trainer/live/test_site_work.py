"""What the signed task and a site's data make together, and the sentence for each way in which they do not fit.

Source: docs/design.md 4 (same method, same settings at every site) and 5 (a known failure is one sentence).
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from tests.told import told_task
from tests.trainer.conftest import pictures_of, rad_entries, write_rad

from edgefl_protocol import Payload
from edgefl_protocol.messages.requests import TaskReply
from edgefl_trainer.cli import exit_code
from edgefl_trainer.contract import State
from edgefl_trainer.data.errors import TaskError
from edgefl_trainer.data.lesions import draw_lesion
from edgefl_trainer.engine.folder import check_claim
from edgefl_trainer.errors import FederationRefused, RunError, SettingError
from edgefl_trainer.evaluate.tables.text import render_table
from edgefl_trainer.experiments.run_words import schedule
from edgefl_trainer.live import final_results
from edgefl_trainer.live.site_work import SiteOptions, prepare
from edgefl_trainer.models.backbones import load_backbone

DATA = "lesions:sites=2,images=40,px=36"
CLASSES = ("BCC", "BKL", "MEL", "NV")


def facts(name: str = "tiny", seed: int = 0) -> dict[str, Any]:
    """What the coordinator tells of a backbone."""
    spec = load_backbone(name, image_px=36, seed=seed).spec
    return dict(vars(spec))


def told(**changes: Any) -> TaskReply:
    """A task that fits the drawn data."""
    plain: dict[str, Any] = {
        "method": "fedevprompt", "task": "nevus", "classes": ("nevus", "other"), "rounds": 2, "tokens": 9,
        "maps_per_class": 5, "settings": {"kd_weight": 0.5}, "train_rounds": 2, "epochs": 3, "seed": 7,
        "travels": ("maps",), "backbone": facts(seed=7),
    }  # fmt: skip
    return told_task(**{**plain, **changes})


OPTIONS = SiteOptions(data=(DATA,), site="site-2", device="cpu")


def test_method_and_numbers_are_the_coordinators_and_rows_the_sites() -> None:
    work = prepare(told(), OPTIONS)
    assert (work.method.maps.kd_weight, work.task.rounds, work.task.epochs, work.task.seed) == (0.5, 2, 3, 7)
    assert work.task.classes == ("nevus", "other") and work.site.name == "site-2"
    assert list(work.federation.sites) == ["site-2"]
    assert work.site.noise == "secret"  # docs/methods.md, noise: whatever sends replies asks for it
    assert work.task.backbone.sha256 == facts(seed=7)["sha256"]


def test_a_site_gathers_its_classes_into_the_federations() -> None:
    """docs/reference/data.md: the coordinator knows the names of the groups, the site which classes they hold."""
    mine = replace(OPTIONS, task="mal=MEL,BCC,SCC:rest")  # it has no SCC
    work = prepare(told(task="mal-rest", classes=("mal", "rest")), mine)
    plain = prepare(told(task="all", classes=CLASSES), OPTIONS)
    malignant = np.isin(plain.federation.labels, [CLASSES.index(name) for name in ("MEL", "BCC")])
    assert work.task.classes == ("mal", "rest")
    assert np.array_equal(work.federation.labels == 0, malignant) and malignant.any()
    with pytest.raises(TaskError, match="the data has the class 'BCC', but the federation's classes are mal and rest"):
        prepare(told(task="mal-rest", classes=("mal", "rest")), OPTIONS)


def folder(root: Path, labels: dict[str, int]) -> str:
    """A data folder of one site with this many pictures of each class."""
    for label, count in labels.items():
        (root / "own" / label).mkdir(parents=True)
        for number in range(count):
            Image.fromarray(draw_lesion("NV", site=0, number=number, px=36)[0]).save(root / f"own/{label}/{number}.png")
    return f"folder:{root}"


def test_a_site_that_lacks_a_class_counts_in_the_federations_indices(tmp_path: Path) -> None:
    """`maps.<k>` is the class at index k of the task, wherever the class stands in the site's own data."""
    options = replace(OPTIONS, data=(folder(tmp_path, {"melanoma": 8, "nevus": 8}),), site="")
    classes = ("keratosis", "melanoma", "nevus")
    work = prepare(told(task="all", classes=classes), options)
    known = work.site.train.targets
    assert work.site.seen == (False, True, True) and set(known) == {1, 2}
    assert np.array_equal(work.site.train.counts(3), np.bincount(known, minlength=3))


WRONG = [
    ({"method": "fedmagic"}, {}, "fedmagic, which this version does not know: update"),
    ({"settings": {"lamda": 1}}, {}, "cannot run fedevprompt with the federation's settings .*lamda.*: update"),
    ({"settings": {"kd_weight": "much"}}, {}, "kd_weight is 'much'"),
    ({"travels": ("weights",)}, {}, "says that weights leave a site, but fedevprompt of this version sends maps"),
    ({"train_rounds": 0}, {}, "does not state rounds, epochs and backbone"),
    ({"backbone": {}}, {}, "does not state rounds, epochs and backbone"),
    ({"backbone": {"name": "tiny", "legs": 4}}, {}, "describes no backbone that this version knows"),
    ({"backbone": facts(seed=8)}, {}, "has the SHA-256 .*, but the federation's tiny has"),
    ({"backbone": facts()}, {"backbone": "vit:64x2/12"}, "backbone vit:64x2/12 has the SHA-256"),
    ({"method": "random-init", "settings": {}, "travels": ()}, {}, "random-init exchanges nothing"),
]


@pytest.mark.parametrize(("task", "options", "sentence"), WRONG)
def test_what_the_federation_asks_and_cannot_be_done_is_refused(task: Any, options: Any, sentence: str) -> None:
    with pytest.raises(FederationRefused, match=sentence) as caught:
        prepare(told(**task), replace(OPTIONS, **options))
    assert "\n" not in str(caught.value) and exit_code(caught.value) == 3


ASKED = [
    ({}, {"site": ""}, "has the sites site-1 and site-2: name this site with --site"),
    (
        {"task": "all", "classes": ("MEL", "NV")},
        {},
        "the class 'A?[A-Z]+', but the federation's classes are MEL and NV",
    ),
    ({"backbone": {**facts(seed=7), "name": "run:first"}}, {}, "name your copy with --backbone"),
    ({"method": "fedclf", "settings": {}, "travels": ()}, {"balance": "class"}, "uses no labels"),
]


@pytest.mark.parametrize(("task", "options", "sentence"), ASKED)
def test_what_the_site_has_to_say_is_asked_for(task: Any, options: Any, sentence: str) -> None:
    """docs/reference/runs.md, "In a live federation": a timer tells it from a refusal by its status."""
    with pytest.raises((SettingError, TaskError), match=sentence) as caught:
        prepare(told(**task), replace(OPTIONS, **options))
    assert exit_code(caught.value) == 2


IDLE = [
    ({}, "fedevprompt"),
    ({"method": "pep-fedpt", "settings": {"dp_epsilon": 0.2, "dp_clip_l1": 1.0}, "travels": ()}, "pep-fedpt"),
]


@pytest.mark.parametrize(("task", "method"), IDLE)
def test_a_budget_that_nothing_spends_is_refused(task: Any, method: str) -> None:
    """docs/decisions/0066: nobody believes to be protected by a bound on nothing; Laplace noise spends none of it."""
    with pytest.raises(
        SettingError, match=f"{method} sends nothing under Gaussian noise .*: leave --privacy-budget out"
    ):
        prepare(told(**task), replace(OPTIONS, privacy_budget=1.0))


def test_a_site_that_joined_with_an_idle_budget_goes_on_without_it(tmp_path: Path) -> None:
    """Older versions took one, and `join` and SuperNodes now say to leave it out; a budget that is spent stays."""
    idle = prepare(told(), OPTIONS).settings
    (tmp_path / "config.toml").write_text(replace(idle, privacy_budget=1.0).to_toml())
    check_claim(tmp_path, idle, resume=True)
    with pytest.raises(RunError, match="has epochs = 3"):
        check_claim(tmp_path, replace(idle, epochs=4), resume=True)
    noised = replace(idle, method="fedclf", hyper={"dp_noise": 4.0}, unlabelled="spread")
    (tmp_path / "config.toml").write_text(replace(noised, privacy_budget=1.0).to_toml())
    with pytest.raises(RunError, match=r"has privacy_budget = 1\.0, but this command has 0\.0"):
        check_claim(tmp_path, noised, resume=True)


def test_questions_are_not_learned_in_a_live_federation(tmp_path: Path, cached: None) -> None:
    """docs/decisions/0044: a live federation is for pictures alone."""
    entries = rad_entries()
    data = (f"vqa-rad:{write_rad(tmp_path / 'rad.zip', pictures_of(entries), trainset=entries)}",)
    task = told(task="all", classes=("head", "no", "yes"))
    with pytest.raises(SettingError, match="learns no answers, and the data holds questions"):
        prepare(task, replace(OPTIONS, data=data, site="rad-head"))


HUB = [
    ("fedevprompt", {"name": "timm:hf-hub:somebody/vit"}, SettingError, "name your copy with --backbone"),
    ("fedevprompt", {"name": "timm:local-dir:/somewhere"}, SettingError, "name your copy with --backbone"),
    ("fedclf", {"name": "timm:hf-hub:somebody/vit"}, SettingError, "name your copy with --backbone"),
    (
        "fedclf",
        {"name": "run:x", "architecture": "hf-hub:somebody/net"},
        FederationRefused,
        "not a name that timm knows",
    ),
]


@pytest.mark.parametrize(("method", "change", "error", "sentence"), HUB)
def test_nothing_is_fetched_from_where_a_coordinator_says(method, change, error, sentence, monkeypatch) -> None:
    """docs/security.md, attack list 5 and threat model P5: files of a stranger's hub would be read here."""
    plain = facts("cnn:test_resnet") if "architecture" in change else facts()
    reached: list[object] = []
    monkeypatch.setattr("timm.create_model", lambda *asked, **_: reached.append(asked))
    travels = {} if method == "fedevprompt" else {"settings": {}, "travels": ()}
    with pytest.raises(error, match=sentence):
        prepare(told(method=method, backbone={**plain, **change}, **travels), OPTIONS)
    assert not reached


def test_a_network_that_is_learned_needs_no_copy_of_it() -> None:
    """The server sends the weights: only the architecture has to be known, also where its name is a place elsewhere."""
    task = {"method": "fedmae", "settings": {"decoder_width": 32, "decoder_depth": 1}, "travels": ("weights",)}
    work = prepare(told(**task, backbone={**facts(seed=1), "name": "run:first"}), OPTIONS)
    assert work.task.backbone.width == 64 and not work.task.initial


def test_a_site_names_no_preset(monkeypatch, tmp_path) -> None:
    """Rounds, epochs and settings are the coordinator's: its summary said `bench84`, and so did tables and reports."""
    work, kept = prepare(told(), OPTIONS), {}
    monkeypatch.setattr(final_results, "privacy_cost", lambda *_, **__: {})
    monkeypatch.setattr(final_results, "results_of", lambda *_, **__: {})
    monkeypatch.setattr(final_results, "write_summary", lambda _, head, *__: kept.update(head) or kept)
    summary = final_results.write_results(work, tmp_path, told(), "skin", State(), Payload({}, {}))
    assert summary["preset"] is None and summary["rounds"] == 2
    assert schedule(work.settings, summary) == "none, 2 rounds of 3 epochs"
    table = {**summary, "sites": {"a": {"balanced_accuracy": 0.5}}, "schedule": schedule(work.settings, summary)}
    assert "Preset none, 2 rounds of 3 epochs" in render_table([table])
