"""What a finished run learned from, read again and numbered as the run numbered it.

A site of a live federation, or of Flower, learned with the classes, answers and words of all sites: its own data alone
would number them otherwise, and may lack some that its task names.
"""

from edgefl_trainer.data import DataError, Federation
from edgefl_trainer.data.class_numbers import in_classes
from edgefl_trainer.data.partitions.partition import PARTITION_FILE, read_partition
from edgefl_trainer.data.questions import Vocabulary
from edgefl_trainer.engine.models import FinishedRun
from edgefl_trainer.engine.sites import load_data


def own_data(run: FinishedRun) -> Federation:
    """Return the very rows of a run, each in the split it had: what learned and what did not.

    Args:
        run: its data is read from where it learned, dealt by its partition where it had one.

    Raises:
        DataError: the data is gone or has changed.
        RunError: the run's words are damaged.
    """
    path = run.folder / PARTITION_FILE
    partition = read_partition(path) if path.exists() else None
    vocabulary = None if run.questions is None else Vocabulary(run.classes, run.questions)
    found = load_data(run.settings, run.backbone.spec.image_px, partition, whole_task=False, vocabulary=vocabulary)
    found = in_classes(found, run.classes, whose="the run", advice="put the data back as the run learned from it")
    if found.partition_sha256 != run.summary.get("partition_sha256", found.partition_sha256):
        raise DataError("its rows have changed since the run began")
    return found
