"""Why there is no figure or no interval, in words: a person who reads "undefined" asks for the reason."""

from collections.abc import Mapping
from typing import Any

HEAD_STAYS = "the head stays at the sites that train"


def without_head(site: Mapping[str, Any]) -> bool:
    """Tell whether a site has no model: it never trained, and no head reached it."""
    return bool(site.get("held_out")) and site.get("readout") is None and site.get("balanced_accuracy") is None


def why_undefined(site: Mapping[str, Any], rows: str) -> str:
    """Say why a site's figures are undefined.

    Args:
        rows: kind of the rows that results are reported on, `test` or `val`.
    """
    if not site["n_test"]:
        return f"no {rows} picture"
    return f"no model: {HEAD_STAYS}" if without_head(site) else "undefined"


def mean_without_interval(found: Mapping[str, Any]) -> list[str]:
    """Name the sites for which a mean over trained sites has no interval; a run from before kept one.

    Args:
        found: a summary, or a part of one; where it names no sites with intervals, nothing is known of them.
    """
    sites = found["sites"] if isinstance(found.get("sites"), Mapping) else {}
    judged = {
        name: site for name, site in sites.items() if site["balanced_accuracy"] is not None and not site.get("held_out")
    }
    lacking = without_interval(judged)
    return lacking if len(lacking) < len(judged) else []


def without_interval(sites: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Name the sites whose balanced accuracy has no interval, or one without width.

    A mean over them has none either: draws that never vary would count such a site as certain.
    """
    bounds = {name: site.get("balanced_accuracy_interval") for name, site in sites.items()}
    return sorted(name for name, pair in bounds.items() if pair is None or pair[0] == pair[1])
