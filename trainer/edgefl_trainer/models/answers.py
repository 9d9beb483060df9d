"""The one definition of an answer: picture, question and named tensors in, probabilities of the answers and a map out.

    picture    tokens of the vision transformer, normed, projected to width d
    question   word and place embeddings, a small transformer
    fusion     a transformer with prompt-based residual attention over [class token; picture tokens; words]
    answer     a linear layer on the class token, a softmax over all answers

Picture tokens attend to the image prompts, words to the text prompts, the class token to both. The map is the class
token's attention to the picture tokens, mean over blocks and heads, max-normalised.

Guarantees: `edgefl-train` runs this module and the exported graph is traced from it, so a device answers as the trainer
does; the tensors are arguments, never constants; everything after the vision transformer is float32; padding behind a
question changes nothing. Source: Zhu et al., arXiv 2402.09677; docs/methods.md 11.1.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional

from edgefl_protocol.rules.questions import FIRST, PADDING, Questions
from edgefl_trainer.models.cnn import Backbone
from edgefl_trainer.models.prompt_attention import (
    PARTS,
    Block,
    Prompts,
    fresh_linear,
    fresh_norm,
    fresh_tokens,
    linear,
    norm,
)
from edgefl_trainer.models.scoring import ScoreOutput
from edgefl_trainer.models.spec import ViTSpec
from edgefl_trainer.models.vit import FrozenViT
from edgefl_trainer.rollout import max_normalise

IMAGE_PROMPTS, TEXT_PROMPTS = "prompts.image", "prompts.text"
CLASS, PICTURE, WORD = range(3)  # kinds of tokens
SHARED = "shared."  # begins the names of prompts that a model only reads


@dataclass(frozen=True, kw_only=True)
class AnswerOptions:
    """Choices that are fixed in a module that answers.

    Attributes:
        heads: attention heads of every block behind the vision transformer.
        question_blocks: blocks that read the question alone.
        fusion_blocks: blocks that read picture and question.
        image_prompts: names of the tensors whose rows are prompts of the picture tokens; empty for none.
        text_prompts: the same of the words.
        sees_picture: whether the picture tokens are there; without them the question alone is answered.
    """

    heads: int = 4
    question_blocks: int = 2
    fusion_blocks: int = 2
    image_prompts: tuple[str, ...] = (IMAGE_PROMPTS,)
    text_prompts: tuple[str, ...] = (TEXT_PROMPTS,)
    sees_picture: bool = True

    output: ClassVar[Literal["softmax"]] = "softmax"  # as `ScoreOptions` has them
    readout: ClassVar[Literal["cls"]] = "cls"
    discounts: ClassVar[bool] = False

    @property
    def prompts(self) -> tuple[str, ...]:
        """Names of all prompt tensors."""
        return (*self.image_prompts, *self.text_prompts)

    @property
    def question(self) -> tuple[Block, ...]:
        """The blocks that read the question alone."""
        return tuple(Block(f"question.{i}", self.heads) for i in range(self.question_blocks))

    @property
    def fusion(self) -> tuple[Block, ...]:
        """The blocks that read picture and question."""
        return tuple(Block(f"fusion.{i}", self.heads, bool(self.prompts)) for i in range(self.fusion_blocks))

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of the tensors an answer needs beside picture and question, in the order of the graph's inputs."""
        pictures = tuple(f"pictures.{part}" for part in PARTS) if self.sees_picture else ()
        blocks = tuple(name for block in (*self.question, *self.fusion) for name in block.tensors)
        ends = ("fusion.norm.weight", "fusion.norm.bias", "head.weight", "head.bias", "temperature")
        return (*pictures, "words.embedding", "words.places", "fusion.cls", *blocks, *self.prompts, *ends)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what an answer holds, in the order of the graph's outputs."""
        return ("probabilities", "map") if self.sees_picture else ("probabilities",)


def answer_options_to_json(options: AnswerOptions) -> dict[str, Any]:
    """Write the plain values that `answer_options_from_json` reads back."""
    return asdict(options)


def answer_options_from_json(found: Mapping[str, Any]) -> AnswerOptions:
    """Read options from plain values; a `TypeError` for an unknown one."""
    lists = {name: tuple(found[name]) for name in ("image_prompts", "text_prompts")}
    return AnswerOptions(**{**found, **lists})


def fresh_tensors(
    options: AnswerOptions,
    questions: Questions,
    classes: int,
    sizes: tuple[int, int, int],
    generator: torch.Generator,
    gate: float,
) -> dict[str, Tensor]:
    """Draw every tensor that learns.

    Args:
        sizes: width of the picture tokens, width d of the others, and prompts of a kind.
        gate: where g of each block with prompts begins.
    """
    token_width, width, prompt_length = sizes
    made = fresh_linear("pictures", token_width, width, generator) if options.sees_picture else {}
    made["words.embedding"] = fresh_tokens((FIRST + len(questions.words), width), generator)
    made["words.places"] = fresh_tokens((questions.length, width), generator)
    made["fusion.cls"] = fresh_tokens((width,), generator)
    for block in (*options.question, *options.fusion):
        made |= block.fresh(width, generator, gate)
    made |= {name: fresh_tokens((prompt_length, width), generator) for name in options.prompts}
    made |= fresh_norm("fusion.norm", width)
    return made | {"head.weight": fresh_tokens((classes, width), generator), "head.bias": torch.zeros(classes)}


class AnswerModule(nn.Module):
    """Answers questions about 8-bit images with tensors given by their payload names."""

    def __init__(self, backbone: Backbone, options: AnswerOptions, dropout: float = 0.0) -> None:
        """Fix vision transformer and options; `dropout` is the share that is dropped while the module trains.

        A `ValueError` where the backbone is no vision transformer.
        """
        super().__init__()
        if not isinstance(backbone, FrozenViT):
            raise ValueError(f"{backbone.spec.name} is no vision transformer, so it has no picture tokens to ask about")
        self.backbone = backbone
        self.options = options
        self.dropout = dropout

    @property
    def spec(self) -> ViTSpec:
        """What the vision transformer is."""
        return self.backbone.spec

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of what an answer holds, in the order of the graph's outputs."""
        return self.options.outputs

    def picture_tokens(
        self, image: UInt8[Tensor, "B S S 3"], network: Mapping[str, Tensor] | None = None
    ) -> Float[Tensor, "B N D"]:
        """Compute the normed tokens of the patches; `network` are other weights, by timm's names, that may learn."""
        pixels = self.backbone.normalise(image)
        if network is None:
            tokens = self.backbone(pixels).patches
        else:
            weights = {f"vit.{name}": value for name, value in network.items()}
            tokens = functional_call(self.backbone, weights, (pixels,)).patches
        return functional.layer_norm(tokens.to(torch.float32), tokens.shape[-1:])

    def fused(
        self, pictures: Float[Tensor, "B N D"], question: Int[Tensor, "B L"], tensors: Mapping[str, Tensor]
    ) -> tuple[Float[Tensor, "B d"], Float[Tensor, "B N"] | None]:
        """Compute what the answer is read from, and the max-normalised map; None where no picture is seen."""
        dropped = self.dropout if self.training else 0.0
        words, present = self._words(question, tensors, dropped)
        batch, patches = question.shape[0], pictures.shape[1] if self.options.sees_picture else 0
        parts = [tensors["fusion.cls"].expand(batch, 1, -1), words]
        if patches:
            parts.insert(1, linear(pictures, tensors, "pictures"))
        tokens = torch.cat(parts, dim=1)  # (B, 1+N+L, d)
        seen = torch.ones((batch, 1 + patches), dtype=torch.bool, device=question.device)
        there = torch.cat([seen, present], dim=1)
        prompts = self._prompts(patches, words.shape[1], tensors)
        looks = []
        for block in self.options.fusion:
            most = 1 if block == self.options.fusion[-1] else None  # of the last, the class token alone is read
            tokens, attention = block(tokens, there, tensors, prompts, dropped, most)
            looks.append(attention[:, :, 0, 1 : 1 + patches].mean(dim=1))  # (B, N)
        features = norm(tokens[:, 0], tensors, "fusion.norm")
        return features, max_normalise(torch.stack(looks).mean(dim=0)) if patches else None

    def logits(self, features: Float[Tensor, "B d"], tensors: Mapping[str, Tensor]) -> Float[Tensor, "B K"]:
        """Compute the score of each answer, before the temperature."""
        return linear(features, tensors, "head")

    def judge(
        self, logits: Float[Tensor, "B K"], maps: Float[Tensor, "B N"] | None, tensors: Mapping[str, Tensor]
    ) -> ScoreOutput:
        """Compute what is shown of pictures and questions whose logits and maps are known."""
        return ScoreOutput((logits / tensors["temperature"]).softmax(dim=-1), None, None, None, maps)

    def forward(
        self, image: UInt8[Tensor, "B S S 3"], question: Int[Tensor, "B L"], tensors: Mapping[str, Tensor]
    ) -> ScoreOutput:
        """Answer a batch with float32 tensors named as `AnswerOptions.tensors` says; others are ignored.

        `question` are the numbers of words, see `rules.questions.token_ids`. A `ValueError` where a tensor is missing.
        """
        missing = [name for name in self.options.tensors if name not in tensors]
        if missing:
            raise ValueError(f"an answer needs the tensors {', '.join(missing)}; found {', '.join(sorted(tensors))}")
        features, maps = self.fused(self.picture_tokens(image), question, tensors)
        return self.judge(self.logits(features, tensors), maps, tensors)

    def _words(
        self, question: Int[Tensor, "B L"], tensors: Mapping[str, Tensor], dropped: float
    ) -> tuple[Float[Tensor, "B L d"], Tensor]:
        """The words of the question as the fusion takes them, and which are no padding."""
        present = question != PADDING
        words = functional.embedding(question, tensors["words.embedding"]) + tensors["words.places"]
        for block in self.options.question:
            words = block(words, present, tensors, None, dropped).tokens
        return words, present

    def _prompts(self, patches: int, length: int, tensors: Mapping[str, Tensor]) -> Prompts | None:
        """All prompts, and which of them class token, picture tokens and words may attend to."""
        options = self.options
        if not options.prompts:
            return None
        tokens = torch.cat([tensors[name] for name in options.prompts])
        images = sum(len(tensors[name]) for name in options.image_prompts)
        texts = len(tokens) - images
        kinds = torch.tensor([CLASS, *[PICTURE] * patches, *[WORD] * length], device=tokens.device)[:, None]
        served = torch.tensor([PICTURE] * images + [WORD] * texts, device=tokens.device)
        return Prompts(tokens, (kinds == CLASS) | (kinds == served))
