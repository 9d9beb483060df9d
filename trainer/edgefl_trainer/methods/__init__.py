"""Every federated method, by its name on the command line. A new method is one file and one line here."""

from edgefl_trainer.contract import Method
from edgefl_trainer.methods.fedavg import FedAvg
from edgefl_trainer.methods.fedavgpers import FedAvgPers
from edgefl_trainer.methods.feddistill import FedDistill
from edgefl_trainer.methods.fedevprompt import FedEvPrompt
from edgefl_trainer.methods.fedmae import FedMAE
from edgefl_trainer.methods.fedproto import FedProto
from edgefl_trainer.methods.fedprox import FedProx
from edgefl_trainer.methods.local import Local

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedavgpers": FedAvgPers,
    "feddistill": FedDistill,
    "fedevprompt": FedEvPrompt,
    "fedmae": FedMAE,
    "fedprox": FedProx,
    "fedproto": FedProto,
    "local": Local,
}

__all__ = ["METHODS"]
