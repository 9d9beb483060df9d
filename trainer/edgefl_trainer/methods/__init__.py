"""Every federated method, by its name on the command line. A new one is one file and two lines here."""

from edgefl_trainer.contract import Method
from edgefl_trainer.methods.fedavg import FedAvg
from edgefl_trainer.methods.fedavgpers import FedAvgPers
from edgefl_trainer.methods.fedclf import FedCLF
from edgefl_trainer.methods.feddistill import FedDistill
from edgefl_trainer.methods.fedevprompt import FedEvPrompt
from edgefl_trainer.methods.fedmae import FedMAE
from edgefl_trainer.methods.fedmoco import FedMoCo
from edgefl_trainer.methods.fedpr import FedPR
from edgefl_trainer.methods.fedproto import FedProto
from edgefl_trainer.methods.fedprox import FedProx
from edgefl_trainer.methods.fedrotation import FedRotation
from edgefl_trainer.methods.fedsimclr import FedSimCLR
from edgefl_trainer.methods.fedvpt import FedVPT, FedVPTDeep
from edgefl_trainer.methods.finetune import FineTune
from edgefl_trainer.methods.head import Head
from edgefl_trainer.methods.local import Local
from edgefl_trainer.methods.local_cl import LocalCL
from edgefl_trainer.methods.p_pt import PPT
from edgefl_trainer.methods.pep_fedpt import PepFedPT
from edgefl_trainer.methods.pfedpg import PFedPG
from edgefl_trainer.methods.pfl_vqa import PflVQA
from edgefl_trainer.methods.random_init import RandomInit
from edgefl_trainer.methods.sgpt import SGPT

METHODS: dict[str, type[Method]] = {
    "fedavg": FedAvg,
    "fedavgpers": FedAvgPers,
    "fedclf": FedCLF,
    "feddistill": FedDistill,
    "fedevprompt": FedEvPrompt,
    "fedmae": FedMAE,
    "fedmoco": FedMoCo,
    "fedpr": FedPR,
    "fedprox": FedProx,
    "fedproto": FedProto,
    "fedrotation": FedRotation,
    "fedsimclr": FedSimCLR,
    "fedvpt": FedVPT,
    "fedvpt-deep": FedVPTDeep,
    "finetune": FineTune,
    "head": Head,
    "local": Local,
    "local-cl": LocalCL,
    "p-pt": PPT,
    "pep-fedpt": PepFedPT,
    "pfedpg": PFedPG,
    "pfl-vqa": PflVQA,
    "random-init": RandomInit,
    "sgpt": SGPT,
}

__all__ = ["METHODS"]
