"""Why a picture or a prompt helps an answer, or does not, in four measurements that need no round of learning.

`held`: what a network's features hold of a picture: balanced accuracy of a logistic regression that names its site,
five folds by picture, beside the picture at 12 × 12 pixels. `worded`: how far the words of training questions alone
tell their answers, and what a picture adds to a yes or no, where whole pictures or single questions are held out.
`asked`: of the rows that a finished run learned from, tuned on and held out, the questions answered rightly with their
own picture and with another one's (docs/methods.md 11.4). `prompted`: of a finished run's reported questions, the
answers that change where no token reads a prompt, the gates, and the round of each model: one of round 1 has met no
other site's prompt (11.2). Then cosines and eta of the prompts that lie on the server together after the last round.

    python -m benchmarks.causes.asked_pictures held --data vqa-rad:vqa_rad.zip
    python -m benchmarks.causes.asked_pictures worded --data vqa-rad:vqa_rad.zip
    python -m benchmarks.causes.asked_pictures asked runs/vqa-rad/organs/local/seed-0
    python -m benchmarks.causes.asked_pictures prompted runs/vqa-rad/organs/pfl-vqa/seed-0
    python -m benchmarks.causes.asked_pictures prompted --last-round runs/vqa-rad/organs/pfl-vqa/seed-0
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from edgefl_trainer.contract import Predictor
    from edgefl_trainer.data import Federation
    from edgefl_trainer.engine.models import FinishedRun
    from edgefl_trainer.models.cnn import Backbone

FOLDS = 5
SMALL = 12  # side of the small picture
COMPONENTS = 16  # of words, and of a picture


def site_probes(networks: "Mapping[str, Backbone]", federation: "Federation") -> dict[str, float]:
    """Return the balanced accuracy of naming a picture's site, by what it is named from."""
    import numpy as np
    import torch
    from PIL import Image
    from sklearn.model_selection import StratifiedKFold

    from edgefl_trainer.contract import Examples
    from edgefl_trainer.learning.features import frozen_features
    from edgefl_trainer.learning.linear_probe import linear_probe

    sites = federation.sites.values()
    rows = [np.concatenate([site.train, site.tune, site.rows(federation.report_split)]) for site in sites]
    places = [np.unique(federation.places(one)) for one in rows]
    images = federation.images[np.concatenate(places)]
    target = np.repeat(np.arange(len(places)), [len(one) for one in places])
    shown = Examples(images, target, np.arange(len(images)))
    small = [np.asarray(Image.fromarray(one).resize((SMALL, SMALL)), np.float32).ravel() for one in images]
    features: dict[str, Any] = {f"{SMALL} x {SMALL} pixels": np.stack(small)}
    for name, network in networks.items():
        features[name] = frozen_features(network, shown, torch.device("cpu"))["mean"]
    folds = list(StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(images, target))

    def mean_over_folds(found: Any) -> float:
        figures = [linear_probe(found[fit], target[fit], found[rest], target[rest]) for fit, rest in folds]
        return float(np.mean([one for one in figures if one is not None]))

    return {name: mean_over_folds(found) for name, found in features.items()}


def by_picture(run: "FinishedRun") -> Iterator[dict[str, Any]]:
    """Yield for each site and kind of rows its questions, and how many are answered rightly with which picture."""
    import torch

    from edgefl_trainer.engine.sites import examples_of, load_data
    from edgefl_trainer.evaluate.looking import other_picture
    from edgefl_trainer.learning.learners.answer_rows import answer_rows

    federation = load_data(run.settings, run.backbone.spec.image_px)
    for site in run.sites:
        predictor = run.predictor(site)
        for kind in ("train", "tune", federation.report_split):
            rows = examples_of(federation, federation.sites[site].rows(kind))
            other = other_picture(predictor, rows, federation.lesions)
            if other is None:
                continue
            named = answer_rows(predictor, rows, torch.device("cpu"))["probabilities"].argmax(axis=1)
            yield {
                "site": site,
                "rows": kind,
                "questions": len(rows),
                "own_picture": int((named == rows.targets).sum()),
                "other_picture": other.right,
                "share_lost_interval": [other.low, other.high],
            }


def without_prompts(run: "FinishedRun", last_round: bool = False) -> Iterator[dict[str, Any]]:
    """Yield for each site its model's round and gates, and how many answers change with gates of 0.

    The model is the kept one; with `last_round` that of the last round, which the checkpoints hold.
    """
    import numpy as np
    import torch

    from edgefl_trainer.engine.sites import examples_of, load_data
    from edgefl_trainer.learning.learners.answer_rows import answer_rows

    federation = load_data(run.settings, run.backbone.spec.image_px)
    for site in run.sites:
        predictor = _of_last_round(run, site) if last_round else run.predictor(site)
        kept = run.summary["sites"][site].get("selected_round", run.settings.rounds)
        number = run.settings.rounds if last_round else kept
        rows = examples_of(federation, federation.sites[site].rows(federation.report_split))
        gates = {name: value for name, value in predictor.tensors.items() if name.endswith(".gate")}
        shut = replace(predictor, tensors={**predictor.tensors, **{name: np.zeros_like(gates[name]) for name in gates}})
        own, bare = (answer_rows(one, rows, torch.device("cpu"))["logits"].argmax(axis=1) for one in (predictor, shut))
        yield {
            "site": site,
            "round": number,
            "met_another_prompt": number > 1,
            "questions": len(rows),
            "gates": [round(float(value), 4) for _, value in sorted(gates.items())],
            "changed_without_prompts": int((own != bare).sum()),
            "right": int((own == rows.targets).sum()),
            "right_without_prompts": int((bare == rows.targets).sum()),
        }


def _of_last_round(run: "FinishedRun", site: str) -> "Predictor":
    """What the site scores with had it kept its last round; a `RunError` where the checkpoints lack a tensor.

    The temperature stays that of the kept model: it changes no answer.
    """
    from edgefl_trainer.engine.checkpoint import Checkpoints
    from edgefl_trainer.errors import RunError

    checkpoints, kept = Checkpoints(run.folder / "checkpoints"), run.predictor(site)
    arrays: dict[str, Any] = dict(checkpoints.load_state(checkpoints.progress().sites[site]).arrays)
    lacking = sorted(kept.tensors.keys() - arrays.keys() - {"temperature"})
    if lacking:
        raise RunError(f"{run.folder} holds no {', '.join(lacking)} of the last round.")
    return replace(kept, tensors={name: arrays.get(name, value) for name, value in kept.tensors.items()})


def last_exchange(run: "FinishedRun") -> Iterator[dict[str, Any]]:
    """Yield the cosine between the prompts of two sites on the server after the last round, then each site's eta."""
    import numpy as np

    from edgefl_trainer.engine.checkpoint import Checkpoints
    from edgefl_trainer.methods.pfl_vqa import PflVQA, exchange_weights

    method, checkpoints = run.settings.build_method(), Checkpoints(run.folder / "checkpoints")
    if not isinstance(method, PflVQA):
        return
    state = checkpoints.load_state(checkpoints.progress().server)
    accuracies = {site: float(state.values[f"accuracy.{site}"]) for site in run.sites}
    names = method.recipe.prompt_names
    prompts = {
        site: np.concatenate([state.arrays[f"{name}.{site}"].ravel() for name in names]).astype(np.float64)
        for site in run.sites
    }
    for one, other in combinations(run.sites, 2):
        lengths = np.linalg.norm(prompts[one]) * np.linalg.norm(prompts[other])
        yield {"prompts_of": [one, other], "cosine": round(float(prompts[one] @ prompts[other] / lengths), 5)}
    for site in run.sites:
        weights = exchange_weights(accuracies, prompts, site, method.exchange)
        yield {"shared_prompt_of": site, "eta": {name: round(value, 4) for name, value in weights.items()}}


def wordings(federation: "Federation") -> Iterator[dict[str, Any]]:
    """Yield for each site how far the words of its training questions alone tell their answers."""
    from edgefl_protocol.rules.questions import words_of

    assert federation.questions is not None
    texts = federation.questions.texts
    for name, site in federation.sites.items():
        answers: dict[tuple[str, ...], Counter[int]] = {}
        for row in site.train:
            answers.setdefault(words_of(texts[row]), Counter())[int(federation.labels[row])] += 1
        judged = site.rows(federation.report_split)
        known = set(federation.labels[site.train].tolist())
        yield {
            "site": name,
            "pictures": len(set(federation.places(site.train).tolist())),
            "questions": len(site.train),
            "worded_once": sum(1 for found in answers.values() if found.total() == 1),
            "told_by_words": sum(max(found.values()) for found in answers.values()),
            "judged": len(judged),
            "judged_with_an_answer_of_the_site": sum(label in known for label in federation.labels[judged].tolist()),
        }


def yes_or_no(network: "Backbone", federation: "Federation") -> Iterator[dict[str, Any]]:
    """Yield the accuracy of a logistic regression on all yes/no questions of the data, five folds.

    It reads which words stand in a question; then also the site; then also the products of the principal components
    of words and of the network's features. Nothing is drawn: the components are those of the full decomposition.
    """
    import numpy as np
    import torch
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GroupKFold, KFold, cross_val_predict
    from sklearn.preprocessing import StandardScaler

    from edgefl_trainer.contract import Examples
    from edgefl_trainer.learning.features import frozen_features

    assert federation.questions is not None
    classes, labels = list(federation.classes), federation.labels
    rows = np.flatnonzero(np.isin(labels, [classes.index("no"), classes.index("yes")]))
    target, places = labels[rows] == classes.index("yes"), federation.places(rows)
    tokens = federation.questions.tokens[rows]
    words = np.stack([np.isin(np.arange(2, tokens.max() + 1), one) for one in tokens]).astype(np.float64)
    sites = [
        set(np.concatenate([one.train, one.tune, one.val, one.test]).tolist()) for one in federation.sites.values()
    ]
    site = np.array([[row in known for known in sites] for row in rows.tolist()], np.float64)
    every = Examples(federation.images, np.zeros(len(federation.images), np.int64), np.arange(len(federation.images)))
    features = StandardScaler().fit_transform(frozen_features(network, every, torch.device("cpu"))["mean"])
    seen, asked = (PCA(min(COMPONENTS, *one.shape), svd_solver="full").fit_transform(one) for one in (features, words))
    products = StandardScaler().fit_transform((seen[places][:, :, None] * asked[:, None, :]).reshape(len(rows), -1))
    read = {"words": words, "words, site": np.hstack([words, site])}
    read["words, site, words x picture"] = np.hstack([words, site, 0.3 * products])
    cuts = {
        "pictures": list(GroupKFold(FOLDS).split(rows, groups=places)),
        "questions": list(KFold(FOLDS, shuffle=True, random_state=0).split(rows)),
    }
    for name, given in read.items():
        for unit, cut in cuts.items():
            found = cross_val_predict(LogisticRegression(C=0.1, max_iter=3000), given, target, cv=cut)
            share = round(float(np.mean(found == target)), 3)
            yield {"from": name, "folds_of": unit, "questions": len(rows), "accuracy": share}


@click.group()
def main() -> None:
    """Measure what a picture adds to an answer."""


@main.command("held")
@click.option("--data", multiple=True, required=True, metavar="SPEC", help="Data SPEC; may be repeated.")
@click.option("--backbone", multiple=True, default=("derm-vit-tiny-84", "vit:192x12/12"), help="Network; repeatable.")
@click.option("--image-px", default=84, show_default=True, metavar="PX", help="Side of the square images.")
def held_command(data: tuple[str, ...], backbone: tuple[str, ...], image_px: int) -> None:
    """Probe what networks hold of pictures; an untrained one stands beside."""
    from edgefl_trainer.data import load_federation
    from edgefl_trainer.models.backbones import load_backbone

    networks = {name: load_backbone(name, image_px=image_px, seed=0) for name in backbone}
    for name, figure in site_probes(networks, load_federation(data, image_px=image_px)).items():
        click.echo(json.dumps({"from": name, "balanced_accuracy": round(figure, 3)}))


@main.command("asked")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
def asked_command(runs: tuple[Path, ...]) -> None:
    """Ask finished runs each question with another picture too; a line for each run, site and kind of rows."""
    from edgefl_trainer.engine.models import open_run

    for folder in runs:
        for line in by_picture(open_run(folder)):
            click.echo(json.dumps({"run": str(folder), **line}))


@main.command("prompted")
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--last-round", is_flag=True, help="Ask the models of the last round, not those that were kept.")
def prompted_command(runs: tuple[Path, ...], last_round: bool) -> None:
    """Ask finished runs without their prompts; a line for each run and site, then what the server last exchanged."""
    from edgefl_protocol.errors import EdgeflError
    from edgefl_trainer.engine.models import open_run

    for folder in runs:
        run = open_run(folder)
        try:
            for line in chain(without_prompts(run, last_round), last_exchange(run)):
                click.echo(json.dumps({"run": str(folder), **line}))
        except EdgeflError as error:
            raise click.ClickException(str(error)) from error


@main.command("worded")
@click.option("--data", multiple=True, required=True, metavar="SPEC", help="Data SPEC with questions; may be repeated.")
@click.option("--backbone", default="derm-vit-tiny-84", show_default=True, help="Network.")
@click.option("--image-px", default=84, show_default=True, metavar="PX", help="Side of the square images.")
def worded_command(data: tuple[str, ...], backbone: str, image_px: int) -> None:
    """Ask how far words alone tell the answers, and what a picture adds to a yes or no."""
    from edgefl_trainer.data import load_federation
    from edgefl_trainer.models.backbones import load_backbone

    federation = load_federation(data, image_px=image_px)
    network = load_backbone(backbone, image_px=image_px, seed=0)
    for line in chain(wordings(federation), yes_or_no(network, federation)):
        click.echo(json.dumps(line))


if __name__ == "__main__":
    main()
