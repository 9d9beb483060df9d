"""The figures of a card, as its run states them: of the site and federation, and what is usual in its pictures."""

from collections.abc import Mapping
from typing import Any, Final

from edgefl_protocol.bundle.figures import LIVE

FEDERATION: Final = (
    "mean_balanced_accuracy", "std_balanced_accuracy", "worst_balanced_accuracy", "mean_accuracy", "worst_accuracy",
    "reported_rows",
)  # fmt: skip
USUAL: Final = {"refer_unlit_above": "unlit_above", "refer_light_outside": "light"}  # metric → of `calibration.json`


def card_metrics(summary: Mapping[str, Any], site: str, calibration: Mapping[str, Any]) -> dict[str, object]:
    """Return the site's figures with their intervals by lesion, the federation's means, and who taught the model.

    Args:
        summary: of the run; one of a live federation names it.
        calibration: of the site; a run from before it was measured does not say what is usual in its pictures.
    """
    found: dict[str, object] = {
        "site": dict(summary.get("sites", {}).get(site, {})),
        "federation": {name: summary[name] for name in FEDERATION if name in summary},
    }
    told = {"travels": "travels", LIVE: "federation"}
    found |= {metric: summary[name] for metric, name in told.items() if name in summary}
    return found | {metric: calibration[name] for metric, name in USUAL.items() if name in calibration}
