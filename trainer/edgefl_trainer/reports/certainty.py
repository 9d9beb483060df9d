"""Whether a run's certainty means what it says, and what its threshold for referral costs."""

from edgefl_trainer.evaluate.calibration import MIN_ROWS
from edgefl_trainer.reports.blocks import (
    UNDEFINED,
    FactList,
    ReportBlock,
    ReportCell,
    ReportTable,
    Section,
    ShownPicture,
    Words,
    figure,
    found_at,
    plain,
    written,
)
from edgefl_trainer.reports.curves import DOTS_PER_INCH, MOST_PANELS, plot_reliability, plot_risk
from edgefl_trainer.reports.origins import shown_sites
from edgefl_trainer.reports.run_facts import RunFacts


def certainty_section(facts: RunFacts) -> Section | None:
    """Tell whether certainty means what it says, and what the threshold costs; None of a learned network."""
    if not facts.judged:
        return None
    summary = facts.summary
    curves = found_at(summary, ("curves",))
    blocks: list[ReportBlock] = []
    if isinstance(curves, dict) and (kept := {name: one for name, one in curves.items() if one}):
        shown = dict(sorted(kept.items())[:MOST_PANELS])
        some = "" if len(kept) <= MOST_PANELS else f" The first {MOST_PANELS} sites by name."
        blocks.append(
            ShownPicture(
                dots_per_inch=DOTS_PER_INCH,
                png=plot_reliability(shown),
                caption="Calibration: of pictures with a top probability of x, the share that is named rightly. On the "
                f"diagonal both agree; below it the model is too sure. Larger dots: more pictures.{some}",
            )
        )
        points = {name: facts.sites[name].get("referral") for name in shown}
        blocks.append(
            ShownPicture(
                dots_per_inch=DOTS_PER_INCH,
                png=plot_risk(shown, points),
                caption="Risk and coverage: wrong answers among the most certain pictures, by how many are answered. "
                "The dot is the threshold in force. A "
                f"curve that does not fall towards the left says that certainty tells nothing.{some}",
            )
        )
    else:
        blocks.append(Words(text="Curves of calibration and of risk are not recorded in this run."))
    blocks += _referral(facts)
    return Section(title="Certainty and referral", blocks=blocks)


def _referral(facts: RunFacts) -> list[ReportBlock]:
    summary, calibration = facts.summary, facts.run.calibration.get("sites", {})
    rows = []
    for name in shown_sites(facts):
        own = calibration.get(name)
        fitted = (
            plain(*(f"{own[key]:.3f}" for key in ("temperature", "refer_above")))
            if own
            else plain(UNDEFINED, UNDEFINED)
        )
        costs = [figure(summary, ("sites", name, "referral", key)) for key in ("referred", "error")]
        answered = facts.sites[name].get("accuracy")
        wrong = ReportCell(UNDEFINED if answered is None else written(1 - answered, "share"))
        rows.append([ReportCell(name), *fitted, *costs, wrong])
    blocks: list[ReportBlock] = [
        ReportTable(
            head=("site", "temperature", "refers above", "referred", "wrong among the rest", "wrong among all"),
            rows=rows,
            caption="Above this uncertainty (vacuity; of methods without evidence, entropy) a picture is referred to a "
            "doctor. Threshold and temperature were fitted on tune rows: the threshold aims at no more than 10 % wrong "
            f"among the rest, and where that cannot be reached, half are referred. A site with fewer than {MIN_ROWS} "
            "tune rows has neither: its temperature is 1, and hardly anything is above its threshold. What they cost "
            "is measured on reported rows, by this rule alone.",
        )
    ]
    told = [(name, ReportCell(text)) for name, text in sorted(facts.suspicion.items())[:MOST_PANELS]]
    if told:
        blocks += [
            Words(text="A device refers suspicious classes beside that, by a threshold of their own:"),
            FactList(rows=told),
        ]
    return blocks
