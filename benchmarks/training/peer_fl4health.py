"""What a user of FL4Health writes to run FedAvg on pictures of their own: a client, a server, and how they are started.

Runs in FL4Health's environment, started by `peers.py`. Source: its `examples/basic_example`, without the checkpoints.

    python -m benchmarks.training.peer_fl4health server 127.0.0.1:9091 4 5 1 16
    python -m benchmarks.training.peer_fl4health client 127.0.0.1:9091 pictures.npz 0
"""

import sys
import time
from pathlib import Path
from typing import Any

import flwr as fl
import numpy as np
import torch
import torchvision
from fl4health.clients.basic_client import BasicClient
from fl4health.metrics import Accuracy
from fl4health.metrics.metric_aggregation import evaluate_metrics_aggregation_fn, fit_metrics_aggregation_fn
from fl4health.servers.base_server import FlServer
from fl4health.utils.parameter_extraction import get_all_model_parameters
from flwr.server.client_manager import SimpleClientManager
from flwr.server.strategy import FedAvg
from torch.utils.data import DataLoader, TensorDataset

CLASSES = 4
Config = dict[str, Any]
Loader = DataLoader[Any]


def network() -> torch.nn.Module:
    """The network of every client."""
    made: torch.nn.Module = torchvision.models.resnet18(num_classes=CLASSES)
    return made


class LesionClient(BasicClient):  # type: ignore[misc]  # not installed where types are checked
    """A site: its pictures, its loss and its optimiser."""

    def get_data_loaders(self, config: Config) -> tuple[Loader, Loader]:
        """Read the site's pictures."""
        found, site = np.load(self.data_path), self.client_name
        sets = [
            TensorDataset(torch.from_numpy(found[f"{split}-x-{site}"]), torch.from_numpy(found[f"{split}-y-{site}"]))
            for split in ("learn", "judge")
        ]
        return DataLoader(sets[0], config["batch_size"], shuffle=True), DataLoader(sets[1], config["batch_size"])

    def get_criterion(self, config: Config) -> torch.nn.Module:
        """The loss."""
        return torch.nn.CrossEntropyLoss()

    def get_optimizer(self, config: Config) -> torch.optim.Optimizer:
        """The optimiser, that of EdgeFL's fine-tuning."""
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def get_model(self, config: Config) -> torch.nn.Module:
        """The network."""
        return network().to(self.device)


def client(address: str, pictures: str, site: str) -> None:
    """Take part until the server ends."""
    one = LesionClient(Path(pictures), [Accuracy("accuracy")], torch.device("cpu"), client_name=site)
    fl.client.start_client(server_address=address, client=one.to_client())
    one.shutdown()


def server(address: str, sites: str, rounds: str, epochs: str, batch: str) -> None:
    """Average what the clients learn; say when each round begins and when the last one ends."""

    def told(number: int) -> Config:
        print("began", number, time.time(), flush=True)
        return settings(number)

    def settings(number: int) -> Config:
        return {"current_server_round": number, "local_epochs": int(epochs), "batch_size": int(batch)}

    count = int(sites)
    strategy = FedAvg(
        min_fit_clients=count,
        min_evaluate_clients=count,
        min_available_clients=count,
        on_fit_config_fn=told,
        on_evaluate_config_fn=settings,
        fit_metrics_aggregation_fn=fit_metrics_aggregation_fn,
        evaluate_metrics_aggregation_fn=evaluate_metrics_aggregation_fn,
        initial_parameters=get_all_model_parameters(network()),
    )
    one = FlServer(client_manager=SimpleClientManager(), fl_config=settings(0), strategy=strategy)
    fl.server.start_server(server=one, server_address=address, config=fl.server.ServerConfig(num_rounds=int(rounds)))
    print("ended", rounds, time.time(), flush=True)


if __name__ == "__main__":
    role, *words = sys.argv[1:]
    if role == "server":
        server(*words)
    else:
        client(*words)
