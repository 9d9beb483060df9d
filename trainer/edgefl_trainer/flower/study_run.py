"""A process that makes one run of a study with its sites on Flower's simulation, begun by `experiments.crews`.

Guarantees: those of `experiments.one_run`; Ray is started for the run and ends with it.
"""

from edgefl_trainer.experiments.one_run import main
from edgefl_trainer.flower.simulation import on_simulation

if __name__ == "__main__":
    main(on_simulation)
