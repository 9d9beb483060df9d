"""Results as a person reads them in a terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from edgefl_protocol.bundle.shown_map import why_no_map
from edgefl_protocol.pictures.score import Score
from edgefl_protocol.pictures.wording import class_title, in_brief, on_white, suspicious_words, uncertainty_words
from edgefl_protocol.sentences import counted, listed, of_file
from edgefl_trainer.engine.privacy.spent import privacy_lines
from edgefl_trainer.evaluate.answer_figures import PARTS, USUAL
from edgefl_trainer.evaluate.chance import Chance, chance_of
from edgefl_trainer.evaluate.no_round import part_lines
from edgefl_trainer.evaluate.one_class import (
    FEWER,
    FEWER_SAYS,
    MARK,
    SAYS,
    beside,
    is_one_class,
    mark_of,
    mean_of,
    others,
)
from edgefl_trainer.evaluate.undefined import mean_without_interval, why_undefined, without_interval

_INTERVAL = "balanced_accuracy_interval"


def summary_text(summary: Mapping[str, Any]) -> str:
    """Write the figures of `summary.json`, a line for each site."""
    lines = [f"{summary['method']} · task {summary['task']} · seed {summary['seed']} · {summary['seconds']:.0f} s"]
    lines += part_lines(summary)
    if summary.get("probe"):
        lines += [
            f"linear probe on tune rows, readout {name}: balanced accuracy {_pct(found['mean'])} as a mean of sites, "
            f"{_pct(found['pooled'])} over all their rows together{_probe_without(found)}"
            for name, found in summary["probe"].items()
        ]
    elif summary["mean_balanced_accuracy"] is not None:
        lines += site_lines(summary)
    lines += privacy_lines(summary)
    if "maps" in summary.get("travels", ()) and summary["rounds"] == 1:
        lines.append(
            "one round: sites have sent their maps, but none has come back yet; from round 2 on they learn from them"
        )
    up, down = summary["bytes_up_per_round"], summary["bytes_down_per_round"]
    lines.append(f"bytes in a round: {up:,.0f} up, {down:,.0f} down · state {summary['state_sha256'][:16]}")
    return "\n".join(lines)


def site_lines(summary: Mapping[str, Any]) -> list[str]:
    """Write the balanced accuracy of each site, then mean, spread and worst; of answers how many are right."""
    if USUAL in summary:
        return answer_lines(summary)
    lines = [f"{'site':<18}{'train':>7}{_column(summary):>7}   balanced accuracy, 95 % interval"]
    tuned, marks = summary.get("select") in ("tune", "pooled"), set()
    for name, site in summary["sites"].items():
        chosen = f"   round {site['selected_round']}" if "selected_round" in site and tuned else ""
        chosen = "   final phase" if site.get("selected_phase") == "final" else chosen
        chosen = "   held out" if site.get("held_out") else chosen
        mark = mark_of(site, len(summary.get("classes") or ())) if site["balanced_accuracy"] is not None else ""
        marks.add(mark)
        figure = f"{_pct(site['balanced_accuracy'])}{mark}{_interval_of(site, 'balanced_accuracy')}"
        if site["balanced_accuracy"] is None:
            figure = why_undefined(site, summary["reported_rows"])
        lines.append(f"{name:<18}{site['n_train']:>7}{site['n_test']:>7}   {figure}{chosen}")
    chance, without = chance_of([summary], "balanced_accuracy"), _without(summary["sites"])
    told = "" if chance.mean is None else f", chance {_pct(chance.mean)}"
    lines.append(f"{_mean_and_worst(summary)}{'' if without else told}")  # chance is of the sites of the other mean
    lines += [f"{line}{told}" for line in without]
    lines += _by_chance(summary["sites"], chance)
    lines += [f"{FEWER} {FEWER_SAYS}"] if FEWER in marks else []
    lines += _recall(summary)
    for way, found in summary.get("further", {}).items():
        lines.append(f"further answers, {way.replace('_', ' ')}: {_mean_and_worst(found)}")
    apart = summary.get("held_out")
    if apart and apart["mean_balanced_accuracy"] is None:
        lines.append("held-out sites: none has a figure")
    elif apart:
        lines.append(f"held-out sites: {_mean_and_worst(apart)}")
    for source, found in summary.get("ood", {}).items():
        area = "undefined" if found["mean_auroc"] is None else f"{found['mean_auroc']:.3f}"
        lines.append(f"{found['images']} foreign pictures of {source}: AUROC of the uncertainty {area}, mean of sites")
    return lines


def _by_chance(sites: Mapping[str, Mapping[str, Any]], chance: Chance) -> list[str]:
    """Name the sites whose interval reaches down to what an answer that never changes gets; no line where none does.

    Of a site without an interval, or with one without width, the figure itself is compared, in a line of its own.
    """
    apart = without_interval({name: sites[name] for name in chance.sites})
    guessed: dict[str, list[str]] = {"by its interval": [], "without an interval": []}
    for name, least in chance.sites.items():
        alone = name in apart
        if (sites[name]["balanced_accuracy"] if alone else sites[name][_INTERVAL][0]) <= least:
            guessed["without an interval" if alone else "by its interval"].append(name)
    return [f"balanced accuracy not above chance, {how}: {', '.join(names)}" for how, names in guessed.items() if names]


def _mean_and_worst(found: Mapping[str, Any]) -> str:
    """The mean over sites with its interval, how far sites lie apart, and the worst; of one site no spread."""
    std = found.get("std_balanced_accuracy")
    spread = "" if std is None else f" ± {_pct(std)} (std over sites)"
    worst = _pct(found["worst_balanced_accuracy"])
    return f"mean {_pct(found['mean_balanced_accuracy'])}{spread}{_between(found)}, worst {worst}"


def _between(found: Mapping[str, Any]) -> str:
    """The interval of a mean, or the sites without which it has none; nothing where no site has one."""
    if lacking := mean_without_interval(found):
        return f", no interval: {listed(lacking)} {'has' if len(lacking) == 1 else 'have'} none"
    interval = found.get(f"mean_{_INTERVAL}")
    return "" if interval is None or interval[0] == interval[1] else f", 95 % interval{_interval(interval)}"


def is_judged_whole(summary: Mapping[str, Any]) -> bool:
    """Tell whether `evaluate` judged every labelled row of its sites; False for a run's own summary."""
    judged = sum(int(site["n_test"]) for site in summary["sites"].values())
    return "labelled" in summary and int(summary["labelled"]) == judged


def judged_words(summary: Mapping[str, Any]) -> str:
    """Say which rows `evaluate` judged: all, whatever their split is called, or those of a split."""
    if not is_judged_whole(summary):
        return f"{summary['reported_rows']} rows"
    what = "question" if USUAL in summary else "picture"
    return f"all {counted(summary['labelled'], what)}"


def _column(summary: Mapping[str, Any]) -> str:
    """The head of the column that counts the judged rows of each site."""
    return "judged" if is_judged_whole(summary) else str(summary["reported_rows"])


def not_judged(summary: Mapping[str, Any], data: Sequence[str] = ()) -> list[str]:
    """Say how many rows of the judged sites were left out, and what has them judged; nothing where none was.

    `data` are the SPECs: a column `split` is a table's alone.
    """
    rows, judged = summary["labelled"], sum(site["n_test"] for site in summary["sites"].values())
    manifest = any(text.startswith("manifest:") for text in data)
    what, how = "pictures", " In a manifest, a column split that says test has all of them judged" * manifest
    if USUAL in summary:
        what, how = "questions", " A file of questions that is named with @split=test is judged whole"
    if judged == rows:
        return []
    return [f"{rows - judged:,} of {rows:,} {what} are not judged: they are no `{summary['reported_rows']}` rows.{how}"]


def answer_lines(summary: Mapping[str, Any]) -> list[str]:
    """Write the share of right answers of each site: of all questions, of open and of closed ones; then mean and worst.

    Beside it stands the share of the usual answer, which reads neither picture nor question.
    """
    head = f"{'site':<18}{'train':>7}{_column(summary):>7}"
    lines = [f"{head}   {'accuracy, 95 % interval':<23}{'open':>10}{'closed':>10}{'usual':>12}"]
    for name, site in summary["sites"].items():
        whole = f"{_pct(site['accuracy'])}{_interval_of(site, 'accuracy', 'pictures')}"
        whole = whole if site["n_test"] else f"no {summary['reported_rows']} question"
        beside = "".join(f"{_pct(site.get(f'accuracy{part}')):>10}" for part in PARTS[1:])
        usual = _pct(site.get(USUAL, {}).get("accuracy"))
        lines.append(f"{name:<18}{site['n_train']:>7}{site['n_test']:>7}   {whole:<23}{beside}{usual:>12}")
    for which in ("mean", "worst"):
        all_, *parts = (_pct(summary[f"{which}_accuracy{part}"]) for part in PARTS)
        usual = _pct(summary[USUAL][f"{which}_accuracy"])
        lines.append(f"{which} {all_}, open {parts[0]}, closed {parts[1]}; usual answer {usual}")
    return lines


def _without(sites: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the mark says, and the mean of the trained sites without it; nothing where no site is marked."""
    if not any(site["balanced_accuracy"] is not None and is_one_class(site) for site in sites.values()):
        return []
    apart = others({name: site for name, site in sites.items() if not site.get("held_out")})
    if not apart:
        return [f"{MARK} {SAYS}"]
    return [f"{MARK} {SAYS}; left out of the {beside(_pct(apart['mean_balanced_accuracy']), apart['sites'])}"]


def _probe_without(found: Mapping[str, Any]) -> str:
    """The mean of a probe without the sites of one class, as a clause; nothing where there is none."""
    if not (marked := found.get("one_class")):
        return ""
    mean, number = mean_of(figure for name, figure in found["sites"].items() if name not in marked)
    return f" ({', '.join(marked)}: one class only, says nothing; {beside(_pct(mean), number)})"


def map_lines(summary: Mapping[str, Any]) -> list[str]:
    """Say how true each map is, in a line for each site and map; none where that was not measured.

    Shares of answers that change: the marked quarter hidden, a random one; all but it hidden, all but a random one.
    """
    from edgefl_trainer.evaluate.map_truth import LEAST_EFFECT

    if not summary.get("maps"):
        return []
    lines = [
        "",
        "a map is better than chance where hiding the quarter that it marks changes more answers than hiding a random "
        f"quarter: at least {LEAST_EFFECT:.0%} of the answers more, with mean colour and with blur, and the 95 % "
        "intervals of this difference and of the advantage lie above 0",
        "each figure is the share of answers that change when a part of the picture is hidden: `marked`, the quarter "
        "that the map marks; `the rest`, all but that quarter. It is hidden under the picture's mean colour, or under "
        "a blur. In brackets: the same with a random quarter in place of the marked one",
        f"{'':<28}{'mean colour':>28}{'blur':>28}",
        f"{'site':<16}{'map':<12}" + f"{'marked':>14}{'the rest':>14}" * 2 + "  advantage (95 %)",
    ]
    for name, found in summary["maps"].items():
        for kind, one in found["maps"].items():
            effects = [one["hidden"][way] for way in ("mean", "blur")]
            shares = [(e["marked"], e["random"], e["kept"], e["kept_random"]) for e in effects]
            cells = [f"{pair[0]:.0%} ({pair[1]:.0%})" for four in shares for pair in (four[:2], four[2:])]
            gain = one["advantage"]
            told = f"{gain['value']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})"
            told += "" if one["better_than_chance"] else ", not better than chance"
            if (lesion := one["in_lesion"]) is not None:
                told += f"; {lesion['marked']:.0%} of it in the lesion ({lesion['chance']:.0%} of the picture)"
            lines.append(f"{name:<16}{kind:<12}" + "".join(f"{cell:>14}" for cell in cells) + f"  {told}")
        said = found["shown"]
        why = "" if said["shown"] else why_no_map(said["why"], found["pictures"])
        what = f"no map: {why}" if why else f"{said['kind']}; measured on {counted(found['pictures'], 'picture')}"
        lines.append(f"{name:<16}a device shows {what}")
    return lines


def _recall(summary: Mapping[str, Any]) -> list[str]:
    """The recall of each class over the rows of all sites but held-out ones; nothing where it was not kept."""
    from edgefl_trainer.evaluate.confusion import pooled_matrix, recall_lines

    found = summary.get("confusion")
    if not found:
        return []
    known = summary.get("pooled", {}).get("recall_interval")
    head = "recall of each class, all sites together" + ("" if known is None else ", 95 % interval by lesion")
    return [head, *recall_lines(pooled_matrix(found), summary["classes"], known, summary["reported_rows"])]


def _interval_of(site: Mapping[str, Any], metric: str, drawn: str = "lesions") -> str:
    """A site's interval, or why there is none: rows that are all right, or all wrong, do not vary when drawn.

    `drawn` is what the draws of the interval are made of.
    """
    bounds = site.get(f"{metric}_interval")
    if bounds is None or bounds[0] < bounds[1]:
        return _interval(bounds)
    why = {0.0: "all are wrong", 1.0: "all are right"}.get(site[metric], f"all draws of its {drawn} give the same")
    return f" (no interval: {why})"


def _interval(bounds: Sequence[float] | None) -> str:
    return "" if bounds is None else f" ({100 * bounds[0]:.1f} to {100 * bounds[1]:.1f})"


def score_line(found: Score | Mapping[str, Any]) -> str:
    """Write one image's score in one line, or why it has none."""
    if not isinstance(found, Score):
        return of_file(found["image"], found["error"]["message"])
    shown = ", ".join(f"{name} {value:.2f}" for name, value in found.probabilities.items())
    said = [
        f"{_named(found)} ({shown}, {uncertainty_words(found)})",
        *filter(None, [suspicious_words(found)]),
        in_brief(found),
        *filter(None, [on_white(found)]),
    ]
    return f"{found.image}: {' · '.join(said)}"


def _named(score: Score) -> str:
    """Name the class; none where one that the site has never seen is more probable than all that it can name."""
    if "unseen_class" in score.refer_reasons and score.judged:
        likeliest = max(score.probabilities, key=score.probabilities.__getitem__)
        site = score.model.id.rpartition("/")[2]
        return f"no class named: it looks most like {class_title(score, likeliest)}, which site {site} has never seen"
    return "no prediction" if score.predicted is None else class_title(score, score.predicted)


def _pct(value: float | None) -> str:
    return "undefined" if value is None else f"{100 * value:.1f} %"
