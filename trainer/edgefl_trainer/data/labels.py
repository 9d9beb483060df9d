"""Which training images keep their label: a share of each site and class, by lesion, nested.

Guarantees: the choice is a pure function of the seed, the site's name and its own training rows; whatever a share
chooses, a larger one chooses too; of a class with n images at least ceil(share · n) keep their label, and so at least
one; the images of a lesion keep or lose it together; tune, val and test rows are not touched.
Source: arXiv 2208.11278 section V-A ("the percentage of labeled data in the training set on each device"),
docs/methods.md 3.4.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from edgefl_trainer.data.federation import Federation
from edgefl_trainer.data.site_rows import Indices, SiteRows


def keep_labels(federation: Federation, share: float, seed: int, *, keep_images: bool = False) -> Federation:
    """Keep the labels of a share of each site's training images; the others get −1.

    The partition digest, which says who has which rows, stays.

    Args:
        share: of the training images of each class, in (0, 1].
        seed: of the ranking of lesions; equal seeds give nested choices.
        keep_images: images that lose their label become unlabelled rows of their site; else they are left out.

    Raises:
        ValueError: the share is not in (0, 1].
    """
    if not 0 < share <= 1:
        raise ValueError(f"the share of labels is {share}; allowed: above 0, at most 1")
    labels, sites = federation.labels.copy(), dict(federation.sites)
    for name, rows in federation.sites.items():
        if name in federation.held_out:
            continue  # trains in no case
        lesions = [federation.lesions[i] for i in rows.train]
        kept = labelled(lesions, federation.labels[rows.train], share, f"labels:{name}", seed)
        labels[rows.train[~kept]] = -1
        sites[name] = _without(rows, rows.train[~kept], keep_images=keep_images)
    return replace(federation, labels=labels, sites=sites)


def labelled(
    lesions: Sequence[str], targets: NDArray[np.int64], share: float, purpose: str, seed: int
) -> NDArray[np.bool_]:
    """Tell which of a site's training images keep their label, (n,).

    The lesions stand in the order of SHA-256(seed, purpose, lesion). Of each class the first of them are taken until
    ceil(share · n) of its n images have a label; a lesion whose images differ in class keeps or loses all of them.
    `share` is read as the decimal it prints as, so that 0.1 of 30 images is 3.
    """
    rank = {lesion: hashlib.sha256(f"{seed}\0{purpose}\0{lesion}".encode()).digest() for lesion in set(lesions)}
    order = sorted(range(len(lesions)), key=lambda i: (rank[lesions[i]], lesions[i]))
    chosen: set[str] = set()
    for label in np.unique(targets):
        members = [lesions[i] for i in order if targets[i] == label]
        wanted = math.ceil(Fraction(str(share)) * len(members))
        chosen.update(members[:wanted])
    return np.array([lesion in chosen for lesion in lesions], dtype=np.bool_)


def _without(rows: SiteRows, lost: Indices, *, keep_images: bool) -> SiteRows:
    """The rows of a site some of whose training rows have no label any more."""
    unlabelled = np.sort(np.concatenate([rows.unlabelled, lost])) if keep_images else rows.unlabelled
    return replace(rows, train=np.setdiff1d(rows.train, lost), unlabelled=unlabelled)
