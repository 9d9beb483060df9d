"""The aggregation worker with the real FedEvPrompt: docs/security.md check 48 and reliability, docs/methods.md."""

import itertools
import tomllib
from pathlib import Path

import numpy as np
import pytest

from edgefl_coordinator.errors import OperatorError
from edgefl_coordinator.rounds.jobs import Job, read_result, write_job
from edgefl_coordinator.rounds.worker_process import WorkerProcess
from edgefl_protocol import Payload

pytest.importorskip("torch")

from edgefl_coordinator.rounds.worker import main, run_job

BACKBONE = {
    "name": "tiny", "image_px": 24, "patch": 12, "depth": 4, "heads": 1, "width": 8,
    "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5], "self_supervised": False, "sha256": "0" * 64,
}  # fmt: skip
TASK = {"name": "nevus", "classes": ["nevus", "other"], "backbone": BACKBONE, "rounds": 2, "epochs": 1, "seed": 0}
LOADS = "trying the method and its settings with PyTorch, which takes some seconds to load"
SITES = ("clinic-a", "clinic.b", "clinic_c", "d")


def job(kind: str, number: int, state: str | None = None, replies: dict[str, str] | None = None, **changes) -> Job:
    plain = {
        "kind": kind, "number": number, "method": "fedevprompt", "settings": {}, "task": TASK, "sites": SITES,
        "state": state, "replies": replies or {}, "quorum": 2, "order_key": "ab" * 32,
    }  # fmt: skip
    return Job(**{**plain, **changes})


@pytest.fixture
def files(tmp_path: Path, tools):
    """The state after the start, and a reply of each site."""
    (tmp_path / "state").write_bytes(run_job(job("start", 0)).state)
    replies = {}
    for index, name in enumerate(SITES):
        path = tmp_path / f"reply-{index}"
        path.write_bytes(tools.maps_payload(index).to_bytes())
        replies[name] = str(path)
    return str(tmp_path / "state"), replies


def test_start() -> None:
    """Round 1 sends nobody anything but the round; the phases are those of the method."""
    result = run_job(job("start", 0))
    assert result.phases == ("train", "train")
    assert set(result.broadcasts) == set(SITES)
    for data in result.broadcasts.values():
        payload = Payload.from_bytes(data)
        assert not payload.arrays
        assert dict(payload.scalars) == {"phase": "train", "round": 1, "rounds": 2}


def test_the_order_of_replies_changes_nothing(files) -> None:
    """Check 48: every order of four replies gives the same bytes."""
    state, replies = files
    results = {
        (run.state, *sorted(run.broadcasts.items()))
        for order in itertools.permutations(replies.items())
        for run in [run_job(job("aggregate", 1, state, dict(order)))]
    }
    assert len(results) == 1


def test_a_site_gets_exactly_the_others_maps(files, tools) -> None:
    """docs/methods.md, FedEvPrompt: the buffer without the receiver's own maps."""
    state, replies = files
    result = run_job(job("aggregate", 1, state, replies))
    for name in SITES:
        arrays = Payload.from_bytes(result.broadcasts[name]).arrays
        others = [tools.maps_payload(index) for index, other in enumerate(SITES) if other != name]
        for label in (0, 1):
            got = sorted(arrays[f"maps.{peer}.{label}"].tobytes() for peer in range(3))
            assert got == sorted(other.arrays[f"maps.{label}"].tobytes() for other in others)
        for peer in range(3):  # both classes of one peer come from one site
            pair = arrays[f"maps.{peer}.0"].tobytes(), arrays[f"maps.{peer}.1"].tobytes()
            assert pair in {(o.arrays["maps.0"].tobytes(), o.arrays["maps.1"].tobytes()) for o in others}


def test_peer_numbers_name_nobody_over_time(files, tmp_path, tools) -> None:
    """docs/security.md, exchange policy: over 40 rounds a number stands for every other site, by a secret key."""
    state, replies = files
    after = tmp_path / "after"
    after.write_bytes(run_job(job("aggregate", 1, state, replies)).state)
    whose = {tools.maps_payload(index).arrays["maps.0"].tobytes(): index for index in range(4)}
    many = {**TASK, "rounds": 40}
    seen: dict[str, list[int]] = {"ab" * 32: [], "cd" * 32: []}
    for key, holders in seen.items():
        for number in range(2, 42):
            made = run_job(job("broadcast", number, str(after), task=many, sites=("clinic-a",), order_key=key))
            arrays = Payload.from_bytes(made.broadcasts["clinic-a"]).arrays
            holders.append(whose[arrays["maps.0.0"].tobytes()])
    first, second = seen.values()
    assert set(first) == set(second) == {1, 2, 3}
    assert first != second


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"method": "fedmagic"}, "there is no method fedmagic"),
        ({"settings": {"lamda": 1}}, "lamda"),
        ({"task": {**TASK, "backbone": {**BACKBONE, "legs": 4}}}, "legs"),
    ],
)
def test_wrong_jobs(change, sentence) -> None:
    with pytest.raises(Exception, match=sentence):
        run_job(job("start", 0, **change))


def test_init_tries_the_first_job(tmp_path) -> None:
    """A setting that the method would refuse at the first round is refused by `init` in a sentence, after one that says
    what it does; a name that there is not, before that, for PyTorch takes seconds; a good one makes a home."""
    from click.testing import CliRunner

    from edgefl_coordinator.cli import main as command

    plain = ["--federation", "skin", "--classes", "nevus,other", "--backbone", "tiny", "--preset", "tiny"]
    for number, (extra, sentence, before) in enumerate(
        [
            (["--set", "lamda=1"], "lamda", []),
            (["--set", "b_blocks=9"], "b_blocks", [LOADS]),
            (["--method", "fedevpromt"], "there is no method 'fedevpromt'; did you mean fedevprompt", []),
            (["--method", "random-init"], "random-init sends nothing", [LOADS]),
            (["--method", "local"], "local sends nothing", [LOADS]),
            (["--method", "local-cl", "--backbone", "cnn:mobilenetv3_small_050"], "local-cl sends nothing", [LOADS]),
            (["--backbone", "no-such-network"], "no-such-network", []),
        ]
    ):
        folder = tmp_path / str(number)
        result = CliRunner().invoke(command, ["init", str(folder), *plain, *extra])
        assert result.exit_code == 2 and sentence in result.stderr
        assert result.stderr.splitlines()[:-1] == before
        assert not folder.exists()
    result = CliRunner().invoke(command, ["init", str(tmp_path / "good"), *plain])
    assert result.exit_code == 0, result.stderr
    shown = CliRunner().invoke(command, ["status", "--home", str(tmp_path / "good")])
    assert "fedevprompt on all (nevus, other)" in shown.stdout


def test_init_as_run_does_and_for_three_members(tmp_path) -> None:
    """docs/decisions/0004 and 0041: an untrained network is frozen for a trial only; what could stop is refused before
    a folder is made; what nobody names is the network that comes with EdgeFL, and a quorum that fits three."""
    from click.testing import CliRunner

    from edgefl_coordinator.cli import main as command

    plain = ["--federation", "skin", "--classes", "nevus,other"]
    for number, (extra, sentence) in enumerate(
        [
            (["--backbone", "tiny"], "on a frozen random network: give --backbone derm-vit-tiny-84, which learned"),
            (["--image-px", "37"], "no network that comes with EdgeFL takes images of 37 px"),
            (["--quorum-min", "2"], "with a quorum of 2 the contribution of each could be told apart"),
            (["--quorum-min", "2", "--min-cohort", "2"], "could stop for good"),
            (["--members", "2"], "you need at least 3, or --allow-small-cohort"),
            (["--members", "3", "--quorum-target", "5"], "would wait for 5 approved members"),
        ]
    ):
        folder = tmp_path / str(number)
        result = CliRunner().invoke(command, ["init", str(folder), *plain, *extra])
        assert result.exit_code == 2 and sentence in result.stderr
        assert result.stderr.splitlines()[:-1] == ([LOADS] if number < 2 else []), result.stderr
        assert not folder.exists()
    found = {}
    for members in (None, 4, 10):
        folder = tmp_path / f"of-{members}"
        words = ["init", str(folder), *plain, *(["--members", str(members)] if members else [])]
        words += ["--url", "https://hospital.example", "--port", "18643"] if members == 4 else []
        made = CliRunner().invoke(command, words)
        assert made.exit_code == 0
        called = "edgefl-coordinator set public_url https://hospital.example:18643"  # `set port` warned, `init` did not
        assert (called in made.stderr) is ("warning: the server listens on port 18643" in made.stderr) is (members == 4)
        assert "a round closes as soon as " in made.stderr and "needs" not in made.stderr
        table = tomllib.loads((folder / "config.toml").read_text())
        found[members] = [table["rounds"][name] for name in ("quorum_min", "quorum_target", "min_cohort")]
        assert table["task"]["backbone"]["name"] == "derm-vit-tiny-84" and "untrained" not in made.stderr
    trial = CliRunner().invoke(command, ["init", str(tmp_path / "trial"), *plain, "--preset", "tiny"])
    assert "warning: backbone tiny is untrained: this trial shows the steps, not what" in trial.stderr
    assert found == {None: [3, 3, 2], 4: [4, 4, 3], 10: [4, 10, 3]}


def test_init_knows_an_untrained_network_by_any_name(tmp_path) -> None:
    """docs/decisions/0004: a copy of a network in which nothing was learned passed for a trained one."""
    from click.testing import CliRunner

    from edgefl_coordinator.cli import main as command
    from edgefl_trainer.models.backbones import backbone_bytes, load_backbone, weights_of

    fresh, file = load_backbone("tiny"), tmp_path / "copy.safetensors"
    named = ("--federation", "skin", "--classes", "nevus,other", "--backbone", f"file:{file}")
    for learned in (True, False):
        file.write_bytes(backbone_bytes(fresh.spec, weights_of(fresh.network), self_supervised=True, learned=learned))
        made = CliRunner().invoke(command, ["init", str(tmp_path / f"{learned}"), *named])
        assert (made.exit_code, "is untrained" in made.stderr) == ((0, False) if learned else (2, True)), made.stderr
    trial = CliRunner().invoke(command, ["init", str(tmp_path / "trial"), *named, "--preset", "tiny"])
    assert trial.exit_code == 0 and f"warning: backbone file:{file} is untrained" in trial.stderr


def test_a_new_federation_asks_for_means_of_maps(tmp_path) -> None:
    """docs/decisions/0071. The paper sends each map: with its preset, or where that is asked for, `init` warns. Members
    send no more maps than their replies may hold, also beside weights."""
    from click.testing import CliRunner

    from edgefl_coordinator.cli import main as command

    plain = ["--federation", "skin", "--classes", "nevus,other"]
    for number, (extra, sent) in enumerate(
        [
            ([], "mean"),
            (["--preset", "bench84"], "mean"),
            (["--preset", "paper"], "each"),
            (["--set", "sent_maps=each"], "each"),
            (["--method", "fedavg", "--set", "kd=on", "--maps-per-class", "3"], "mean"),
        ]
    ):
        made = CliRunner().invoke(command, ["init", str(tmp_path / str(number)), *plain, *extra])
        assert made.exit_code == 0, made.stderr
        task = tomllib.loads((tmp_path / str(number) / "config.toml").read_text())["task"]
        assert task["settings"]["sent_maps"] == sent
        assert task["settings"]["maps_per_class"] == task["maps_per_class"] == (3 if "--maps-per-class" in extra else 5)
        assert ("warning: members send each attention map" in made.stderr) is (sent == "each")


@pytest.mark.parametrize("method", ["fedclf", "fedevprompt"])
def test_init_names_every_setting(tmp_path, method) -> None:
    """A later version may have other defaults; a federation that has begun, and the devices that learn in it, keep
    those of the day it was set up. A device knows every key that is named."""
    from click.testing import CliRunner

    from edgefl_coordinator.cli import main as command
    from edgefl_protocol.rules import defaults

    declared = {"fedclf": defaults.FedCLFDefaults, "fedevprompt": defaults.FedEvPromptDefaults}[method]
    network = {"fedclf": "cnn:mobilenetv3_small_050", "fedevprompt": "derm-vit-tiny-84"}[method]
    told = ["--method", method, "--federation", "skin", "--classes", "nevus,other", "--backbone", network]
    result = CliRunner().invoke(command, ["init", str(tmp_path / "home"), *told, "--set", "weight_decay=0.125"])
    assert result.exit_code == 0, result.stderr
    kept = tomllib.loads((tmp_path / "home" / "config.toml").read_text())["task"]["settings"]
    of_maps = {"sent_maps": "mean"} if method == "fedevprompt" else {}  # decision 0071
    assert kept == {**defaults.by_name(declared), "weight_decay": 0.125, **of_maps}


@pytest.mark.slow
def test_a_process_of_its_own(files, tmp_path, tools) -> None:
    """The worker process gives the same bytes as the function, job after job, and a failure is one sentence."""
    state, replies = files
    work = job("aggregate", 1, state, replies)
    folders = [tmp_path / name for name in ("one", "broken", "two")]
    for folder in folders:
        folder.mkdir()
        write_job(folder, work if folder.name != "broken" else job("aggregate", 1, str(tmp_path / "nothing")))
    worker = WorkerProcess()
    worker(folders[0], 300)
    with pytest.raises(OperatorError, match=r"failed \(1\): .*does not exist"):
        worker(folders[1], 300)
    worker(folders[2], 300)
    worker.stop()
    for folder in (folders[0], folders[2]):
        assert tools.content(read_result(folder)) == run_job(work)


def test_what_a_member_sent_that_was_shut_out_is_dealt_to_nobody(files) -> None:
    """docs/security.md 4 with the real method: before the next round is aggregated its maps are gone from the state."""
    state, replies = files
    after = Path(state).with_name("after")
    after.write_bytes(run_job(job("aggregate", 1, state, replies)).state)
    for kind, more in (("broadcast", {}), ("aggregate", {name: replies[name] for name in SITES[:2]})):
        made = run_job(job(kind, 2, str(after), more, sites=SITES[:3], gone=("d",)))
        assert all(len({name.split(".")[1] for name in Payload.from_bytes(one).arrays}) == 2
                   for one in made.broadcasts.values())  # fmt: skip
        kept = run_job(job(kind, 2, str(after), more, sites=SITES[:3]))
        assert all(len({name.split(".")[1] for name in Payload.from_bytes(one).arrays}) == 3
                   for one in kept.broadcasts.values())  # fmt: skip


def fedavg_replies(folder: Path, width: int = 8, **odd: Payload) -> dict[str, str]:
    """The warm replies of FedAvg: moments and probes of both readouts; `odd` replaces a site's."""
    rng = np.random.default_rng(0)
    files = {}
    for index, name in enumerate(SITES):
        arrays = {f"moments.{readout}": rng.uniform(1, 2, (2, width)).astype(np.float32) for readout in ("cls", "mean")}
        plain = Payload(arrays, {"n_train": 10 + index, "probe.cls": 0.6, "probe.mean": 0.5, "site_sha256": "0" * 64})
        path = folder / f"warm-{index}"
        path.write_bytes(odd.get(name, plain).to_bytes())
        files[name] = str(path)
    return files


def test_fedavg_goes_on_without_a_reply_it_cannot_use(tmp_path) -> None:
    """Check 46 with the real method, where the broadcast tells no form: the odd reply is named and left out."""
    plain = {"method": "fedavg", "task": TASK}
    (tmp_path / "start").write_bytes(run_job(job("start", 0, **plain)).state)
    good = {name: path for name, path in fedavg_replies(tmp_path).items() if name != "d"}
    honest = run_job(job("aggregate", 1, str(tmp_path / "start"), good, **plain))
    assert not honest.refused and not honest.problem
    for odd in (
        Payload({}, {"n_train": 1}),
        Payload({"moments.cls": np.ones((2, 1), np.float32), "moments.mean": np.ones((2, 1), np.float32)},
                {"n_train": 1, "probe.cls": 0.5, "probe.mean": 0.5, "site_sha256": "0" * 64}),
        Payload({"moments.cls": np.ones((2, 8), np.float32)}, {"n_train": 1, "site_sha256": "0" * 64}),
        Payload({"moments.cls": np.ones((2, 8), np.float32), "moments.mean": np.ones((2, 8), np.float32)},
                {"n_train": 1, "probe.cls": 0.0, "probe.mean": 1e6, "site_sha256": "0" * 64}),  # which would decide
    ):  # fmt: skip
        offered = fedavg_replies(tmp_path, d=odd)
        result = run_job(job("aggregate", 1, str(tmp_path / "start"), offered, **plain))
        assert set(result.refused) == {"d"}
        assert result.state == honest.state and result.broadcasts == honest.broadcasts


def test_fedavg_opens_the_round_again_when_too_few_are_left(tmp_path, tools) -> None:
    """Check 46: three of four replies without what the method reads: no state, and a sentence for the operator."""
    plain = {"method": "fedavg", "task": TASK}
    (tmp_path / "start").write_bytes(run_job(job("start", 0, **plain)).state)
    bare = Payload({"moments.cls": np.ones((2, 8), np.float32)}, {"n_train": 1})
    offered = fedavg_replies(tmp_path, **dict.fromkeys(SITES[:3], bare))
    work = job("aggregate", 1, str(tmp_path / "start"), offered, **plain)
    result = run_job(work)
    assert not result.state and not result.broadcasts and result.problem
    folder = tmp_path / "job"
    folder.mkdir()
    write_job(folder, work)
    assert main(folder) == 0
    assert tools.content(read_result(folder)) == result


def test_a_site_without_a_class_token_is_no_offender(tmp_path) -> None:
    """docs/methods.md, FedMAE: in the last exchange a site that trained nothing has no token to give."""
    plain = {"method": "fedmae", "settings": {"decoder_width": 32, "decoder_depth": 1}}
    plain["task"] = {**TASK, "backbone": {**BACKBONE, "width": 32}}
    (tmp_path / "start").write_bytes(run_job(job("start", 0, **plain)).state)
    token = np.ones((1, 1, 32), np.float32)
    files = {}
    for index, name in enumerate(SITES):
        arrays = {} if index == 0 else {"backbone.cls_token": index * token}
        (tmp_path / name).write_bytes(Payload(arrays, {"n_train": 10 if index else 0}).to_bytes())
        files[name] = str(tmp_path / name)
    result = run_job(job("aggregate", 3, str(tmp_path / "start"), files, **plain))
    assert not result.refused and not result.problem
    np.testing.assert_allclose(Payload.from_bytes(result.state).arrays["backbone.cls_token"], 2 * token)


def test_fedclf_deals_features_that_came_alone_and_averages_the_others(tmp_path) -> None:
    """docs/decisions/0033 with the real method: the average is that of the two who sent weights, and every other site
    is sent the third's features."""
    settings = {"batch": 8, "queue": 16}
    plain = {"method": "fedclf", "settings": settings, "sites": ("a", "b", "c"), "granted": {"a": 30}}
    start = run_job(job("start", 0, **plain)).state
    (tmp_path / "start").write_bytes(start)
    network = dict(Payload.from_bytes(start).arrays)
    rng = np.random.default_rng(1)
    banks = {site: rng.normal(size=(5, 128)) for site in "abc"}
    banks = {
        site: (bank / np.linalg.norm(bank, axis=1, keepdims=True)).astype(np.float16) for site, bank in banks.items()
    }
    files = {}
    for site, n_train in (("a", 30), ("b", 10), ("c", 0)):
        share = 1.0 if site == "a" else 3.0
        moved = {name: (array * share).astype(array.dtype) for name, array in network.items()} if n_train else {}
        reply = Payload({**moved, "features": banks[site]}, {"n_train": n_train, "site_sha256": "0" * 64})
        (tmp_path / site).write_bytes(reply.to_bytes())
        files[site] = str(tmp_path / site)
    result = run_job(job("aggregate", 2, str(tmp_path / "start"), files, **plain))
    assert not result.refused and not result.problem
    after = Payload.from_bytes(result.state).arrays
    for name, array in network.items():
        np.testing.assert_allclose(after[name], (0.75 * 1 + 0.25 * 3) * array, rtol=1e-6)
    received = Payload.from_bytes(result.broadcasts["a"]).arrays["remote"]
    assert {row.tobytes() for row in received} == {row.tobytes() for site in "bc" for row in banks[site]}
