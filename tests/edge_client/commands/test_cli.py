"""The command line as a user meets it: results, sentences, exit codes."""

import csv
import io
import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edgefl_protocol.pictures.class_info import known_among
from edgefl_protocol.pictures.suspicious import Suspicion

KEYS = {
    "image", "predicted", "probabilities", "evidence", "vacuity", "dissonance", "entropy_nats", "refer",
    "refer_reasons", "heatmap", "model", "milliseconds", "predicted_name", "malignancy", "suspicious_probability",
    "suspicious_from", "rules_tried", "exposure", "light", "suspicious_rule", "vacuity_from", "dissonance_from",
    "entropy_from", "heatmap_fall", "transparent", "learned_from", "suspicious_tried", "turned_suspicious_probability",
    "learned_from_federation",
}  # fmt: skip
FRAMEWORKS = ("torch", "timm", "onnx", "torchvision", "safetensors")
SELDOM = Suspicion(
    threshold=0.9, sensitivity=0.95, specificity=0.5, suspicious=20, benign=20, statement="chosen by a test"
)


def test_one_json_object_per_picture_in_order(run, files):
    """docs/design.md, section 5: JSON Lines, errors among them; the others still score; exit 1."""
    names = ["good.png", "text.jpg", "missing.png", "photo.JPG", "cut.png"]
    code, out, err = run("score", *names, "--model", "model.edgefl", "--trust", "signing.pub", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert [line["image"] for line in lines] == names
    assert set(lines[0]) == set(lines[3]) == KEYS
    for failed in (lines[1], lines[2], lines[4]):
        assert set(failed) == {"image", "error"}
        assert set(failed["error"]) == {"code", "message"}
    assert [failed["error"]["code"] for failed in (lines[1], lines[2])] == ["unsupported_format", "missing"]
    assert "3 of 5 pictures" in err
    assert run("score", "good.png", "--model", "model.edgefl", "--trust", "signing.pub")[0] == 0


def test_a_bundle_from_before_class_information_always_asks_for_a_look(run, files, lab):
    """docs/reference/scores.md: nothing says which of its classes are benign; standard error says so once."""
    (files / "old.edgefl").write_bytes(lab.bundle_bytes(info=None))
    options = ("score", "good.png", "photo.JPG", "--model", "old.edgefl", "--trust", "signing.pub")
    code, out, err = run(*options, "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and [line["refer_reasons"][0] for line in lines] == ["suspicious_class"] * 2
    assert err.count("does not say which of its classes are benign") == 1
    assert run(*options)[1].count("asks for a look at every picture") == 2


def test_a_predicted_class_that_is_not_benign_asks_for_a_look(run, files, lab):
    """Whatever the model believes of itself: with the product's own table MEL and BCC ask, NV does not."""
    bias = np.array([-3.0, -1.0, -4.0], np.float32)
    options = {"info": known_among(lab.CLASSES), "head__bias": bias}
    (files / "known.edgefl").write_bytes(lab.bundle_bytes(suspicion=SELDOM, **options))
    # So much evidence for a nevus that the others do not reach a third.
    calm = {**options, "head__bias": np.array([-3.0, 9.0, -4.0], np.float32)}
    (files / "calm.edgefl").write_bytes(lab.bundle_bytes(suspicion=SELDOM, **calm))
    (files / "default.edgefl").write_bytes(lab.bundle_bytes(**options))
    (files / "red.png").write_bytes(lab.encoded(lab.photo(60, 40, (250, 140, 130))))
    (files / "pale.png").write_bytes(lab.encoded(lab.photo(60, 40, (190, 190, 150))))
    options = ("--trust", "signing.pub", "--model", "known.edgefl")
    _, out, err = run("score", "red.png", "pale.png", *options, "--json")
    found = {line["predicted"]: line["refer_reasons"] for line in map(json.loads, out.splitlines())}
    assert set(found) == {"MEL", "NV"}
    assert "suspicious_class" in found["MEL"] and "suspicious_class" in found["NV"]  # more than a third together
    assert "no threshold for suspicious classes" not in err
    said = run("score", "red.png", *options)[1]
    assert "Melanoma (MEL)" in said and "the predicted class is malignant" in said
    said = run("score", "pale.png", *options[:-1], "calm.edgefl")[1]
    assert "no rule asks for a look" in said and "that is no all-clear" in said and "no reason" not in said
    assert "together, most probable Melanoma (MEL)" in said
    _, out, err = run("score", "pale.png", *options[:-1], "default.edgefl", "--json")
    assert "by default they ask for a look from 10% together" in err
    told = json.loads(out)
    assert told["predicted"] == "NV" and told["suspicious_probability"] >= told["suspicious_from"] == 0.10
    assert told["refer_reasons"] == ["suspicious_class"] and told["suspicious_rule"] == "default"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e999", "-0.1"])
def test_a_threshold_that_is_no_finite_number_is_a_usage_error(run, files, value):
    """docs/design.md, section 5: 2 for usage."""
    options = ("--model", "model.edgefl", "--trust", "signing.pub", "--refer-above", value)
    assert run("score", "good.png", *options)[0] == 2


def test_csv_has_the_same_numbers(run, files):
    options = ("good.png", "text.jpg", "--model", "model.edgefl", "--trust", "signing.pub")
    _, out, _ = run("score", *options, "--json")
    value = json.loads(out.splitlines()[0])
    code, out, _ = run("score", *options, "--csv")
    good, bad = csv.DictReader(io.StringIO(out))
    assert code == 1
    assert float(good["probability.MEL"]) == value["probabilities"]["MEL"]
    assert float(good["evidence.NV"]) == value["evidence"]["NV"]
    assert float(good["vacuity"]) == value["vacuity"]
    assert (good["predicted"], good["refer"]) == (value["predicted"], "false")
    assert (good["predicted_name"], good["malignancy"]) == (value["predicted_name"], value["malignancy"])
    assert good["rules_tried"].split() == value["rules_tried"] and good["exposure"] == ""
    assert list(good)[-2:] == ["site", "learned_from_federation"] and good["learned_from_federation"] == ""
    assert good["site"] == value["model"]["site"] == "one" and bad["site"] == ""
    assert (bad["image"], bad["predicted"], bad["error_code"]) == ("text.jpg", "", "unsupported_format")
    assert [row["image"] for row in (good, bad) if row["refer"] != "false"] == [
        "text.jpg"
    ]  # as the page tells to filter


def test_a_folder_stands_for_its_pictures(run, files):
    folder = files / "batch"
    folder.mkdir()
    for name in ("b.png", "a.jpg", "notes.txt"):
        (folder / name).write_bytes((files / "good.png").read_bytes())
    code, out, _ = run("score", folder, "--model", "model.edgefl", "--trust", "signing.pub", "--json", "--batch", 1)
    assert code == 0
    assert [Path(json.loads(line)["image"]).name for line in out.splitlines()] == ["a.jpg", "b.png"]


def test_heat_maps_are_written_and_named(run, files, lab):
    (files / "sub").mkdir()
    (files / "sub" / "good.jpg").write_bytes(lab.encoded(lab.photo(70, 50)))
    options = ("--model", "model.edgefl", "--trust", "signing.pub", "--json", "--heatmap", "maps/today")
    code, out, _ = run("score", "good.png", "text.jpg", "sub/good.jpg", *options)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert lines[0]["heatmap"] != lines[2]["heatmap"]
    for line in (lines[0], lines[2]):
        with Image.open(line["heatmap"]) as drawn:
            assert drawn.format == "PNG"


def test_without_trust_nothing_runs(run, files, lab):
    """docs/design.md, section 5: exit 3, one sentence with the key's fingerprint, and both ways to trust it."""
    code, out, err = run("score", "good.png", "--model", "model.edgefl")
    assert (code, out) == (3, "")
    assert len(err.splitlines()) == 1
    assert lab.SIGNER.key_id in err
    assert "--trust PUB (`score` and `ask`: for this call; `use`: from now on), or run `edgefl trust add PUB`" in err
    assert not (files / "home").exists()  # never trust on first use: nothing was noted


def test_trust_add_list_remove(run, files, lab):
    code, out, _ = run("trust", "add", "signing.pub", "--name", "lab", "--json")
    assert (code, json.loads(out)["key_id"]) == (0, lab.SIGNER.key_id)
    assert run("score", "good.png", "--model", "model.edgefl")[0] == 0
    assert "lab" in run("trust", "list")[1]
    assert json.loads(run("trust", "list", "--json")[1])["keys"][0]["name"] == "lab"
    assert run("trust", "remove", "lab")[0] == 0
    assert run("score", "good.png", "--model", "model.edgefl")[0] == 3
    assert run("trust", "remove", "lab")[0] == 1
    assert run("trust", "add", "00" * 32)[0] == 3  # low order
    assert run("trust", "add", "nonsense")[0] == 1


@pytest.mark.parametrize("command", [("trust", "list"), ("status",), ("score", "good.png"), ("pull",)])
def test_a_home_that_is_no_folder_is_refused(run, files, monkeypatch, command):
    """A mistaken --home must not look like a device that trusts nobody."""
    code, out, err = run(*command, "--home", "good.png")
    assert (code, out) == (1, "")
    assert "good.png is not a folder" in err
    monkeypatch.setenv("EDGEFL_HOME", "good.png")
    assert run(*command)[0] == 1
    assert run("trust", "list", "--home", "nothing-yet")[0] == 0


def test_a_home_is_never_made_among_other_things(run, tmp_path):
    """A mistaken --home would be closed to everybody else, and keys would lie among a person's files."""
    papers = tmp_path / "papers"
    papers.mkdir(mode=0o755)
    (papers / "letter.txt").write_text("x")
    code, out, err = run("policy", "allow", "maps", "--home", papers)
    assert (code, out) == (1, "")
    assert f"{papers} holds letter.txt and nothing of a device; choose a new or empty folder with --home" in err
    assert [path.name for path in papers.iterdir()] == ["letter.txt"] and papers.stat().st_mode & 0o777 == 0o755
    (papers / "letter.txt").unlink()
    assert run("policy", "allow", "maps", "--home", papers)[0] == 0
    (papers / "letter.txt").write_text("x")  # beside what is a device's by now
    assert run("policy", "deny", "maps", "--home", papers)[0] == 0


@pytest.mark.parametrize("where", [0.1, 0.5, 0.9])
def test_a_flipped_byte_is_refused(run, files, where):
    """docs/security.md, check 27 at the command line: exit 3 and no score."""
    data = bytearray((files / "model.edgefl").read_bytes())
    data[int(len(data) * where)] ^= 1
    (files / "bad.edgefl").write_bytes(data)
    code, out, err = run("score", "good.png", "--model", "bad.edgefl", "--trust", "signing.pub")
    assert (code, out) == (3, "")
    assert len(err.splitlines()) == 1


def test_a_reader_that_leaves_is_no_crash(files):
    command = "from edgefl_client.cli import main; main()"
    arguments = ["score", *["good.png"] * 300, "--model", "model.edgefl", "--trust", "signing.pub", "--json"]
    with subprocess.Popen(
        [sys.executable, "-c", command, *arguments], cwd=files, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()
    assert process.returncode == 1


def test_ctrl_c_while_a_library_loads_is_no_crash(run, files, monkeypatch):
    """docs/design.md, section 5: never a traceback. A compiled library calls the interruption an error of its own."""

    def interrupted(*_):
        raise ImportError("initialization failed") from KeyboardInterrupt()

    monkeypatch.setattr("edgefl_client.commands.score.open_scorer", interrupted)
    code, _, err = run("score", "good.png", "--model", "model.edgefl", "--trust", "signing.pub")
    assert (code, err) == (1, "stopped\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_scores_that_cannot_be_printed_are_one_sentence(files):
    command = "from edgefl_client.cli import main; main()"
    arguments = ["score", "good.png", "--model", "model.edgefl", "--trust", "signing.pub", "--json"]
    with Path("/dev/full").open("wb") as out:
        done = subprocess.run(
            [sys.executable, "-c", command, *arguments],
            cwd=files, stdout=out, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("edgefl: standard output")


def test_expired_bundle_and_missing_files(run, files, lab):
    (files / "old.edgefl").write_bytes(lab.bundle_bytes(expires_ms=lab.NOW_MS + 1))
    assert run("score", "good.png", "--model", "old.edgefl", "--trust", "signing.pub")[0] == 3
    for arguments in (("--model", "none.edgefl"), ()):
        code, _, err = run("score", "good.png", *arguments)
        assert code == 1
        assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("score",),
        ("score", "a.png", "--json", "--csv"),
        ("score", "a.png", "--refer-above", "-1"),
        ("score", "a.png", "--batch", "0"),
        ("score", "a.png", "--weights", "mine"),
        ("score", "-", "-"),
        ("nonsense",),
        ("contribute",),
    ],
)
def test_usage_errors_exit_2(run, files, arguments):
    assert run(*arguments)[0] == 2


def test_threshold_changes_the_referral(run, files):
    options = ("score", "good.png", "--model", "model.edgefl", "--trust", "signing.pub", "--json")
    assert json.loads(run(*options)[1])["refer"] is False
    value = json.loads(run(*options, "--refer-above", "0.01")[1])
    assert (value["refer"], value["refer_reasons"]) == (True, ["vacuity"])


@pytest.mark.parametrize(("softmax", "most"), [(False, 0.999), (True, np.log(3))])
def test_a_threshold_that_nothing_can_exceed_is_a_usage_error(run, files, lab, softmax, most):
    """docs/reference/scores.md, "Referral": a vacuity of 0.999 or more, or an entropy of ln K, is no threshold."""
    (files / "model.edgefl").write_bytes(lab.bundle_bytes(softmax=softmax))
    options = ("score", "good.png", "--model", "model.edgefl", "--trust", "signing.pub", "--refer-above")
    for value in (7, 1.0986123 if softmax else 0.9995, 1.01 * most, most):
        code, out, err = run(*options, value)
        assert (code, out) == (2, "")
        assert f"--refer-above is {float(value)}; allowed for this model: 0 to below {most:g}" in err
        assert "leave it out for the model's own threshold" in err
    assert run(*options, most * 0.99)[0] == 0


def test_scoring_and_exchange_load_no_learning_framework(files):
    """docs/design.md, section 2: both import neither torch, timm nor onnx; scoring needs no network library."""
    code = (
        "import sys, edgefl_client.cli\n"
        "try: edgefl_client.cli.main(['score', 'good.png', '--model', 'model.edgefl', '--trust', 'signing.pub'])\n"
        "except SystemExit as left: assert left.code == 0\n"
        f"print(sorted({{'requests', 'sqlite3', *{FRAMEWORKS}}} & set(sys.modules)))\n"
        "import edgefl_client.sharing.enrolled_device\n"
        f"print(sorted({{*{FRAMEWORKS}}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=files, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-2:] == ["[]", "[]"]


def bombs(lab):
    png, png_chunk = lab.png, lab.png_chunk
    yield "pixels.png", png(30_000, 30_000, bytes(30_000 * 3751))
    yield "text.png", png(8, 8, bytes(16), png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(50_000_000), 9)))
    frames = png_chunk(b"acTL", struct.pack(">II", 100_000, 0))
    yield "frames.png", png(8, 8, bytes(16), frames)
    yield "fits.jpg", b"SIMPLE  =                    T" + bytes(5000)
    yield "eps.jpg", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
    yield "psd.jpg", b"8BPS\x00\x01" + bytes(500)
    yield "tiff.png", b"II*\x00\x08\x00\x00\x00" + bytes(200)
    yield "gif.png", b"GIF89a" + bytes(100)


def test_bombs_are_refused_one_by_one(run, files, lab):
    """docs/security.md, check 35: each refused, the good one still scored."""
    names = []
    for name, data in bombs(lab):
        (files / name).write_bytes(data)
        names.append(name)
    names.append("good.png")
    code, out, _ = run("score", *names, "--model", "model.edgefl", "--trust", "signing.pub", "--json")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert [("error" in line) for line in lines] == [True] * (len(names) - 1) + [False]


def test_mutated_pictures_give_a_score_or_one_error(lab, files, run):
    """docs/security.md, check 34: 300 mutated JPEG and PNG: each a score or one typed error."""
    rng = np.random.default_rng(34)
    detail = rng.integers(0, 256, (48, 64, 3)).astype(np.uint8)
    sources = [lab.encoded(detail, "JPEG"), lab.encoded(detail, "PNG"), lab.encoded(detail, "JPEG", progressive=True)]
    folder = files / "mutants"
    folder.mkdir()
    for number in range(300):
        data = bytearray(sources[number % 3])
        for _ in range(int(rng.integers(1, 6))):
            data[int(rng.integers(0, len(data)))] = int(rng.integers(0, 256))
        if number % 7 == 0:
            data = data[: int(rng.integers(1, len(data)))]
        (folder / f"{number:03d}.{'png' if number % 3 == 1 else 'jpg'}").write_bytes(data)
    code, out, _ = run("score", folder, "--model", "model.edgefl", "--trust", "signing.pub", "--json", "--threads", 1)
    lines = [json.loads(line) for line in out.splitlines()]
    assert len(lines) == 300
    assert all(set(line) == KEYS or set(line) == {"image", "error"} for line in lines)
    failed = sum("error" in line for line in lines)
    assert code == 1
    assert 0 < failed < 300


def test_a_disk_that_is_full_is_one_sentence(run, files, monkeypatch):
    """A heat map that cannot be written costs no score; a trust list that cannot is the command's error."""
    import errno

    from edgefl_protocol import durable

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(durable.os, "fsync", full)
    options = ("--model", "model.edgefl", "--trust", "signing.pub", "--json")
    code, out, err = run("score", "good.png", "photo.JPG", "--heatmap", "maps", *options)
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 1
    assert [(set(line), line["heatmap"]) for line in lines] == [(KEYS, None), (KEYS, None)]
    assert [line["predicted"] for line in lines] == [
        json.loads(line)["predicted"] for line in run("score", "good.png", "photo.JPG", *options)[1].splitlines()
    ]
    assert err.count("disk is full") == 2
    assert "good.png: no heat map" in err
    assert "could not be scored" not in err
    assert list((files / "maps").iterdir()) == []
    code, _, err = run("trust", "add", "signing.pub")
    assert code == 1
    assert "disk is full" in err
    assert len(err.splitlines()) == 1
