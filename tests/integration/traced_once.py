"""A process that imports this traces, and so do its forks, only what no process of the tests has traced yet."""

import os
from pathlib import Path

from tests.shared import FOLDER, Shared

HELD = Shared(Path(os.environ[FOLDER])).traces()  # to the end of the process
HELD.__enter__()
