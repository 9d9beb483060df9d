"""Settings: preset, file, flags, --set, each over the one before; complete, typed, checked before any work begins."""

import dataclasses
import tomllib
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgefl_trainer.engine.hyper_parameters import build, hyper_types
from edgefl_trainer.engine.settings import PresetName, RunSettings, read_settings, resolve
from edgefl_trainer.errors import RunError, SettingError
from edgefl_trainer.methods import METHODS
from edgefl_trainer.typed_values import nearest, read_value

DATA = {"data": ("lesions:sites=2,images=40",)}


def flat(settings: RunSettings) -> dict:
    """Hyper-parameters as the method holds them, those of a recipe among them."""
    found: dict = {}
    for name, value in dataclasses.asdict(settings.build_method()).items():
        found.update(value if isinstance(value, dict) else {name: value})
    return found


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("preset", get_args(PresetName))
def test_every_preset_resolves_and_survives_its_file(method, preset, tmp_path):
    settings = resolve(method, {**DATA, "preset": preset}, None, [])
    file = tmp_path / "config.toml"
    file.write_text(settings.to_toml())
    assert read_settings(file) == settings
    assert resolve(method, {}, file, []) == settings
    assert resolve(method, {}, file, []).build_method() == settings.build_method()


texts = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=12)


@given(
    data=st.lists(texts, min_size=1, max_size=3).map(tuple),
    classes=st.lists(texts, max_size=3).map(tuple),
    rounds=st.integers(1, 10**6),
    seed=st.integers(0, 2**31 - 1),
    participation=st.floats(1e-6, 1),
    hyper=st.fixed_dictionaries({}, optional={"lr_b": st.floats(0, 1), "batch": st.integers(1, 9999)}),
)
def test_a_file_holds_every_setting_bit_for_bit(tmp_path_factory, data, classes, rounds, seed, participation, hyper):
    settings = RunSettings(
        method="local", data=data, classes=classes, rounds=rounds, seed=seed, participation=participation, hyper=hyper
    )
    file = tmp_path_factory.mktemp("toml") / "config.toml"
    file.write_text(settings.to_toml(), encoding="utf-8")
    assert read_settings(file) == settings


def test_each_source_overrides_the_one_before(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('rounds = 7\nepochs = 8\ndata = ["lesions:sites=2"]\n[hyper]\nlr_head = 0.25\nlr_b = 0.125\n')
    settings = resolve("local", {"preset": "paper", "epochs": 9, "task": None}, file, ["lr_b=0.5"])
    assert (settings.rounds, settings.epochs, settings.data) == (7, 9, ("lesions:sites=2",))
    hyper = flat(settings)
    assert (hyper["lr_head"], hyper["lr_b"]) == (0.25, 0.5)
    assert hyper["evidence"] == "relu"  # the preset `paper`
    assert (hyper["lr_t"], hyper["batch"]) == (5e-4, 32)  # the method's own


def test_the_preset_of_a_file_counts(tmp_path):
    file = tmp_path / "c.toml"
    file.write_text('preset = "paper"\ndata = ["lesions:"]\n')
    assert resolve("fedevprompt", {}, file, []).epochs == 15  # FedEvPrompt's own schedule
    assert resolve("fedevprompt", {"preset": "tiny"}, file, []).epochs == 1


def test_methods_without_labels_use_unlabelled_images_unless_told():
    """docs/design.md 5: `spread` is the default for self-supervised methods."""
    assert resolve("fedmae", DATA, None, []).unlabelled == "spread"
    assert resolve("fedmae", {**DATA, "unlabelled": "none"}, None, []).unlabelled == "none"
    assert resolve("local", DATA, None, []).unlabelled == "none"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rounds = ", "is not valid TOML"),
        ("ronds = 3", "did you mean rounds"),
        ('rounds = "five"', "rounds is 'five'; allowed: a whole number"),
        ("rounds = true", "rounds is True; allowed: a whole number"),
        ("rounds = 2.5", "rounds is 2.5; allowed: a whole number"),
        ("rounds = 0", "rounds is 0; allowed: at least 1"),
        ("participation = 0", "participation is 0; allowed: above 0, at most 1"),
        ("participation = nan", "allowed: above 0, at most 1"),
        ("seed = -1", "seed is -1; allowed: 0 to 2147483647"),
        ("image_px = 100000", "image_px is 100000; allowed: 0 (the backbone's own) to 2048"),
        ('device = "gpu"', "device is 'gpu'; allowed: auto, cpu, cuda"),
        ('balance = "klass"', "allowed: none, class"),
        ('unlabelled = "all"', "allowed: none, site, spread"),
        ('preset = "big"', "did you mean bench84, paper, tiny?"),
        ('preset = "papr"', "did you mean paper?"),
        ('data = "lesions:"', "data is 'lesions:'; allowed: a list of texts"),
        ("data = [1]", "a list of texts"),
        ("data = []", "at least one SPEC, given with --data"),
        ('data = ["lesion:"]', "is not a data SPEC"),
        ("hyper = 3", "hyper is 3; allowed: a table"),
        ("[hyper]\nlr_had = 0.1", "did you mean lr_head"),
        ('[hyper]\nlr_head = "fast"', "lr_head is 'fast'; allowed: a number"),
        ("[hyper]\nlr_head = nan", "lr_head is nan; allowed: 0 to 1"),
        ("[hyper]\nbatch = 1.5", "batch is 1.5; allowed: a whole number"),
        ('[hyper]\nevidence = "tanh"', "evidence is 'tanh'; allowed: softplus, relu, exp"),
    ],
)
def test_a_wrong_file_is_one_sentence_before_any_work(text, words, tmp_path):
    file = tmp_path / "c.toml"
    file.write_text(text if "data" in text else f'data = ["lesions:"]\n{text}')
    with pytest.raises(SettingError) as caught:
        resolve("local", {}, file, [])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value) or "valid TOML" in words


def test_a_file_that_is_no_text_is_a_sentence(tmp_path):
    file = tmp_path / "c.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SettingError, match="is not valid TOML"):
        resolve("local", DATA, file, [])


@pytest.mark.parametrize(
    ("method", "assignment", "words"),
    [
        ("local", "lr_had=1", "lr_head"),
        ("local", "lr_head", "write KEY=VALUE"),
        ("local", "lr_head=fast", "lr_head takes a number"),
        ("local", "batch=1.5", "batch takes a whole number"),
        ("local", "evidence=tanh", "evidence is one of softplus, relu, exp"),
        ("local", "optimizer_state=lost", "keep, reset"),
        ("local", "lr_head=2", "lr_head is 2.0; allowed: 0 to 1"),
        ("local", "lr_head=nan", "allowed: 0 to 1"),
        ("local", "batch=0", "batch is 0; allowed: 1 to 65536"),
        ("local", "prompt_length=1000000000", "prompt_length is 1000000000; allowed: 0 (by the patches) to 10000"),
        ("fedvpt", "n=1000000000", "n is 1000000000; allowed: 1 to 10000"),
        ("fedevprompt", "maps_per_class=0", "maps_per_class is 0; allowed: 1 to 100"),
        ("fedevprompt", "kd_weight=-1", "kd_weight is -1.0; allowed: 0 to 1"),
        ("fedmae", "norm_pix=perhaps", "norm_pix takes on or off"),
        ("fedmae", "mask_ratio=1", "mask_ratio is 1.0; allowed: 0.01 to 0.99"),
        ("fedmae", "mask_ratio=0", "allowed: 0.01 to 0.99"),
        ("fedmae", "lr=0", "lr is 0.0; allowed: above 0, at most 1"),
        ("fedmae", "batch=0", "batch is 0; allowed: 1 or more"),
        ("fedmae", "warmup=1.5", "warmup is 1.5; allowed: 0 to 1"),
        ("fedmae", "smallest_crop=0", "smallest_crop is 0.0; allowed"),
        ("fedmae", "decoder_width=30", "decoder_width is 30; allowed: a multiple of 32 up to 4096"),
        ("fedmae", "decoder_depth=0", "decoder_depth is 0; allowed: 1 to 48"),
        ("fedmae", "weight_decay=nan", "weight_decay is nan; allowed: 0 to 1"),
    ],
)
def test_a_wrong_set_names_the_key_and_its_range(method, assignment, words):
    with pytest.raises(SettingError) as caught:
        resolve(method, DATA, None, [assignment])
    assert words in str(caught.value)


@pytest.mark.parametrize(("text", "value"), [("on", True), ("off", False), ("true", True), ("False", False)])
def test_switches_are_on_or_off(text, value):
    assert flat(resolve("fedmae", DATA, None, [f"norm_pix={text}"]))["norm_pix"] is value


@dataclasses.dataclass(frozen=True)
class WithBlocks:
    blocks: tuple[int, ...] = ()


@pytest.mark.parametrize("blocks", [(5, 6, 7), [5, 6, 7], (), []])
def test_lists_of_whole_numbers_are_tuples_wherever_they_come_from(blocks):
    """`--set` gives a tuple, TOML and a job's JSON a list; empty means that the method chooses."""
    assert build(WithBlocks, {"blocks": blocks}).blocks == tuple(blocks)


@pytest.mark.parametrize("blocks", ["5,6", (5, "6"), (5.0,), (True,), 5])
def test_anything_else_is_no_list_of_whole_numbers(blocks):
    with pytest.raises(SettingError, match="allowed: whole numbers separated by commas"):
        build(WithBlocks, {"blocks": blocks})


@dataclasses.dataclass(frozen=True)
class Recipe:
    lr: float = 0.1
    batch: int = 50


@dataclasses.dataclass(frozen=True)
class WithOwnRecipe:
    recipe: Recipe = dataclasses.field(default_factory=lambda: Recipe(lr=0.25))


@dataclasses.dataclass(frozen=True)
class AroundIt:
    inner: WithOwnRecipe = dataclasses.field(default_factory=WithOwnRecipe)


def test_a_methods_own_recipe_stays_where_nothing_else_is_said():
    """A paper's rate is the default of its method, whatever the recipe's class says, at any depth."""
    assert build(WithOwnRecipe, {}) == WithOwnRecipe()
    assert build(WithOwnRecipe, {"batch": 4}).recipe == Recipe(lr=0.25, batch=4)
    assert build(AroundIt, {"batch": 4}).inner.recipe == Recipe(lr=0.25, batch=4)
    assert build(AroundIt, {"lr": 1}).inner.recipe == Recipe(lr=1.0)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_method_without_settings_is_the_one_its_file_describes(method):
    assert build(METHODS[method], {}) == METHODS[method]()


def test_unknown_methods_name_the_nearest():
    with pytest.raises(SettingError, match="did you mean fedavg"):
        resolve("fedavgg", DATA, None, [])


def test_class_balance_needs_labels():
    with pytest.raises(SettingError, match="uses no labels"):
        resolve("fedmae", {**DATA, "balance": "class"}, None, [])


def test_near_names_come_first_and_all_where_none_is_near():
    assert nearest("lr_haed", ["lr_b", "lr_head", "batch"]).split(", ")[0] == "lr_head"
    assert nearest("zzz", ["b", "a"]) == "a, b"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_whole_numbers_pass_for_numbers_and_nothing_else_does(method):
    for name, wanted in hyper_types(METHODS[method]).items():
        if wanted is float:
            assert read_value(1, wanted, name) == 1.0 and type(read_value(1, wanted, name)) is float
        for odd in (None, [1.5], {"a": 1}):
            with pytest.raises(SettingError, match=name):
                read_value(odd, wanted, name)


@pytest.mark.parametrize("text", ["", "rounds = 3", 'method = "local"', "x = ", 'method = 3\ndata = ["a"]'])
def test_a_run_directory_with_a_damaged_config_is_told(text, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(text)
    with pytest.raises(RunError, match="does not hold the settings of a run") as caught:
        read_settings(file)
    assert caught.value.code == "damaged"


def test_files_are_plain_toml():
    text = resolve("fedevprompt", {**DATA, "preset": "bench84"}, None, []).to_toml()
    found = tomllib.loads(text)
    assert set(found) == {field.name for field in dataclasses.fields(RunSettings)}
    assert isinstance(found["data"], list) and isinstance(found["hyper"], dict)


def test_settings_are_read_from_bounded_files(tmp_path: Path):
    file = tmp_path / "c.toml"
    file.write_bytes(b"#" * (1 << 21))
    with pytest.raises(Exception, match="longer than"):
        resolve("local", DATA, file, [])


@pytest.mark.parametrize("assignment", ["foo=1", "lr_haed=1", "batch"])
def test_a_set_of_an_unknown_key_lists_every_key(assignment):
    """No key is kept back for looking unlike what was written; a guess is called one."""
    with pytest.raises(SettingError) as caught:
        resolve("local", DATA, None, [assignment])
    listed = str(caught.value).partition("keys")[2].partition(": " if assignment == "batch" else " are ")[2]
    assert listed.partition(".")[0].split(", ") == sorted(hyper_types(METHODS["local"]))
    assert ("Did you mean lr_head" in str(caught.value)) == (assignment == "lr_haed=1")
