"""Every federated method, by its name on the command line. A new method is one file and one line here."""

from edgefl_trainer.methods.contract import Method
from edgefl_trainer.methods.fedmae import FedMAE

METHODS: dict[str, type[Method]] = {
    "fedmae": FedMAE,
}

__all__ = ["METHODS"]
