"""Why a site has no figure, in words: a person who reads "undefined" asks for the reason."""

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
