"""The scorer or the asker of a device: its bundle read, verified and loaded, with what was learned here if anything."""

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from edgefl_client.home import Home
    from edgefl_client.scoring.asker import Asker
    from edgefl_client.scoring.personal import PersonalState
    from edgefl_client.scoring.scorer import Scorer
    from edgefl_client.trust.vouched_bundle import VouchedBundle
    from edgefl_protocol.bundle import Bundle


def open_scorer(
    home: "Home",
    model: Path | None,
    trusted: tuple[str, ...],
    threads: int | None,
    refer_above: float | None,
    weights: str | None = None,
    *,
    keep_graphs: bool = False,
) -> "tuple[Scorer, VouchedBundle]":
    """Open the scorer and its verified bundle, which tells whether it still counts.

    Args:
        model: a bundle's file; None for the one in use.
        refer_above: threshold of uncertainty; None for the card's.
        weights: `bundle` or `personal`; None for the personal ones where there are some.
        keep_graphs: whether the bundle keeps the bytes of its graphs; the scorer needs them no more.

    Raises:
        click.UsageError: no picture could exceed the threshold.
        BundleError: it is refused, or answers questions (`other_kind`).
        StorageError: it cannot be read, or there are no personal values (`no_personal`).
    """
    vouched = _verified(home, model, trusted, "edgefl_client.scoring.scorer")
    from edgefl_client.scoring.network import without_graphs
    from edgefl_client.scoring.scorer import Scorer, refuse_questions, unfit_threshold

    bundle = vouched.bundle
    refuse_questions(bundle)
    if (unfit := unfit_threshold(bundle, refer_above)) is not None:
        raise click.UsageError(f"--refer-above {unfit}")
    personal = None if weights == "bundle" else _personal(home, bundle, required=weights == "personal")
    scorer = Scorer(bundle, threads, refer_above, personal=personal)
    return scorer, vouched if keep_graphs else replace(vouched, bundle=without_graphs(bundle))


def open_asker(
    home: "Home", model: Path | None, trusted: tuple[str, ...], threads: int | None
) -> "tuple[Asker, Bundle]":
    """Open the asker and its verified bundle.

    Args:
        model: a bundle's file; None for the one in use.

    Raises:
        BundleError: it is refused, or answers no questions (`other_kind`).
        StorageError: it cannot be read.
    """
    bundle = _verified(home, model, trusted, "edgefl_client.scoring.asker").bundle
    from edgefl_client.scoring.asker import Asker
    from edgefl_client.scoring.network import without_graphs

    return Asker(bundle, threads), without_graphs(bundle)


def open_either(
    home: "Home", model: Path | None, trusted: tuple[str, ...], threads: int | None
) -> "tuple[Scorer | Asker, Bundle]":
    """Open scorer or asker, whichever a bundle is for, and its verified bundle; as `open_scorer` and `open_asker`."""
    bundle = _verified(home, model, trusted, "edgefl_client.scoring.scorer").bundle
    from edgefl_client.scoring.asker import Asker
    from edgefl_client.scoring.network import without_graphs
    from edgefl_client.scoring.scorer import Scorer

    if bundle.questions is not None:
        return Asker(bundle, threads), without_graphs(bundle)
    personal = _personal(home, bundle, required=False)
    return Scorer(bundle, threads, personal=personal), without_graphs(bundle)


def _verified(home: "Home", model: Path | None, trusted: tuple[str, ...], needed: str) -> "VouchedBundle":
    """Read and verify a bundle; `needed` is the module that runs it, loaded with its libraries meanwhile."""
    import importlib
    import time
    from concurrent.futures import ThreadPoolExecutor

    from edgefl_client.memory import map_large_blocks_apart
    from edgefl_client.trust import models

    map_large_blocks_apart()
    # numpy's linear algebra is not used here, yet its threads would start with it and spin on the other processors.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Reading and hashing the bundle and loading the libraries take about as long, and the first needs the interpreter
    # little: on two processors the one hides the other.
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(models.read_file, home, model)
        importlib.import_module(needed)
        from edgefl_client.trust import trusted_keys as signers

        extra = [signers.read_public_key(pub).public for pub in trusted]
        archive = reading.result()
    from edgefl_client.trust.vouched_bundle import VouchedBundle

    return VouchedBundle(models.open_model(home, archive, extra, time.time_ns() // 1_000_000), home, extra)


def _personal(home: "Home", bundle: "Bundle", *, required: bool) -> "PersonalState | None":
    """Load the values learned here for this bundle; nothing of learning is loaded where nothing was learned."""
    if not required and not home.learning.exists():
        return None
    from edgefl_client.scoring.personal import load_personal

    return load_personal(home, bundle, required=required)
