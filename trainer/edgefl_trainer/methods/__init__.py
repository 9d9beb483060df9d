"""Every federated method, by its name on the command line. A new method is one file and one line here."""

from edgefl_trainer.contract import Method
from edgefl_trainer.methods.fedavg import FedAvg
from edgefl_trainer.methods.fedevprompt import FedEvPrompt
from edgefl_trainer.methods.fedmae import FedMAE
from edgefl_trainer.methods.local import Local

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedevprompt": FedEvPrompt,
    "fedmae": FedMAE,
    "local": Local,
}

__all__ = ["METHODS"]
