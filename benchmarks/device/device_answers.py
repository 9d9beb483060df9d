"""What a device answers with a bundle of VQA-RAD: to the questions that its run held out, and about other pictures.

Each reported question of the bundle's site is asked with its own photograph, as `edgefl ask` does. Then a question is
asked about every picture of each site, and about photographs of skin, in colour and in grey: how many are answered.

    EDGEFL_DATA=DIR python -m benchmarks.device.device_answers RUN BUNDLE --trust PUB
"""

import io
import json
import os
import time
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import click
import numpy as np
from PIL import Image

from edgefl_client.scoring.asker import AskedPicture, Asker
from edgefl_export.int8.calibration import federation_of
from edgefl_protocol.bundle import load_bundle
from edgefl_protocol.envelopes.key_files import read_public_key
from edgefl_trainer.data import Federation
from edgefl_trainer.engine.models import open_run

RADIOLOGY, SKIN = "vqa_rad.zip", "ham10000_msk_200x150.zip"
EACH = 20  # every twentieth photograph of skin


def held_out(
    asker: Asker, federation: Federation, site: str, pictures: Mapping[str, AskedPicture]
) -> dict[str, object]:
    """Ask the reported questions of a site; count what is answered, rightly, and refused by which rule first."""
    assert federation.questions is not None
    rows = federation.sites[site].rows(federation.report_split)
    found = [
        (federation.classes[federation.labels[row]] if federation.labels[row] < len(federation.classes) else None,
         asker.ask_prepared(pictures[federation.lesions[row]], federation.questions.texts[row]))
        for row in rows.tolist()
    ]  # fmt: skip
    answered = [(right, one.answer) for right, one in found if one.answer is not None]
    yes = [one for right, one in answered if right == "yes"]
    return {
        "questions": len(found),
        "answered": len(answered),
        "rightly": sum(right == one for right, one in answered),
        "rightly_no": sum(right == one == "no" for right, one in answered),
        "no": sum(one == "no" for _, one in answered),
        "mean_confidence": float(np.mean([one.confidence for _, one in found if one.confidence is not None])),
        "with_70_to_80_percent": len(
            sure := [(right, one) for right, one in found if 0.7 <= (one.confidence or 0) < 0.8]
        ),
        "of_these_rightly": sum(right == one.answer for right, one in sure),
        "right_answer_is_no": sum(right == "no" for right, _ in answered),
        "right_answer_is_yes": len(yes),
        "of_these_no": yes.count("no"),
        "refused_first_for": Counter(one.refuse_reasons[0] for _, one in found if one.refused),
        "refused_for_light": sum("light" in one.refuse_reasons for _, one in found),
        "asked_and_denied": [
            federation.questions.texts[row]
            for row, (right, one) in zip(rows.tolist(), found, strict=True)
            if right == "yes" and one.answer == "no"
        ],
    }


def about_others(asker: Asker, kinds: Mapping[str, list[AskedPicture]], question: str) -> dict[str, object]:
    """Ask one question about pictures of each kind; count the answers, and those refused for their light."""
    told: dict[str, object] = {}
    for kind, pictures in kinds.items():
        found = [asker.ask_prepared(one, question) for one in pictures]
        told[kind] = {
            "pictures": len(found),
            "answered": sum(not one.refused for one in found),
            "refused_for_light": sum("light" in one.refuse_reasons for one in found),
        }
    return told


def skin(asker: Asker, archive: Path) -> dict[str, list[AskedPicture]]:
    """Read every twentieth photograph of skin, in colour and in grey."""
    found: dict[str, list[AskedPicture]] = {"skin": [], "skin in grey": []}
    with zipfile.ZipFile(archive) as opened:
        for name in sorted(one for one in opened.namelist() if one.endswith(".jpg"))[::EACH]:
            photo = Image.open(io.BytesIO(opened.read(name))).convert("RGB")
            found["skin"].append(asker.prepare(np.asarray(photo)))
            found["skin in grey"].append(asker.prepare(np.asarray(photo.convert("L").convert("RGB"))))
    return found


@click.command()
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("file", metavar="BUNDLE", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--trust", required=True, type=click.Path(path_type=Path), help="Public key of the signer.")
@click.option("--question", default="Is the heart enlarged?", show_default=True, help="Asked about every picture.")
def main(run_folder: Path, file: Path, trust: Path, question: str) -> None:
    """Print what a device answers with a BUNDLE that was made of RUN."""
    folder = Path(os.environ["EDGEFL_DATA"])
    bundle = load_bundle(file.read_bytes(), [read_public_key(trust).public], time.time_ns() // 1_000_000)
    asker, federation = Asker(bundle, threads=1), federation_of(open_run(run_folder))
    own = bundle.card.site or ""
    with zipfile.ZipFile(folder / RADIOLOGY) as opened:
        stored = {Path(name).name: name for name in opened.namelist()}
        names = sorted(set(federation.lesions))
        pictures = {one: asker.prepare(opened.read(stored[one.removeprefix("image:")])) for one in names}
    click.echo(json.dumps(held_out(asker, federation, own, pictures), indent=2))
    kinds: dict[str, list[AskedPicture]] = {}
    for name, site in federation.sites.items():
        for part in ("train", "tune", federation.report_split):
            shown = sorted({federation.lesions[row] for row in site.rows(part).tolist()})
            kinds[f"{name}, {part}"] = [pictures[one] for one in shown]
    click.echo(json.dumps({question: about_others(asker, kinds | skin(asker, folder / SKIN), question)}, indent=2))


if __name__ == "__main__":
    main()
