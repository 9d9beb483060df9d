"""The labels of some data, numbered by the classes of those who learn together, or of a model that is to judge it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgefl_protocol.sentences import listed
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.federation import Federation


def in_classes(
    federation: Federation, classes: Sequence[str], *, whose: str, advice: str, kind: type[DataError] = DataError
) -> Federation:
    """Number the labels of the rows by these classes, of which the data may lack some; a label below 0 stays.

    Args:
        federation: the data; its partition digest, which says who has which rows, stays.
        classes: names; a label becomes the place of its class in them.
        whose: whose classes these are, such as `the federation`, where the data has another one.
        advice: what to do then.
        kind: of the error that says so.

    Raises:
        DataError: of that kind: the data has a class that is not among them.
    """
    unknown = [name for name in federation.classes if name not in classes]
    if unknown:
        raise kind(f"the data has the class {unknown[0]!r}, but {whose}'s classes are {listed(classes)}: {advice}")
    labels, index = federation.labels, np.array([*map(classes.index, federation.classes), -1], dtype=np.int64)
    return replace(federation, classes=tuple(classes), labels=np.where(labels < 0, labels, index[labels]))
