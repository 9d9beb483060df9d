"""`edgefl contribute --features`: what becomes a feature, what leaves, and what is refused in one sentence.

The encoder is one matrix on mean colours (`contrast_lab`), so a feature says which colour it was made of.
"""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.edge_client.learning.contrast_lab import contrast_plan, encoder_graph, step_graph

from edgefl_client.home import Home
from edgefl_client.learning.own_pictures import Table, remember_table
from edgefl_client.scoring.pictures import PictureReader
from edgefl_client.trust.trusted_keys import remove_trusted
from edgefl_protocol import Payload
from edgefl_protocol.bundle import BundleFields, build_bundle
from edgefl_protocol.bundle.archive import read_archive
from edgefl_protocol.bundle.fedclf_plan import ENCODER, FedCLFPlan
from edgefl_protocol.bundle.learning_plan import GRAPH, RECORD
from edgefl_protocol.messages.requests import TaskReply
from edgefl_protocol.payload import digest
from edgefl_protocol.pictures.imaging import decode
from edgefl_protocol.pictures.preprocess import TaughtPictures
from edgefl_protocol.rules.travels import travels_of

WEIGHT = np.random.default_rng(4).normal(size=(128, 3)).astype(np.float32)
NETWORK = {
    "head.weight": WEIGHT, "backbone.mean": np.full(3, 0.5, np.float32), "backbone.seen": np.asarray(3, np.int64)
}  # fmt: skip


def bundle_of(lab: Any, plan: FedCLFPlan | None, version: int, taught: TaughtPictures | None = None) -> bytes:
    """A bundle with an encoder; without a plan, one that scores only."""
    held = read_archive(lab.bundle_bytes(taught=taught)).items()
    members = {name: content for name, content in held if not name.startswith(("manifest", "signatures"))}
    if plan is not None:
        members |= {GRAPH: step_graph(plan), ENCODER: encoder_graph(plan), RECORD: plan.to_bytes()}
    fields = BundleFields(federation="skin", line="main", task="all", version=version, created_ms=lab.NOW_MS)
    return build_bundle(members, fields, [lab.SIGNER])


def open_round(live: Any, number: int = 1, phase: str = "train", **arrays: np.ndarray) -> None:
    live.broadcasts[number] = Payload({**NETWORK, **arrays}, {"phase": phase, "round": number, "rounds": 5})
    live.round, live.state = number, "open"


@pytest.fixture
def clf(run, device, live, lab):
    """A device in a FedCLF federation whose round is open; features may leave, maps may not."""
    live.method, live.travels, live.tokens = "fedclf", ("features", "weights"), 0
    live.bundles["main", "all", 1] = bundle_of(lab, contrast_plan(), 1)
    open_round(live)
    assert run("pull")[0] == 0
    assert run("policy", "deny", "maps")[0] == run("policy", "allow", "features")[0] == 0
    assert run("sync", "--no-learn")[0] == 0
    for number in range(6):
        (device / f"{number}.png").write_bytes(lab.encoded(lab.photo(50, 40, (150 + 10 * number, 120, 90))))
    (device / "labels.csv").unlink()
    return device


def dry(run, *words) -> dict[str, Any]:
    code, out, err = run("contribute", "--features", *words, "--dry-run", "--json")
    assert code == 0, err
    return json.loads(out)


def one_sentence(result, code) -> str:
    found, out, err = result
    lines = err.splitlines()
    assert (found, out, len(lines)) == (code, "", 1), err
    return lines[0]


def test_a_feature_of_each_picture_and_nothing_else(run, clf, live):
    """docs/methods.md, FedCLF: rows of 128 float16 numbers of length 1, each of the encoder and one view's colour."""
    shown = dry(run, clf)
    assert json.loads(run("outbox", "--json")[1])["items"] == [] and live.effects == []
    code, out, _ = run("contribute", "--features", clf, "--json")
    kept = json.loads(out)
    assert code == 0 and run("sync", "--no-learn")[0] == 0
    ((_, number, data),) = live.effects
    sent = Payload.from_bytes(data)
    assert hashlib.sha256(data).hexdigest() == shown["sha256"] == kept["sha256"] and number == 1
    assert travels_of(sent.arrays) == ("features",) == tuple(shown["travels"]) and list(sent.arrays) == ["features"]
    assert dict(sent.scalars) == {
        "n_train": 0,
        "site_sha256": digest({}),
    }  # weighs nothing; this site remembers nothing
    rows = sent.arrays["features"]
    assert rows.dtype == np.float16 and rows.shape == (6, 128)
    np.testing.assert_allclose(np.linalg.norm(rows.astype(np.float64), axis=1), 1, atol=1e-3)
    colour, *_ = np.linalg.lstsq(WEIGHT.astype(np.float64), rows.T.astype(np.float64), rcond=None)  # (3, 6)
    np.testing.assert_allclose(WEIGHT @ colour, rows.T, atol=2e-4)  # made of a colour by this encoder alone
    assert (colour > 0).all()
    assert not any(name.encode() in data for name in ("0.png", "device-1", str(clf)))
    assert sorted(Path(one["image"]).name for one in shown["made_of"]) == [f"{number}.png" for number in range(6)]
    assert shown["length"]["min"] > 0.999 and shown["length"]["max"] < 1.001


@pytest.mark.parametrize(("outlives", "which"), [("averaged", 1), ("reset", 0)])
def test_features_are_the_slow_encoders(run, clf, live, monkeypatch, outlives, which):
    """docs/methods.md, FedCLF: the features that all share are the momentum encoder's, which is averaged beside the
    encoder, or is its copy at the start of the round."""
    weights = (WEIGHT, np.random.default_rng(5).normal(size=(128, 3)).astype(np.float32))
    tell_more(live, monkeypatch)
    live.settings = {"momentum_encoder": outlives}
    open_round(live, 2, **{"momentum.head.weight": weights[1]})
    assert run("sync", "--no-learn")[0] == run("contribute", "--features", clf)[0] == run("sync", "--no-learn")[0] == 0
    rows = Payload.from_bytes(live.effects[0][2]).arrays["features"].astype(np.float64)
    for index, weight in enumerate(weights):
        _, left, *_ = np.linalg.lstsq(weight.astype(np.float64), rows.T, rcond=None)
        assert (left.max() < 1e-6) == (index == which)


def test_the_order_of_rows_tells_nothing(run, clf, live):
    """docs/methods.md, FedCLF: rows stand in an order that is a function of the features themselves."""
    assert run("contribute", "--features", clf)[0] == run("sync", "--no-learn")[0] == 0
    rows = Payload.from_bytes(live.effects[0][2]).arrays["features"]
    keys = [hashlib.blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
    assert keys == sorted(keys)


def test_doing_it_again_changes_nothing(run, clf, live, net):
    """Same pictures and round: the same bytes; one item waits; an answer that was cut off counts once; a later round's
    encoder gives others."""
    first, again = (json.loads(run("contribute", "--features", clf, "--json")[1]) for _ in range(2))
    assert first["sha256"] == again["sha256"] == dry(run, clf / "?.png")["sha256"]
    assert len(json.loads(run("outbox", "--json")[1])["items"]) == 1
    good, cuts = live.send, iter([True])
    live.send = lambda request: (
        net.cut_answer(request, good) if request.path == "/v1/reply" and next(cuts, False) else good(request)
    )
    assert run("sync", "--no-learn")[0] == 0 and len(live.effects) == 1
    open_round(live, 2)
    assert run("sync", "--no-learn")[0] == 0
    assert dry(run, clf)["sha256"] != first["sha256"]


def test_the_sheets_show_the_numbers_and_no_picture(run, clf, tmp_path):
    """docs/reference/sharing.md: one square a number in one sheet, the pictures in the other."""
    found = dry(run, clf, "--sheets", tmp_path / "sheets")
    leaves, stays = (decode(Path(found["sheets"][key]).read_bytes()) for key in ("leaves", "stays"))
    assert leaves.shape == stays.shape == (64 + 6 * 24, 104 + 128 * 5 + 12, 3)
    inside = leaves[64:, 104 : 104 + 128 * 5]
    squares = inside.reshape(6, 24, 128, 5, 3)[:, :22]
    assert (squares == squares[:, :1, :, :1]).all() and len(np.unique(squares[0, 0, :, 0], axis=0)) > 30
    skin = np.array([150, 120, 90])  # the least red of the pictures
    assert (np.abs(stays.astype(int) - skin).max(axis=-1) < 30).any() and found["features"] == 6


def test_pictures_that_learning_was_given_are_the_default(run, clf, device, lab):
    rows = "\n".join(f"{number}.png,MEL" for number in range(4))
    (device / "own.csv").write_text(f"image,label\n{rows}\n")
    (device / "some").mkdir()
    for number in range(5):
        (device / "some" / f"{number}.png").write_bytes(lab.encoded(lab.photo(50, 40)))
    assert "no pictures were named" in one_sentence(run("contribute", "--features"), 1)
    remember_table(Home(run.home), Table(file=device / "own.csv"))
    assert dry(run)["features"] == 4
    remember_table(Home(run.home), Table(file=device / "some"))
    assert dry(run)["features"] == 5


def test_what_is_unfit_is_left_out_and_told(run, clf, lab):
    """docs/reference/picture-gate.md: such pictures teach nobody; a file that is none does not stop a folder."""
    (clf / "0.png").write_bytes(lab.encoded(np.full((40, 50, 3), 128, np.uint8)))  # grey and flat
    (clf / "1.png").write_bytes(b"rubbish")
    code, out, err = run("contribute", "--features", clf, "--json")
    found = json.loads(out)
    assert code == 0 and found["features"] == 4
    assert found["left_out"] == {
        "images": 2,
        "reasons": {"blur": 1, "dark_corners": 1, "not_skin": 1, "unsupported_format": 1},
    }
    assert "2 pictures give no feature (the picture is blurred: 1;" in err
    (clf / "2.png").write_bytes(b"rubbish")
    assert "at least 4 pictures must be good enough" in one_sentence(run("contribute", "--features", clf), 1)


def test_a_picture_as_large_as_the_taught_ones_gives_a_feature(run, clf, lab, live):
    """docs/decisions/0073: the network reads 24 px and learned from pictures of 20: `size` asks for 20 alone."""
    live.bundles["main", "all", 2] = bundle_of(lab, contrast_plan(), 2, TaughtPictures(side=20))
    assert run("sync", "--no-learn")[0] == 0
    for number in range(6):
        side = 20 if number else 19
        (clf / f"{number}.png").write_bytes(lab.encoded(lab.photo(side, side, (150 + 10 * number, 120, 90))))
    found = dry(run, clf)
    assert found["features"] == 5 and found["left_out"] == {"images": 1, "reasons": {"size": 1}}


def tell_more(live, monkeypatch):
    """The task with settings and with another phase: `live.settings`, `live.last`."""
    live.last, live.settings = None, {}
    told = type(live)._task

    def task(one, *words):
        found = TaskReply.from_payload(told(one, *words))
        return dataclasses.replace(found, phase=one.last or found.phase, settings=one.settings).to_payload()

    monkeypatch.setattr(type(live), "_task", task)


def test_never_more_than_a_bank_holds(run, clf, lab, live, monkeypatch):
    """docs/methods.md, FedCLF: n is at most K, 10 in this bundle, 4 where the federation says so."""
    for number in range(6, 14):
        (clf / f"{number}.png").write_bytes(lab.encoded(lab.photo(50, 40, (150 + 5 * number, 120, 90))))
    found = dry(run, clf)
    assert (found["images"], found["features"], found["arrays"]["features"]["shape"]) == (14, 10, [10, 128])
    assert found["left_out"]["images"] == 0
    tell_more(live, monkeypatch)
    live.settings = {"queue": 4}
    assert run("sync", "--no-learn")[0] == 0
    assert dry(run, clf)["features"] == 4


def test_nothing_is_encoded_that_the_owner_did_not_allow(run, clf):
    """docs/reference/sharing.md: refused before a picture is read, exit 3; a dry run says so and shows it."""
    assert run("policy", "deny", "features")[0] == 0
    shown = dry(run, clf)
    assert shown["policy"]["allowed"] is False and shown["policy"]["code"] == "not_allowed"
    (clf / "0.png").write_bytes(b"rubbish")
    assert "edgefl policy allow features" in one_sentence(run("contribute", "--features", clf), 3)
    assert run("policy", "allow", "features")[0] == run("policy", "limit", "--bytes-per-round", "100")[0] == 0
    assert "--bytes-per-round" in run("contribute", "--features", clf)[2]
    assert json.loads(run("status", "--json", "--offline")[1])["waiting"] == 0


def test_consent_withdrawn_holds_what_waits(run, clf, live):
    assert run("contribute", "--features", clf)[0] == 0
    run("policy", "deny", "features")
    code, out, _ = run("sync", "--no-learn", "--json")
    assert code == 3 and live.effects == []
    assert [(one["outcome"], one["code"]) for one in json.loads(out)["sent"]] == [("held", "not_allowed")]


def without_a_broadcast(live):
    live.round = 2


def over(live):
    live.state = "done"


def another_network(live):
    open_round(live, 2, **{"head.weight": np.ones((128, 4), np.float32)})


def another_method(live):
    live.state = "open"
    live.method, live.travels, live.tokens = "fedevprompt", ("maps",), 36


def another_method_untold(live):
    live.travels = ()  # an older coordinator does not tell what leaves


def last_exchange(live):
    live.state = "open"
    live.method, live.travels, live.tokens, live.last = "fedclf", ("features", "weights"), 0, "final"


def under_noise(live):
    live.last, live.settings = None, {"dp_noise": 0.5}


REFUSED = {
    without_a_broadcast: (1, "the round's broadcast, which holds the encoder's values, has not been fetched"),
    another_network: (1, "head.weight is of float32 (128, 4)"),
    over: (1, "uses no features"),
    another_method: (1, "learns fedevprompt, which uses no features"),
    another_method_untold: (1, "this bundle learns fedclf, but the federation learns fedevprompt"),
    last_exchange: (1, "uses no features"),
    under_noise: (1, "adds noise to features"),
}


def test_what_gives_no_features_is_one_sentence(run, clf, live, monkeypatch, lab):
    """Each is refused before a picture is read, and nothing waits. Noise (docs/methods.md, feature exchange): features
    without it would undo what the other sites pay for."""
    tell_more(live, monkeypatch)
    (clf / "0.png").write_bytes(b"rubbish")
    for change, (code, words) in REFUSED.items():
        change(live)
        run("sync", "--no-learn")
        assert words in one_sentence(run("contribute", "--features", clf), code), change.__name__
    live.settings = {}
    open_round(live, 3)
    run("sync", "--no-learn")
    plain = clf / "plain.edgefl"
    plain.write_bytes(bundle_of(lab, None, 2))
    assert "no encoder (encode.onnx)" in one_sentence(run("contribute", "--features", clf, "--model", plain), 1)
    live.line = "night"
    run("sync", "--no-learn")
    assert "fetch the federation's model with edgefl sync" in one_sentence(run("contribute", "--features", clf), 3)
    assert json.loads(run("outbox", "--json")[1])["items"] == []


def test_a_device_outside_a_federation_has_no_encoder(run, clf, tmp_path):
    result = run("contribute", "--features", clf, "--dry-run", "--home", tmp_path / "nobody")
    assert "trust" in result[2] or "federation" in result[2]
    assert result[0] in (1, 3)


@pytest.mark.parametrize("words", [(), ("--labels", "a.csv", "--features"), ("a.png", "--labels", "a.csv")])
def test_one_kind_at_a_time(run, words):
    code, out, err = run("contribute", *words)
    assert (code, out) == (2, "") and "--features" in err


def test_no_feature_is_offered_that_a_bundle_made_which_counts_no_more(run, clf, lab, after):
    """docs/security.md 2.6.5: its signer was removed while pictures were read: one sentence, and nothing waits."""
    after(3, PictureReader, "decode", lambda: remove_trusted(Home(run.home), lab.SIGNER.key_id))
    assert "no signer is trusted" in one_sentence(run("contribute", "--features", clf), 3)
    assert json.loads(run("outbox", "--json")[1])["items"] == []
