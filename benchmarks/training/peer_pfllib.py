"""What a user of PFLlib writes to run its FedAvg on pictures of their own: the files that its `main.py` reads.

Runs in PFLlib's environment, started by `peers.py`. Source: its README, "Add a dataset": `dataset/NAME/train/N.npz` and
`test/N.npz` hold the pictures `x` and classes `y` of client N.

    python -m benchmarks.training.peer_pfllib pictures.npz dataset/lesions
"""

import sys
from pathlib import Path

import numpy as np


def main(pictures: str, folder: str) -> None:
    """Write the sites of `pictures` below `folder`."""
    found = np.load(pictures)
    for split, name in (("learn", "train"), ("judge", "test")):
        place = Path(folder) / name
        place.mkdir(parents=True)
        for site in range(int(found["sites"])):
            client = {"x": found[f"{split}-x-{site}"], "y": found[f"{split}-y-{site}"]}
            with (place / f"{site}.npz").open("wb") as file:
                np.savez_compressed(file, data=np.asarray(client, dtype=object))


if __name__ == "__main__":
    main(*sys.argv[1:])
