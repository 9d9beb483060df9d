"""The labels of some data, numbered by the classes of those who learn together, or of a model that is to judge it."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgefl_protocol.sentences import listed
from edgefl_trainer.data.errors import DataError
from edgefl_trainer.data.federation import Federation
from edgefl_trainer.data.site_rows import pictures_digest
from edgefl_trainer.data.tasks import class_name


def in_classes(
    federation: Federation, classes: Sequence[str], *, whose: str, advice: str, kind: type[DataError] = DataError
) -> Federation:
    """Number the labels of the rows by these classes, of which the data may lack some; a label below 0 stays.

    Args:
        federation: the data; its partition digest, which says who has which rows, stays where the classes are spelled
            alike, and is that of the spelling in `classes` else.
        classes: names, in whichever form of Unicode they were kept; a label becomes the place of its class in them.
        whose: whose classes these are, such as `the federation`, where the data has another one.
        advice: what to do then.
        kind: of the error that says so.

    Raises:
        DataError: of that kind: the data has a class that is not among them.
    """
    # a name as it is goes first: an earlier version could keep one in both forms, as two classes
    places = {class_name(name): place for place, name in enumerate(classes)}
    places |= {name: place for place, name in enumerate(classes)}
    unknown = [name for name in federation.classes if name not in places]
    if unknown:
        raise kind(f"the data has the class {unknown[0]!r}, but {whose}'s classes are {listed(classes)}: {advice}")
    index = np.array([*(places[name] for name in federation.classes), -1], dtype=np.int64)
    labels = np.where(federation.labels < 0, federation.labels, index[federation.labels])
    found = replace(federation, classes=tuple(classes), labels=labels)
    if all(name in classes for name in federation.classes):
        return found
    digest = pictures_digest(found.sites, found.names, found.classes, labels, found.held_out)
    return replace(found, partition_sha256=digest)
