"""The answer model: its blocks against torch's own and against the formula written out, and what it must not read."""

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from edgefl_protocol.rules.questions import Questions, token_ids
from edgefl_trainer.learning.learners.answers import AnswerRecipe
from edgefl_trainer.models.answers import (
    AnswerModule,
    AnswerOptions,
    answer_options_from_json,
    answer_options_to_json,
    fresh_tensors,
)
from edgefl_trainer.models.backbones import load_backbone
from edgefl_trainer.models.prompt_attention import Block, Prompts, prompt_attention

WIDTH, HEADS, TOKENS = 16, 4, 7
QUESTIONS = Questions(("is", "the", "liver", "large", "how"), 8)


def tensors_of(block: Block, seed: int = 0) -> dict[str, torch.Tensor]:
    """Fresh tensors of a block, none of them at a value that hides a mistake."""
    generator = torch.Generator().manual_seed(seed)
    fresh = block.fresh(WIDTH, generator, 0.5)
    return {name: value + 0.1 * torch.randn(value.shape, generator=generator) for name, value in fresh.items()}


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randn((2, TOKENS, WIDTH), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def present() -> torch.Tensor:
    return torch.tensor([[True] * TOKENS, [True] * 4 + [False] * (TOKENS - 4)])


def every(prompts: torch.Tensor) -> Prompts:
    return Prompts(prompts, torch.ones((TOKENS, len(prompts)), dtype=torch.bool))


def torchs_layer(tensors: dict[str, torch.Tensor]) -> nn.TransformerEncoderLayer:
    """PyTorch's own pre-norm layer with the same weights: the oracle of a plain block."""
    layer = nn.TransformerEncoderLayer(
        WIDTH, HEADS, 2 * WIDTH, dropout=0.0, activation="gelu", norm_first=True, batch_first=True
    )
    theirs = {
        "self_attn.in_proj_weight": "qkv.weight", "self_attn.in_proj_bias": "qkv.bias",
        "self_attn.out_proj.weight": "proj.weight", "self_attn.out_proj.bias": "proj.bias",
        "linear1.weight": "mlp1.weight", "linear1.bias": "mlp1.bias",
        "linear2.weight": "mlp2.weight", "linear2.bias": "mlp2.bias",
        "norm1.weight": "norm1.weight", "norm1.bias": "norm1.bias",
        "norm2.weight": "norm2.weight", "norm2.bias": "norm2.bias",
    }  # fmt: skip
    layer.load_state_dict({their: tensors[f"b.{our}"] for their, our in theirs.items()})
    return layer.eval()


def test_a_block_without_its_gate_is_a_plain_transformer_layer(tokens, present):
    """METHODS of prompt-based residual attention: with g = 0 the residual path is untouched, whatever the prompts."""
    block = Block("b", HEADS, prompted=True)
    tensors = tensors_of(block) | {"b.gate": torch.zeros(())}
    found = block(tokens, present, tensors, every(torch.randn(3, WIDTH)))
    expected = torchs_layer(tensors)(tokens, src_key_padding_mask=~present)
    torch.testing.assert_close(found.tokens[present], expected[present], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("begin", [0.0, 1.0])
def test_g_begins_where_it_is_told_to(begin):
    assert float(Block("b", HEADS, prompted=True).fresh(WIDTH, torch.Generator(), begin)["b.gate"]) == begin


def test_the_prompts_join_as_the_formula_says(tokens, present):
    """Y = X + MSA(LN X) + g·Attn(LN X W_Q, LN p W_K, LN p W_V), written out one token at a time."""
    block, prompts = (
        Block("b", HEADS, prompted=True),
        torch.randn((3, WIDTH), generator=torch.Generator().manual_seed(1)),
    )
    tensors = tensors_of(block) | {"b.mlp2.weight": torch.zeros(WIDTH, 2 * WIDTH), "b.mlp2.bias": torch.zeros(WIDTH)}
    gate = 0.7
    plain = block(tokens, present, tensors | {"b.gate": torch.zeros(())}, every(prompts)).tokens
    found = block(tokens, present, tensors | {"b.gate": torch.tensor(gate)}, every(prompts)).tokens
    w_q, w_k, w_v = (tensors[f"b.prompt_{kind}.weight"].numpy().T for kind in ("query", "key", "value"))
    p, x = prompts.numpy(), tokens.numpy()
    p = (p - p.mean(axis=1, keepdims=True)) / np.sqrt(p.var(axis=1, keepdims=True) + 1e-5)
    for row, place in np.ndindex(2, TOKENS):
        normed = (x[row, place] - x[row, place].mean()) / np.sqrt(x[row, place].var() + 1e-5)
        normed = normed * tensors["b.norm1.weight"].numpy() + tensors["b.norm1.bias"].numpy()
        scores = np.array([normed @ w_q @ (p[j] @ w_k) for j in range(3)]) / WIDTH**0.5
        shares = np.exp(scores) / np.exp(scores).sum()
        expected = plain[row, place].numpy() + gate * sum(shares[j] * (p[j] @ w_v) for j in range(3))
        np.testing.assert_allclose(found[row, place].numpy(), expected, rtol=1e-4, atol=1e-4)


def test_a_token_takes_nothing_from_prompts_that_are_not_for_it(tokens):
    prompts = torch.randn((3, WIDTH))
    allowed = torch.ones((TOKENS, 3), dtype=torch.bool)
    allowed[0] = False
    allowed[1, 1:] = False
    weights = [torch.randn((WIDTH, WIDTH)) for _ in range(3)]
    found = prompt_attention(tokens, Prompts(prompts, allowed), *weights)
    assert (found[:, 0] == 0).all() and (found[:, 1:] != 0).any(dim=-1).all()
    first = torch.nn.LayerNorm(WIDTH, elementwise_affine=False)(prompts[:1])
    torch.testing.assert_close(found[:, 1], (first @ weights[2].T).expand(2, -1))


def test_of_the_last_block_the_first_tokens_can_be_had_alone(tokens, present):
    """They are what they are among all: the others are attended to, and nothing else is read of them."""
    block = Block("b", HEADS, prompted=True)
    tensors, prompts = tensors_of(block), every(torch.randn(3, WIDTH))
    whole, first = (block(tokens, present, tensors, prompts, most=most) for most in (None, 2))
    torch.testing.assert_close(first.tokens, whole.tokens[:, :2])
    torch.testing.assert_close(first.attention, whole.attention[:, :, :2])


@pytest.fixture(scope="module")
def backbone():
    return load_backbone("tiny", image_px=36, seed=3)


def model(backbone, options: AnswerOptions, seed: int = 0, answers: int = 5) -> tuple[AnswerModule, dict]:
    """A module and tensors whose gates are open."""
    generator = torch.Generator().manual_seed(seed)
    tensors = fresh_tensors(options, QUESTIONS, answers, (64, 32, 3), generator, 0.5)
    opened = {name: torch.tensor(0.5) for name in tensors if name.endswith("gate")}
    return AnswerModule(backbone, options).eval(), {**tensors, **opened, "temperature": torch.tensor(1.0)}


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(0, 256, (3, 36, 36, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))


def asked(*texts: str, length: int = QUESTIONS.length) -> torch.Tensor:
    return torch.from_numpy(np.stack([token_ids(text, QUESTIONS.table, length) for text in texts]))


OPTIONS = AnswerOptions(heads=4)
THREE = asked("is the liver large", "how large", "xyzzy")


def test_an_answer_is_probabilities_and_a_map(backbone, images):
    module, tensors = model(backbone, OPTIONS)
    found = module(images, THREE, tensors)
    assert found.probabilities.shape == (3, 5) and found.map.shape == (3, 9)
    torch.testing.assert_close(found.probabilities.sum(dim=1), torch.ones(3))
    assert (found.map >= 0).all() and (found.map.amax(dim=1) == 1).all()
    assert found.evidence is None and found.vacuity is None
    assert tuple(found.named()) == module.outputs == ("probabilities", "map")
    warmer = module(images, THREE, tensors | {"temperature": torch.tensor(2.0)}).probabilities
    torch.testing.assert_close(warmer, (found.probabilities.log() / 2).softmax(dim=1))


def test_every_tensor_is_an_argument(backbone, images):
    """None stands in the module: each of those it names changes the answer, and a missing one is named."""
    module, tensors = model(backbone, OPTIONS)
    assert set(OPTIONS.tensors) == set(tensors) and len(OPTIONS.tensors) == len(tensors)
    before = module(images, THREE, tensors).probabilities
    for name, value in tensors.items():
        change = torch.randn(value.shape, generator=torch.Generator().manual_seed(9))
        assert not torch.equal(module(images, THREE, tensors | {name: value + change}).probabilities, before), name
    with pytest.raises(ValueError, match=r"needs the tensors fusion\.cls; found"):
        module(images, THREE, {name: value for name, value in tensors.items() if name != "fusion.cls"})


def test_padding_behind_a_question_changes_nothing(backbone, images):
    module, tensors = model(backbone, OPTIONS)
    longer = module(images[:1], asked("how large"), tensors)
    shorter = module(images[:1], asked("how large", length=2), tensors | {"words.places": tensors["words.places"][:2]})
    torch.testing.assert_close(longer.probabilities, shorter.probabilities)
    torch.testing.assert_close(longer.map, shorter.map)


def test_question_and_picture_are_both_read(backbone, images):
    module, tensors = model(backbone, OPTIONS)
    same = images[:1].expand(2, -1, -1, -1)
    one, other = module(same, asked("how large", "large how"), tensors).probabilities
    assert not torch.equal(one, other)  # the order of words counts
    one, other = module(images[:2], asked("how large", "how large"), tensors).probabilities
    assert not torch.equal(one, other)


def test_a_hidden_picture_is_not_read(backbone, images):
    module, tensors = model(backbone, dataclasses.replace(OPTIONS, sees_picture=False))
    found = module(images, asked("how large", "how large", "how large"), tensors)
    assert found.map is None and module.outputs == ("probabilities",)
    assert torch.equal(found.probabilities[0], found.probabilities[1])


@pytest.mark.parametrize("kept", [(), ("image",), ("text",), ("image", "text")])
def test_prompts_are_read_by_their_own_kind(backbone, kept):
    """Image prompts are for picture tokens, text prompts for words, both for the class token."""
    names = {kind: (f"prompts.{kind}",) if kind in kept else () for kind in ("image", "text")}
    options = AnswerOptions(image_prompts=names["image"], text_prompts=names["text"])
    module, tensors = model(backbone, options)
    assert options.prompts == (*names["image"], *names["text"])
    found = module._prompts(9, 8, tensors)
    if not kept:
        assert found is None
        return
    image, text = 3 * ("image" in kept), 3 * ("text" in kept)
    expected = torch.zeros((18, image + text), dtype=torch.bool)
    expected[0] = True
    expected[1:10, :image] = True
    expected[10:, image:] = True
    assert torch.equal(found.allowed, expected)
    assert torch.equal(found.tokens, torch.cat([tensors[name] for name in options.prompts]))


def test_a_fresh_model_reads_its_prompts(backbone, images):
    """docs/decisions/0049: without them its features turn by more than a tenth; not so with p as it is."""
    generator = torch.Generator().manual_seed(0)
    fresh = fresh_tensors(OPTIONS, QUESTIONS, 5, (64, 32, 3), generator, AnswerRecipe().prompt_gate)
    module = AnswerModule(backbone, OPTIONS).eval()
    pictures = module.picture_tokens(images)
    read, _ = module.fused(pictures, THREE, fresh)
    shut = {name: torch.zeros(()) if name.endswith(".gate") else value for name, value in fresh.items()}
    bare, _ = module.fused(pictures, THREE, shut)
    assert ((read - bare).norm(dim=1) / bare.norm(dim=1)).min() > 0.1


def test_a_question_of_nothing_but_padding_stays_a_number(backbone, images):
    module, tensors = model(backbone, OPTIONS)
    assert torch.isfinite(module(images[:1], torch.zeros((1, 8), dtype=torch.int64), tensors).probabilities).all()


def test_options_survive_their_file():
    for options in (OPTIONS, AnswerOptions(heads=2, fusion_blocks=3, image_prompts=(), sees_picture=False)):
        assert answer_options_from_json(answer_options_to_json(options)) == options
    with pytest.raises(TypeError):
        answer_options_from_json({**answer_options_to_json(OPTIONS), "depth": 3})


def test_a_convolutional_network_has_no_tokens_to_ask_about():
    with pytest.raises(ValueError, match="is no vision transformer"):
        AnswerModule(load_backbone("cnn:test_resnet", image_px=36), OPTIONS)
