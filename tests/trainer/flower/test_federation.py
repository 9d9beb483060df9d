"""A federation of SuperNodes, without SuperLink and network: GridHere calls the apps that they would run.

The oracle of every digest is the local engine, which never sees Flower (docs/design.md 4).
"""

import fcntl
import json
from dataclasses import replace

import numpy as np
import pytest
from tests.trainer.flower.three_nodes import CLASSES, DATA, SITES, asked, begin, lines

from edgefl_protocol import Payload
from edgefl_protocol.distribution import VERSION
from edgefl_protocol.rules.maps import maps_in_broadcast
from edgefl_trainer.engine import run as engine
from edgefl_trainer.engine.checkpoint import Checkpoints
from edgefl_trainer.engine.folder import LOCK, check_finished, run_folders
from edgefl_trainer.engine.settings import read_settings, resolve
from edgefl_trainer.errors import RunError
from edgefl_trainer.flower import away, federation
from edgefl_trainer.flower.federation import serve
from edgefl_trainer.flower.records import packed, unpacked

__all__ = ["begin"]  # a fixture


def local_digest(method, folder, rounds=2):
    given = {"data": (DATA,), "preset": "tiny", "device": "cpu", "rounds": rounds, "image_px": 36}
    return engine.run(resolve(method, given, None, []), folder, resume=False)["state_sha256"]


@pytest.mark.parametrize(
    "method",
    [
        "fedevprompt",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "pep-fedpt", "fedclf", "fedmae")),
    ],
)
def test_a_federation_ends_with_the_digest_of_the_local_engine(method, begin, tmp_path) -> None:
    grid, plan = begin(method, classes="" if method == "fedmae" else CLASSES)
    found = serve(grid, plan)
    assert found["state_sha256"] == local_digest(method, tmp_path / "local") and found["without_hand_out"] == []
    for name in SITES:  # each site is left with its own results, and the server with none of its states
        [path] = (tmp_path / name).glob("server-*/summary.json")
        summary = json.loads(path.read_text())
        assert summary["state_sha256"] == found["state_sha256"] and list(summary["sites"]) == [name]
    assert found["site_names"] == list(SITES) and "sites" not in found  # in a run's summary figures, by name
    assert plan.out not in run_folders(tmp_path) and len(run_folders(tmp_path)) == 4
    with pytest.raises(RunError, match="server's half of a federation"):
        check_finished(plan.out)
    states = list((tmp_path / "server/checkpoints").rglob("site-*.state.safetensors"))
    assert len(states) == 3
    assert not any(Payload.from_bytes(path.read_bytes()).arrays for path in states)


def test_no_site_can_tell_whose_maps_it_was_given(begin, monkeypatch) -> None:
    """docs/methods.md 1.1: a peer is a number and not a name. Each site knows the others' names, the seed and the
    round; with these it undoes neither the numbers of the second round nor those of the hand-out. Of two peers every
    second draw is that of the seed, so the server's secret is a fixed one here."""
    monkeypatch.setattr(federation.secrets, "token_bytes", lambda count: b"\1" * count)
    given, said = {}, {}  # arrays of broadcasts and replies, by exchange and site

    def note(asked, reply):
        if asked.metadata.message_type in ("train", "evaluate"):
            told = unpacked(asked.content, away.GIVEN)
            place = told["facts"].scalars["number"], told["facts"].scalars["site"]
            given[place] = told["broadcast"].arrays
            if asked.metadata.message_type == "train":
                said[place] = unpacked(reply.content, ("facts", "reply"))["reply"].arrays
        return reply

    def whose(exchange, site):
        """The sites behind numbers 0 and 1: their maps are those of their replies before."""
        maps = {peer: (label, one) for (peer, label), one in maps_in_broadcast(given[exchange, site]).items()}
        return [
            next(name for name in SITES if np.array_equal(said[exchange - 1, name].get(f"maps.{label}"), one))
            for label, one in (maps[0], maps[1])
        ]

    grid, plan = begin()
    for node in grid.nodes.values():
        node.spoil = note
    serve(grid, plan)
    others = {name: [peer for peer in SITES if peer != name] for name in SITES}
    for exchange in (2, 3):
        found = {name: whose(exchange, name) for name in SITES}
        by_seed = np.random.default_rng([0, exchange]).permutation(2)
        assert {name: sorted(peers) for name, peers in found.items()} == others != found
        assert found != {name: [others[name][drawn] for drawn in by_seed] for name in SITES}
    assert (plan.out / "numbering.key").stat().st_mode & 0o077 == 0


@pytest.mark.slow
def test_sites_that_answer_questions_learn_the_words_of_all(begin, tmp_path) -> None:
    grid, plan, data = asked(begin, tmp_path)
    found = serve(grid, plan)
    given = {"data": (data,), "preset": "tiny", "device": "cpu", "rounds": 2, "image_px": 36}
    local = engine.run(resolve("pfl-vqa", given, None, []), tmp_path / "local", resume=False)
    assert found["state_sha256"] == local["state_sha256"]


def test_a_site_tells_no_words_unless_it_allows_it(begin, tmp_path) -> None:
    """Words of questions are data: a SuperNode gives them only where its --node-config says so."""
    grid, plan, _ = asked(begin, tmp_path)
    del grid.nodes[66].config["words"]
    with pytest.raises(RunError, match=r"site rad-chest: rad-chest tells no words of its questions: .* words=share"):
        serve(grid, plan)
    assert not (plan.out / "vocabulary.json").exists()


class Killed(BaseException):
    """The process is gone."""


@pytest.mark.parametrize("at", ["save_site", "finish_phase"])
def test_a_killed_server_goes_on_to_the_same_digest(at, begin, tmp_path, monkeypatch) -> None:
    grid, plan = begin()
    whole, calls = getattr(Checkpoints, at), []

    def kill(self, *args, **options):
        calls.extend([at] * self._folder.is_relative_to(plan.out))
        if len(calls) == 2:
            raise Killed
        return whole(self, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoints, at, kill)
        with pytest.raises(Killed):
            serve(grid, plan)
    trained = sum(node.heard.count("train") for node in grid.nodes.values())
    assert serve(grid, plan)["state_sha256"] == local_digest("fedevprompt", tmp_path / "local")
    assert sum(node.heard.count("train") for node in grid.nodes.values()) <= trained + 6


def test_a_server_waits_for_the_one_before_it(begin, tmp_path) -> None:
    """A server outlives its killed SuperLink for a while, and the next one is started meanwhile."""
    grid, plan = begin(rounds=1)
    plan.out.mkdir()
    with (plan.out / LOCK).open("w") as before:
        fcntl.flock(before, fcntl.LOCK_EX)
        with pytest.raises(RunError, match="another process works on the run"):
            serve(grid, plan)
        assert grid.time == plan.wait_s
        grid.sleep = lambda seconds: fcntl.flock(before, fcntl.LOCK_UN)
        assert serve(grid, plan)["state_sha256"] == local_digest("fedevprompt", tmp_path / "local", rounds=1)


def test_a_supernode_that_is_gone_is_named_and_the_round_goes_on_as_the_quorum_says(begin, capsys, tmp_path) -> None:
    grid, plan = begin(quorum=2, **{"wait-seconds": 5})
    node = grid.nodes[66]  # site-2

    def leave(asked, reply):
        if asked.metadata.message_type == "train":
            node.online = False
            return None
        return reply

    node.spoil = leave
    plan = replace(plan, deadline_s=30.0)
    found = serve(grid, plan)
    told = lines(capsys, "site-2")
    assert any("exchange 1: no reply of site site-2 counts: no reply came within 30 s" in line for line in told)
    assert any("exchange 2: no reply of site site-2 counts: no SuperNode answers for it" in line for line in told)
    assert found["without_hand_out"] == ["site-2"]


def test_a_round_without_its_quorum_keeps_what_came(begin, tmp_path) -> None:
    grid, plan = begin(**{"wait-seconds": 5})
    grid.nodes[66].online = False
    with pytest.raises(RunError, match="exchange 1 has 2 replies, but the quorum is 3") as told:
        serve(grid, plan)
    assert "site site-2: no SuperNode answers for it" in str(told.value)
    assert "start the same command again: what came is kept" in str(told.value)
    grid.nodes[66].online = True
    before = grid.nodes[97].heard.count("train")
    assert serve(grid, plan)["state_sha256"] == local_digest("fedevprompt", tmp_path / "local")
    assert grid.nodes[97].heard.count("train") == before + 1  # the second exchange alone


def test_a_site_tells_its_trouble_without_a_word_of_its_data(begin, tmp_path, capsys) -> None:
    """The name of a file may be a patient's: it stays in the log of the SuperNode."""
    grid, plan = begin(rounds=1, quorum=2)
    secret = tmp_path / "Jane-Doe-1961"
    grid.nodes[66].config["data"] = f"folder:{secret}"
    serve(grid, plan)
    captured = capsys.readouterr().err
    told = [line for line in captured.splitlines() if line.startswith("exchange 1: no reply of site site-2")]
    assert (
        told == [told[0]] and "DataError" in told[0] and "Jane" not in told[0] and "the log of its SuperNode" in told[0]
    )
    assert "Jane" in captured  # there, at the site


def test_another_version_is_of_no_use(begin, capsys, monkeypatch) -> None:
    grid, plan = begin(rounds=1, quorum=2, **{"wait-seconds": 0})

    def older(asked, reply):
        if asked.metadata.message_type == "query":
            reply.content = packed({"facts": Payload({}, {"site": "site-2", "version": "0.0.9"})})
        return reply

    grid.nodes[66].spoil = older
    serve(grid, plan)
    [told] = lines(capsys, "no reply of site site-2 counts")
    assert told.startswith("exchange 1: ") and "it runs EdgeFL '0.0.9', and the server" in told


def test_a_supernode_that_was_mended_takes_part_in_the_next_round(begin, capsys) -> None:
    """Its key is the same, and so is its number at the SuperLink: it must be asked again who it is."""
    grid, plan = begin(rounds=2, quorum=2, **{"wait-seconds": 0})
    node, right = grid.nodes[66], dict(grid.nodes[66].config)
    node.config["images_per_site"] = 3  # refused

    def mend(asked, reply):
        if asked.metadata.message_type == "train":
            node.config = right
        return reply

    grid.nodes[97].spoil = mend
    assert serve(grid, plan)["without_hand_out"] == []
    said = capsys.readouterr().err
    assert said.count("SuperNode 66 does not say which site it is") == 1
    assert said.count("no reply of site site-2 counts") == 1 and node.heard.count("train") == 1


def test_damaged_words_are_told_with_the_name_of_the_site(begin, tmp_path) -> None:
    grid, plan, _ = asked(begin, tmp_path)

    def damage(asked, reply):
        if asked.metadata.message_type == "query.words":
            reply.content = packed({"vocabulary": Payload({"json": np.frombuffer(b"{", np.uint8)}, {})})
        return reply

    grid.nodes[66].spoil = damage
    with pytest.raises(RunError, match="site rad-chest: its words cannot be used: a vocabulary is damaged"):
        serve(grid, plan)


def test_a_site_that_was_updated_in_mid_run_says_so(begin, capsys) -> None:
    """It was asked its version once; each request tells the server's."""
    grid, plan = begin(rounds=1, quorum=2)

    def newer(message, context):
        if message.metadata.message_type == "train":
            found = unpacked(message.content, away.GIVEN)
            facts = Payload({}, {**found["facts"].scalars, "version": "0.0.9"})
            message.content = packed({**found, "facts": facts})
        return away.app(message, context)

    grid.nodes[66].app = newer
    serve(grid, plan)
    [told] = lines(capsys, "no reply of site site-2 counts")
    assert f"this site runs EdgeFL {VERSION}, and the server 0.0.9: install one version" in told


def test_a_supernode_that_became_another_site_does_not_count_as_the_old_one(begin, capsys, tmp_path) -> None:
    """The server knows a SuperNode by its key; what it would learn now is of other pictures."""
    grid, plan = begin(rounds=1, quorum=2)

    def moved(message, context):
        if message.metadata.message_type == "train":
            context.node_config |= {"site": "site-9", "out": str(tmp_path / "site-9")}
        return away.app(message, context)

    grid.nodes[66].app = moved
    serve(grid, plan)
    [told] = lines(capsys, "no reply of site site-2 counts")
    assert "its SuperNode says that it is site site-9 now: start it with site=site-2 as before" in told
    assert not (tmp_path / "site-9").exists()


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"backbone": "vit:128x2/12"}, "your backbone vit:128x2/12 has the SHA-256"),
        ({"task": "nevus"}, "its work failed (TaskError, setting); the log of its SuperNode says why"),
        ({"classes": "BCC,NV,Jane-Doe"}, "its work failed (DataError, "),
    ],
)
def test_a_site_of_another_task_is_named_with_its_reason(config, sentence, begin, capsys) -> None:
    """The others are enough for the quorum; no name of the site's data leaves it."""
    grid, plan = begin(rounds=1, quorum=2, **{"wait-seconds": 0})
    grid.nodes[66].config |= config
    serve(grid, plan)
    said = capsys.readouterr().err.splitlines()
    told = [line for line in said if line.startswith("exchange 1: no reply of site site-2")]
    assert len(told) == 1 and sentence in told[0] and "Jane" not in told[0], said


def test_a_site_whose_folder_is_of_another_task_says_so(begin, tmp_path, capsys) -> None:
    """The server's folder was made anew under the name of the old federation."""
    grid, plan = begin(rounds=1)
    serve(grid, plan)
    name = (tmp_path / "server/federation.json").read_bytes()
    other, plan = begin(rounds=2, out=str(tmp_path / "second"))
    plan.out.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(federation.secrets, "token_hex", lambda _: json.loads(name)["federation"][-8:])
        (tmp_path / "server").rename(tmp_path / "gone")
        with pytest.raises(RunError, match="quorum"):
            serve(other, replace(plan, out=tmp_path / "server"))
    assert any("has rounds = 1, but this command has 2" in line for line in lines(capsys, "site-2"))


def test_a_word_that_a_supernode_does_not_know_is_told(begin, capsys) -> None:
    grid, plan = begin(rounds=1, quorum=2, **{"wait-seconds": 0})
    grid.nodes[66].config["images_per_site"] = 3
    serve(grid, plan)
    [told] = lines(capsys, "SuperNode 66 does not say which site it is")
    assert "--node-config has 'images_per_site'; did you mean images-per-site" in told


def test_two_nodes_of_one_name_are_refused(begin) -> None:
    grid, plan = begin()
    grid.nodes[66].config["site"] = "site-1"
    with pytest.raises(RunError, match="two SuperNodes say that they are site site-1"):
        serve(grid, plan)


def test_the_server_begins_with_the_settings_it_is_given(begin, tmp_path) -> None:
    """Like a run: a folder goes on only with the settings that it began with."""
    grid, plan = begin(rounds=1)
    serve(grid, plan)
    assert read_settings(tmp_path / "server/config.toml").rounds == 1
    grid, plan = begin(rounds=3)
    with pytest.raises(RunError, match="rounds"):
        serve(grid, plan)
