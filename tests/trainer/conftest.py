"""Drawn federations on disk, the command line in this process, and a few finished runs that several tests read."""

import contextlib
import io
import json
import os
import re
import sys
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from tests.forks import Forks
from tests.shared import Shared

TINY = ("--preset", "tiny", "--image-px", "36", "--device", "cpu")
MAE = ("--set", "batch=8", "--set", "decoder_width=32")


@dataclass(frozen=True)
class Outcome:
    """What a command left on the two streams, and its exit status."""

    code: int
    out: str
    err: str

    def json(self) -> dict:
        assert self.code == 0, self.err
        return json.loads(self.out)

    def sentence(self) -> str:
        """The one sentence of a known failure: last line of stderr, nothing on stdout, no traceback."""
        assert "Traceback" not in self.err, self.err
        assert self.out == "", self.out
        line = self.err.rstrip("\n").splitlines()[-1]
        assert line.startswith("edgefl-train: "), self.err
        return line.removeprefix("edgefl-train: ")


def edgefl_train(*arguments: object) -> Outcome:
    """`edgefl-train …` in this process, on one thread: the same exit status and streams as the console command."""
    from edgefl_trainer.cli import main

    out, err = io.StringIO(), io.StringIO()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    code = 0
    try:
        with (
            mock.patch.object(sys, "argv", ["edgefl-train", *map(str, arguments)]),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            main()
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        torch.set_num_threads(threads)
    return Outcome(code, out.getvalue(), err.getvalue())


def write_picture(path: Path, shade: float, seed: int, px: int = 36) -> None:
    """Noise around a shade of grey, as PNG or JPEG by the name's ending."""
    pixels = np.random.default_rng(seed).normal(shade, 30, (px, px, 3)).clip(0, 255)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def make_ward(root: Path, counts: Mapping[str, Mapping[str, int]], seed: int = 0) -> Path:
    """`SITE/CLASS/NN.png` or `.jpg`; the place of a class among all class names sets its shade.

    Args:
        root: folder to fill.
        counts: images of each class at each site.
        seed: other seed, other pictures.
    """
    classes = sorted({label for site in counts.values() for label in site})
    for s, (site, labels) in enumerate(sorted(counts.items())):
        for label, count in labels.items():
            for i in range(count):
                shade = 80 + 90 * classes.index(label) / max(1, len(classes) - 1)
                number = 10_000 * seed + 1000 * s + 100 * classes.index(label) + i
                write_picture(root / site / label / f"{i:02d}.{'jpg' if i % 3 == 0 else 'png'}", shade, number)
    return root


def write_index(root: Path, records: Sequence[Mapping[str, str]]) -> Path:
    """A manifest `index.csv` and a picture for each record that lies where it says."""
    columns = list(records[0])
    lines = [",".join(columns), *(",".join(record[column] for column in columns) for record in records)]
    root.mkdir(parents=True, exist_ok=True)
    (root / "index.csv").write_text("\n".join(lines) + "\n")
    for i, record in enumerate(records):
        write_picture(root / record["file"], 60 + 100 * (i % 2), i)
    return root


def rad_entries(pictures: int = 6, each: int = 4, first: int = 0) -> list[dict[str, Any]]:
    """Questions as VQA-RAD's files hold them: of each organ some pictures, of each picture `each` questions.

    Every second question is closed; its answer follows from the picture's shade, that of an open one from the organ.
    """
    return [
        {
            "qid": first + 1000 * o + each * p + q,
            "image_name": f"{organ.lower()}{first + p}.png",
            "image_organ": organ,
            "question": f"Is the picture number {q} bright?" if q % 2 == 0 else f"Which organ is on view {q}?",
            "answer": ("no", "yes")[p % 2] if q % 2 == 0 else organ.title(),
            "answer_type": "OPEN" if q % 2 else "CLOSED",
            "question_type": "ORGAN" if q % 2 else "PRES",
            "phrase_type": "freeform",
        }
        for o, organ in enumerate(("HEAD", "CHEST", "ABD"))
        for p in range(pictures)
        for q in range(each)
    ]


def write_rad(path: Path, pictures: Collection[str] = (), **lists: Sequence[Mapping[str, Any]]) -> Path:
    """A zip as VQA-RAD's: `trainset=…` and `testset=…` are lists of questions, `pictures` the names of PNG files."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, entries in lists.items():
            archive.writestr(f"{name}.json", json.dumps(entries))
        for i, name in enumerate(sorted(pictures)):
            stream = io.BytesIO()
            shade = 60 + 130 * (int(re.findall(r"\d+", name)[0]) % 2)
            pixels = np.random.default_rng(i).normal(shade, 20, (36, 36, 3)).clip(0, 255)
            Image.fromarray(pixels.astype(np.uint8)).save(stream, "PNG")
            archive.writestr(f"images/{name}", stream.getvalue())
    return path


def pictures_of(entries: Sequence[Mapping[str, Any]]) -> set[str]:
    return {entry["image_name"] for entry in entries}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """PyTorch on one thread: sums in one order, so that equal steps give equal bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """timm's hub without a connection: its vision transformers, small, with weights and positions of N(0, 0.3)."""
    import timm

    plain = timm.create_model

    def create(name: str, *, pretrained: bool, **options: Any) -> torch.nn.Module:
        network = plain(name, pretrained=False, patch_size=12, embed_dim=64, depth=2, num_heads=2, **options)
        draw = torch.Generator().manual_seed(7)
        for value in network.parameters() if pretrained else ():
            torch.nn.init.normal_(value, std=0.3, generator=draw)
        return network

    monkeypatch.setattr(timm, "create_model", create)


@pytest.fixture(scope="session")
def train() -> Callable[..., Outcome]:
    return edgefl_train


@pytest.fixture(scope="session")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Decoded pictures go to a folder of this session."""
    with mock.patch.dict(os.environ, {"EDGEFL_CACHE": str(tmp_path_factory.mktemp("cache"))}):
        yield


@pytest.fixture(scope="session")
def ward(shared: Shared, cached: None) -> str:
    """Two sites with two classes: the SPEC of a `folder:`."""
    counts = {"east": {"nevus": 10, "other": 10}, "west": {"nevus": 12, "other": 8}}
    return f"folder:{shared.made('ward', lambda folder: make_ward(folder / 'pictures', counts)) / 'pictures'}"


@pytest.fixture(scope="session")
def mae(shared: Shared, ward: str) -> Path:
    """A finished `fedmae` run of two rounds."""

    def make(folder: Path) -> None:
        words = ("run", "fedmae", "--data", ward, "--out", folder / "run", "--backbone", "tiny")
        outcome = edgefl_train(*words, *TINY, *MAE)
        assert outcome.code == 0, outcome.err

    return shared.made("mae", make) / "run"


@pytest.fixture(scope="session")
def finished(shared: Shared, ward: str, mae: Path) -> Mapping[str, Path]:
    """Finished runs on that backbone, by method."""
    methods = ("local", "fedavg", "fedevprompt")

    def make(root: Path) -> None:
        for method in methods:
            words = ("run", method, "--data", ward, "--out", root / method, "--backbone", f"run:{mae}")
            outcome = edgefl_train(*words, *TINY, "--json")
            assert outcome.code == 0, outcome.err

    root = shared.made("finished", make)
    return {method: root / method for method in methods}


@pytest.fixture
def real_data() -> Path:
    """The folder with the real images."""
    named = os.environ.get("EDGEFL_DATA")
    if not named:
        pytest.skip("EDGEFL_DATA is not set: no real images")
    return Path(named)


COLOURS = {"red": (200, 40, 40), "green": (40, 200, 40), "blue": (40, 40, 200)}


def coloured(i: int, rng: np.random.Generator) -> tuple[Image.Image, list[tuple[str, str, str, str]]]:
    """A picture of one colour, and two questions about it: text, answer, whether open, and what is asked for."""
    names = list(COLOURS)
    colour = names[i % 3]
    pixels = rng.normal(COLOURS[colour], 25, (36, 36, 3)).clip(0, 255).astype(np.uint8)
    other = colour if (i // 3) % 2 else names[(i + 1 + (i // 6) % 2) % 3]
    questions = [
        ("what colour is it", colour, "OPEN", "COLOR"),
        (f"is it {other}", "yes" if other == colour else "no", "CLOSED", "PRES"),
    ]
    return Image.fromarray(pixels), questions


def make_slake(root: Path, counts: Mapping[str, int], *, test: int = 0, seed: int = 0) -> Path:
    """The same pictures in SLAKE's layout, by `location`: `test` of each stand in `test.json`."""
    rng = np.random.default_rng(seed)
    lists: dict[str, list[dict]] = {"train.json": [], "test.json": []}
    number = 0
    for location, count in counts.items():
        for i in range(count + test):
            picture, questions = coloured(i, rng)
            folder = root / f"imgs/xmlab{number}"
            folder.mkdir(parents=True)
            picture.save(folder / "source.jpg")
            about = {"img_id": number, "img_name": f"xmlab{number}/source.jpg", "location": location, "q_lang": "en"}
            for question, answer, kind, asked in questions:
                found = lists["train.json" if i < count else "test.json"]
                given = {"question": question, "answer": answer, "answer_type": kind, "content_type": asked.title()}
                found.append({"qid": len(found), "modality": "CT", "base_type": "vqa", **about, **given})
            number += 1
    for file, found in lists.items():
        (root / file).write_text(json.dumps(found))
    return root


def make_asked(
    root: Path, counts: Mapping[str, int], *, test: int = 0, seed: int = 0, words: Mapping[str, str] | None = None
) -> Path:
    """Coloured pictures in VQA-RAD's layout, by organ: two questions about each, which the picture alone answers.

    Open: which colour, three answers. Closed: whether it is a colour, as often as not. So a model that does not look
    has a third of the open ones right and half of the closed ones.

    Args:
        counts: training pictures of each organ (HEAD, CHEST, ABD).
        test: test pictures of each organ; 0: no `testset.json`.
        words: what to ask in place of a question.
    """
    rng = np.random.default_rng(seed)
    lists: dict[str, list[dict]] = {"trainset.json": [], "testset.json": []}
    (root / "images").mkdir(parents=True, exist_ok=True)
    for organ, count in counts.items():
        for i in range(count + test):
            name = f"{organ.lower()}-{i:03d}.png"
            picture, questions = coloured(i, rng)
            picture.save(root / "images" / name)
            about = {"image_name": name, "image_organ": organ}
            for question, answer, kind, asked in questions:
                found = lists["trainset.json" if i < count else "testset.json"]
                given = {
                    "question": (words or {}).get(question, question),
                    "answer": answer,
                    "answer_type": kind,
                    "question_type": asked,
                }
                found.append({"qid": len(found), **about, **given})
    for file, found in lists.items():
        if found:
            (root / file).write_text(json.dumps(found))
    return root


@pytest.fixture(scope="session")
def asked(tmp_path_factory: pytest.TempPathFactory, cached: None) -> str:
    """Three sites whose pictures are asked questions: the SPEC of a `vqa-rad:`."""
    counts = {"HEAD": 14, "CHEST": 12, "ABD": 10}
    return f"vqa-rad:{make_asked(tmp_path_factory.mktemp('asked'), counts, test=6)}"


def records(**changes: str) -> list[dict[str, str]]:
    """Twelve rows at two sites; `changes` replaces values of row 5."""
    rows = [
        {
            "image": f"i{i}",
            "file": f"pictures/i{i}.png",
            "label": ("NV", "MEL")[i % 2],
            "center": ("east", "west")[i // 6],
            "split": "train" if i % 6 < 4 else "test",
        }
        for i in range(12)
    ]
    rows[5] = {**rows[5], **changes}
    return rows


def run(method: str, data: str, out: Path, backbone: str, *more: object):
    return edgefl_train("run", method, "--data", data, "--out", out, "--backbone", backbone, *TINY, *more)


@pytest.fixture(scope="session")
def kill_after(cached: None, forks: Forks) -> Callable[..., None]:
    """`kill_after("phase-0000/east.metrics.json", "run", …)` starts a command; it dies once that file is on disk."""

    def run(file: str, *arguments: object) -> None:
        words = ["edgefl-train", *map(str, arguments)]
        done = forks.run(words, Path.cwd(), os.environ, kill_after=file)
        assert done.returncode == -9, f"the command ended with {done.returncode} before {file} was there: {done.stderr}"

    return run
