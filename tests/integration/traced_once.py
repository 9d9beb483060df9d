"""A process that imports this traces, and so do its forks, only what no process of the tests has traced yet."""

import gc
import os
from pathlib import Path

from tests.forks import GARBAGE
from tests.shared import FOLDER, Shared

HELD = Shared(Path(os.environ[FOLDER])).traces()  # to the end of the process
HELD.__enter__()
gc.collect()
gc.freeze()  # as in `tests/forks.py`: what was imported so far stays
gc.set_threshold(*GARBAGE)
