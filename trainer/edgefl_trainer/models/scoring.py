"""The one definition of a score: 8-bit image and trainable tensors in, probabilities, evidence, uncertainty, map out.

Guarantees: `edgefl-train predict` and `evaluate` run this module and the exported graph is traced from it, so a device
scores as the trainer does; everything after the backbone is float32; the tensors are arguments, never constants.

Sources: FedEvPrompt (arXiv 2411.10071) sections 3.1 and 3.2; docs/methods.md, prior, rollout and shown quantities.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from edgefl_trainer.models.cnn import Backbone, CNNOutput, FrozenCNN
from edgefl_trainer.models.head import (
    EvidenceKind,
    dirichlet_summary,
    discounted,
    dissonance,
    evidence_of,
    standardise,
    unusualness,
)
from edgefl_trainer.models.inserts import Insert, insert_from_json, insert_to_json
from edgefl_trainer.models.shown_maps import GraphMap, attention_map, graph_maps, patch_features, scaled, share_map
from edgefl_trainer.models.spec import Readout
from edgefl_trainer.models.vit import FrozenViT, PrefixPlace, ViTOutput
from edgefl_trainer.rollout import PrefixMode, travelling_map

Output = Literal["evidential", "softmax"]
"""`evidential`: a Dirichlet with evidence, vacuity and dissonance; `softmax`: probabilities only."""

EVIDENTIAL_OUTPUTS = ("probabilities", "evidence", "vacuity", "dissonance")
SOFTMAX_OUTPUTS = ("probabilities",)
BackboneOutput = ViTOutput | CNNOutput


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """Choices that are fixed in a scoring module.

    Attributes:
        readout: feature the head reads.
        output: evidential or softmax.
        evidence: evidence function, unused by softmax.
        head_norm: whether features are standardised by `features.mean` and `features.std` before the head.
        prompts: names of the prefix prompts in block order; empty for none.
        insert: prompt tokens in the sequence; None for none.
        prompted: for the readout `prompted`, how many prompt tokens it takes in.
        prefix_mode: what the map does with the columns of prompts.
        rollout_from: blocks at the input that the map leaves out.
        prefix: where prefix prompts join keys and values, after or before the projection.
        discount: whether evidence is taken away from features that are unusual at the site, unused by softmax.
    """

    readout: Readout = "cls"
    output: Output = "evidential"
    evidence: EvidenceKind = "softplus"
    head_norm: Literal["standardise", "none"] = "none"
    prompts: tuple[str, ...] = ("prompts.b", "prompts.t")
    insert: Insert | None = None
    prompted: int = 0
    prefix_mode: PrefixMode = "renormalise"
    rollout_from: int = 0
    prefix: PrefixPlace = "after"
    discount: Literal["none", "unusual"] = "none"

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors a score needs beside the image, in the order of the graph's inputs."""
        normal = ("features.mean", "features.std") if self.head_norm == "standardise" else ()
        prior = ("prior",) if self.output == "evidential" else ()
        usual = ("usual.mean", "usual.whitening") if self.discounts else ()
        inserted = self.insert.tensors if self.insert is not None else ()
        return (*self.prompts, *inserted, "head.weight", "head.bias", *normal, *prior, *usual, "temperature")

    @property
    def discounts(self) -> bool:
        """Whether evidence is discounted."""
        return self.discount == "unusual" and self.output == "evidential"

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what a score holds, in the order of the graph's outputs; a pooled feature has no map."""
        shown = EVIDENTIAL_OUTPUTS if self.output == "evidential" else SOFTMAX_OUTPUTS
        return shown if self.readout == "pooled" else (*shown, "map")


def options_to_json(options: ScoreOptions) -> dict[str, Any]:
    """Write the plain values that `options_from_json` reads back."""
    insert = None if options.insert is None else insert_to_json(options.insert)
    return {**asdict(options), "insert": insert}


def options_from_json(found: Mapping[str, Any]) -> ScoreOptions:
    """Read options from plain values; a `ValueError` for unknown prompt tokens, a `TypeError` for an unknown option."""
    insert = found.get("insert")
    read = {**found, "prompts": tuple(found["prompts"])}
    return ScoreOptions(**{**read, "insert": None if insert is None else insert_from_json(insert)})


class ScoreOutput(NamedTuple):
    """A scored batch: `probabilities` (B, K), `evidence` (B, K), `vacuity` (B,), `dissonance` (B,), `map` (B, N).

    The map is max-normalised, patches row by row. Evidence, vacuity and dissonance are None for softmax methods, the
    map for convolutional networks. `shown` (B, N) is the map for a person who reads the picture, of the kind that the
    module was made with (`shown_maps`); None without one.
    """

    probabilities: Float[Tensor, "B K"]
    evidence: Float[Tensor, "B K"] | None
    vacuity: Float[Tensor, " B"] | None
    dissonance: Float[Tensor, " B"] | None
    map: Float[Tensor, "B N"] | None
    shown: Float[Tensor, "B N"] | None = None

    def named(self) -> dict[str, Tensor]:
        """Return the outputs that exist, by name, in the order of the graph's outputs."""
        return {name: value for name, value in self._asdict().items() if value is not None}


class ScoreModule(nn.Module):
    """Scores 8-bit images with tensors given by their payload names."""

    def __init__(self, backbone: Backbone, options: ScoreOptions, shown: GraphMap | None = None) -> None:
        """Fix backbone, options and the kind of map that is shown beside the one that travels.

        A `ValueError` where the backbone has no such readout or map, or takes no prompts.
        """
        super().__init__()
        pooled = isinstance(backbone, FrozenCNN)
        if (options.readout == "pooled") is not pooled or (pooled and (options.prompts or options.insert)):
            raise ValueError(f"{backbone.spec.name} has no readout {options.readout!r} with these prompts")
        if shown is not None and shown not in graph_maps(backbone, options.readout):
            raise ValueError(f"{backbone.spec.name} with readout {options.readout!r} has no map {shown!r} to show")
        self.backbone = backbone
        self.options = options
        self.shown = shown

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what a score of this module holds, in the order of the graph's outputs."""
        return (*self.options.outputs, *(("shown",) if self.shown is not None else ()))

    @property
    def vit(self) -> FrozenViT:
        """The backbone, for what only a vision transformer can do; a `TypeError` where it is none."""
        if not isinstance(self.backbone, FrozenViT):
            raise TypeError(f"{self.backbone.spec.name} is not a vision transformer")
        return self.backbone

    def logits(self, features: Float[Tensor, "B D"], tensors: Mapping[str, Tensor]) -> Float[Tensor, "B K"]:
        """Compute the head's output in float32, before temperature and evidence."""
        return features @ tensors["head.weight"].T + tensors["head.bias"]

    def output(
        self, image: UInt8[Tensor, "B S S 3"], tensors: Mapping[str, Tensor], *, need_attention: bool
    ) -> BackboneOutput:
        """Compute the prompted network's output, before head and evidence; `tensors` holds at least the prompts.

        With `need_attention` also the rollout factors; convolutional networks have none.
        """
        pixels = self.backbone.normalise(image)
        if isinstance(self.backbone, FrozenCNN):
            pooled: CNNOutput = self.backbone(pixels)
            return pooled
        vit, insert = self.backbone, self.options.insert
        parts = [tensors[name] for name in self.options.prompts]
        found: ViTOutput = vit(
            pixels,
            torch.cat(parts) if parts else None,
            insert=None if insert is None else insert.bind(tensors, lambda: vit(pixels).cls),
            need_attention=need_attention,
            need_weighted=need_attention and self.shown == "values",
            prefix_mode=self.options.prefix_mode,
            prefix_place=self.options.prefix,
        )
        return found

    def features(self, output: BackboneOutput, tensors: Mapping[str, Tensor]) -> Float[Tensor, "B D"]:
        """Compute what the head reads: the readout in float32, standardised where the options say so."""
        return self.standardised(output.readout(self.options.readout, self.options.prompted).to(torch.float32), tensors)

    def standardised(
        self, features: Float[Tensor, "*rows D"], tensors: Mapping[str, Tensor]
    ) -> Float[Tensor, "*rows D"]:
        """Scale features as the head takes them."""
        if self.options.head_norm == "standardise":
            features = standardise(features, tensors["features.mean"], tensors["features.std"])
        return features

    def forward(self, image: UInt8[Tensor, "B S S 3"], tensors: Mapping[str, Tensor]) -> ScoreOutput:
        """Score a batch with float32 tensors named as `ScoreOptions.tensors` says; others are ignored.

        A `ValueError` where a tensor is missing, or does not fit the backbone.
        """
        missing = [name for name in self.options.tensors if name not in tensors]
        if missing:
            raise ValueError(f"a score needs the tensors {', '.join(missing)}; found {', '.join(sorted(tensors))}")
        output = self.output(image, tensors, need_attention=True)
        start = self.options.rollout_from
        maps = travelling_map(output.factors, start) if isinstance(output, ViTOutput) else None
        score = self.judge(self.features(output, tensors), tensors, maps)
        if self.shown is None or not isinstance(output, ViTOutput):
            return score
        if self.shown != "share":
            return score._replace(shown=scaled(attention_map(self.shown, output, self.options.readout)))
        return score._replace(shown=self.shares(output, tensors, score.probabilities))

    def shares(
        self, output: ViTOutput, tensors: Mapping[str, Tensor], probabilities: Float[Tensor, "B K"]
    ) -> Float[Tensor, "B N"]:
        """Compute each patch's share of the logit of the most probable class, scaled; see `shown_maps.share_map`."""
        features = self.standardised(patch_features(output, self.vit.vit.fc_norm), tensors)
        return scaled(share_map(features, tensors["head.weight"][probabilities.argmax(dim=-1)]))

    def judge(
        self, features: Float[Tensor, "B D"], tensors: Mapping[str, Tensor], maps: Float[Tensor, "B N"] | None
    ) -> ScoreOutput:
        """Compute what is shown of images whose features and max-normalised rollout maps, if any, are known."""
        logits = self.logits(features, tensors) / tensors["temperature"]
        if self.options.output == "softmax":
            return ScoreOutput(logits.softmax(dim=-1), None, None, None, maps)
        evidence = evidence_of(logits, self.options.evidence)
        if self.options.discounts:
            evidence = discounted(evidence, unusualness(features, tensors["usual.mean"], tensors["usual.whitening"]))
        probabilities, vacuity = dirichlet_summary(evidence, tensors["prior"])
        return ScoreOutput(probabilities, evidence, vacuity, dissonance(evidence, vacuity), maps)
