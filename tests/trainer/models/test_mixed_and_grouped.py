"""PEP-FedPT's and SGPT's prompt tokens against a plain walk over timm's blocks (docs/methods.md 5.1 and 5.5)."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edgefl_trainer.models.inserts import Grouped, Mixed, group_queries, insert_from_json, insert_to_json, unit_keys

DEPTH, WIDTH, CLASSES, GROUPS = 4, 16, 5, 6


def walk(plain, image, before):
    """timm's blocks one after another, `before` changing the sequence in front of each; tokens after the final norm."""
    x = plain._pos_embed(plain.patch_embed(image))
    for index, block in enumerate(plain.blocks):
        x = block(before(index, x))
    return plain.norm(x)


def mixing(tensors, blocks, tau, slot, detached=False):
    """PEP-FedPT eq. 5 to 7 and 13 to 15 as printed: P_S before block 0, one mixed token before each of `blocks`."""
    shares, prompts = tensors["class_shares"], tensors["prompts.c"]

    def before(index, x):
        batch = x.shape[0]
        if index == 0:
            x = torch.cat([x[:, :1], tensors["prompts.s"].expand(batch, -1, -1), x[:, 1:]], dim=1)
        if index not in blocks:
            return x
        cls, mu = x[:, 0].detach() if detached else x[:, 0], tensors["prototypes"][blocks.index(index)]
        cosine = (cls @ mu.T) / (cls.norm(dim=1, keepdim=True) * mu.norm(dim=1))
        raw = torch.exp(cosine / tau) * shares
        m = ((raw / raw.sum(dim=1, keepdim=True)) @ prompts)[:, None]
        first = 2 if slot == "replace" and index > blocks[0] else 1
        return torch.cat([x[:, :1], m, x[:, first:]], dim=1)

    return before


@pytest.fixture
def deep(make_spec):
    return make_spec(depth=DEPTH, width=WIDTH)


@pytest.fixture
def deep_vit(make_timm, deep):
    from edgefl_trainer.models.vit import FrozenViT

    return FrozenViT(make_timm(deep), deep)


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def mixed_tensors(positions: int, shared: int = 1) -> dict[str, torch.Tensor]:
    return {
        "prompts.s": drawn(1, shared, WIDTH),
        "prompts.c": drawn(CLASSES, WIDTH),
        "prototypes": drawn(positions, CLASSES, WIDTH),
        "class_shares": torch.tensor([0.5, 0.25, 0.25, 0.0, 0.0]),
    }


def grouped_tensors(shared: int, group: int) -> dict[str, torch.Tensor]:
    return {
        "prompts.s": drawn(shared, 1, WIDTH),
        "prompts.g": drawn(group, GROUPS, WIDTH),
        "keys": drawn(GROUPS, WIDTH),
    }


def no_bare():
    raise AssertionError("this kind of prompts needs no bare pass")


@pytest.mark.parametrize("need_attention", [False, True])
@pytest.mark.parametrize("slot", ["replace", "append"])
@pytest.mark.parametrize(("blocks", "shared"), [((1, 2, 3), 1), ((0, 2), 3), ((3,), 1)])
def test_the_mixed_forward_is_the_papers(make_timm, deep, deep_vit, batch, blocks, shared, slot, need_attention):
    """docs/methods.md 5.1: sequence [cls, m, P_S, patches]; the next m replaces the one before, or joins it."""
    tensors, insert = mixed_tensors(len(blocks), shared), Mixed(blocks=blocks, tau=0.3, slot=slot)
    output = deep_vit(batch, insert=insert.bind(tensors, no_bare), need_attention=need_attention)
    expected = walk(make_timm(deep), batch, mixing(tensors, blocks, 0.3, slot))
    extra = shared + (1 if slot == "replace" else len(blocks))
    assert expected.shape[1] == 1 + extra + deep.tokens
    assert torch.allclose(output.cls, expected[:, 0], atol=1e-4)
    assert torch.allclose(output.inserted, expected[:, 1 : 1 + extra], atol=1e-4)
    assert torch.allclose(output.patch_mean, expected[:, 1 + extra :].mean(dim=1), atol=1e-4)
    for factor in output.factors:
        assert factor.shape[1:] == (1 + deep.tokens, 1 + deep.tokens)
        assert torch.allclose(factor.sum(dim=-1), torch.ones(()), atol=1e-5)


def test_scores_pass_gradients_through_the_class_token(make_timm, deep, deep_vit, batch):
    """docs/methods.md 5.1: the class token is not detached, so P_S also learns what it does to later scores."""
    blocks, found = (1, 2, 3), {}
    for kind in ("ours", "paper", "detached"):
        tensors = mixed_tensors(3)
        for name in ("prompts.s", "prompts.c"):
            tensors[name].requires_grad_(True)
        if kind == "ours":
            cls = deep_vit(batch, insert=Mixed(blocks=blocks, tau=0.3).bind(tensors, no_bare)).cls
        else:
            before = mixing(tensors, blocks, 0.3, "replace", detached=kind == "detached")
            cls = walk(make_timm(deep).requires_grad_(False), batch, before)[:, 0]
        cls.square().sum().backward()
        found[kind] = {name: tensors[name].grad for name in ("prompts.s", "prompts.c")}
    for name in ("prompts.s", "prompts.c"):
        scale = found["paper"][name].abs().max()
        assert torch.allclose(found["ours"][name], found["paper"][name], atol=1e-4 * float(scale))
    assert not torch.allclose(found["paper"]["prompts.s"], found["detached"]["prompts.s"], rtol=1e-2)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32 - 1), tau=st.floats(0.01, 10), classes=st.integers(1, 8))
def test_scores_are_equation_15(seed, tau, classes):
    """docs/methods.md 5.1: rows sum to 1; 0 where the share is 0; a zero prototype counts as cosine 0; numpy oracle."""
    rng = np.random.default_rng(seed)
    cls, mu = rng.normal(size=(4, 8)), rng.normal(size=(classes, 8)) * (rng.random((classes, 1)) < 0.7)
    shares = rng.random(classes) * (rng.random(classes) < 0.7)
    shares[0] += 0.1
    shares /= shares.sum()
    norms = np.linalg.norm(mu, axis=1)
    cosine = np.divide(
        cls @ mu.T, np.linalg.norm(cls, axis=1)[:, None] * norms, where=norms > 0, out=np.zeros((4, classes))
    )
    raw = np.exp((cosine - 1) / tau) * shares
    found = Mixed(tau=tau).scores(*(torch.tensor(v, dtype=torch.float32) for v in (cls, mu, shares))).numpy()
    np.testing.assert_allclose(found, raw / raw.sum(axis=1, keepdims=True), atol=1e-4)
    np.testing.assert_allclose(found.sum(axis=1), 1, atol=1e-5)
    assert (found[:, shares == 0] == 0).all()


def test_scores_under_autocast_are_those_without():
    """docs/design.md 8: bfloat16 is of the network. A cosine rounded to it would mix other prompts than it scores with.

    Class tokens as near to one another as a real network's: cosines of 0.99, which tau tells apart.
    """
    common = 10 * drawn(1, 64)
    given = common + drawn(16, 64), common + drawn(CLASSES, 64), torch.full((CLASSES,), 1 / CLASSES)
    expected = Mixed(tau=0.005).scores(*given)
    with torch.autocast("cpu", torch.bfloat16):
        found = Mixed(tau=0.005).scores(*given)
    assert found.dtype == torch.float32 and torch.equal(found, expected)


def test_scores_become_the_class_shares_as_tau_grows():
    """docs/methods.md 5.1: tau → ∞ forgets the image."""
    shares = torch.tensor([0.6, 0.3, 0.1, 0.0])
    distances = [
        float((Mixed(tau=tau).scores(drawn(3, 8), drawn(4, 8), shares) - shares).abs().max())
        for tau in (0.05, 1.0, 20.0, 1e4)
    ]
    assert distances == sorted(distances, reverse=True)
    assert distances[-1] < 1e-4


def selecting(tensors, shared_blocks, group_blocks, selected):
    """SGPT: one token behind the class token at each listed block; nothing is replaced."""

    def before(index, x):
        if index in shared_blocks:
            token = tensors["prompts.s"][shared_blocks.index(index), 0]
            x = torch.cat([x[:, :1], token.expand(len(x), 1, -1), x[:, 1:]], dim=1)
        if index in group_blocks and selected is not None:
            rows = [tensors["prompts.g"][group_blocks.index(index), g] for g in selected]
            x = torch.cat([x[:, :1], torch.stack(rows)[:, None], x[:, 1:]], dim=1)
        return x

    return before


@pytest.mark.parametrize("blocks", [((0, 1), (2, 3)), ((0,), (1, 2)), ((0, 2), (3,))])
def test_the_grouped_forward_is_the_references(make_timm, deep, deep_vit, batch, blocks):
    """docs/methods.md 5.5: the group's tokens are the first behind the class token, `prompted` the mean of both."""
    plain, insert = make_timm(deep), Grouped(shared_blocks=blocks[0], group_blocks=blocks[1])
    tensors = grouped_tensors(len(blocks[0]), len(blocks[1]))
    bare = walk(plain, batch, lambda index, x: x)[:, 0]
    query, keys = np.maximum(bare.detach().numpy(), 0), tensors["keys"].numpy()
    cosine = (query @ keys.T) / np.linalg.norm(query, axis=1)[:, None] / np.linalg.norm(keys, axis=1)
    selected = (1 - cosine).argmin(axis=1)
    output = deep_vit(batch, insert=insert.bind(tensors, lambda: deep_vit(batch).cls))
    expected = walk(plain, batch, selecting(tensors, *blocks, selected.tolist()))
    group = len(blocks[1])
    assert torch.allclose(output.cls, expected[:, 0], atol=1e-4)
    assert torch.allclose(output.inserted[:, :group], expected[:, 1 : 1 + group], atol=1e-4)
    assert torch.allclose(output.readout("prompted", group), expected[:, : 1 + group].mean(dim=1), atol=1e-4)
    named = deep_vit(batch, insert=insert.bind_selected(tensors, torch.from_numpy(selected)))
    assert named.cls.equal(output.cls)


def test_without_a_group_only_shared_tokens_enter(make_timm, deep, deep_vit, batch):
    """docs/methods.md 5.5, stage 1."""
    tensors = grouped_tensors(2, 2)
    output = deep_vit(batch, insert=Grouped((0, 1), (2, 3)).bind_selected(tensors, None))
    expected = walk(make_timm(deep), batch, selecting(tensors, (0, 1), (2, 3), None))
    assert output.inserted.shape[1] == 2
    assert torch.allclose(output.cls, expected[:, 0], atol=1e-4)


def test_each_image_takes_its_own_group(deep, deep_vit, batch):
    """A batch scores as its images do one by one, though they take different groups."""
    insert, tensors = Grouped((0,), (1, 2)), grouped_tensors(1, 2)
    queries = group_queries(deep_vit(batch).cls)
    tensors["keys"] = torch.cat([queries, -queries, drawn(GROUPS - 4, WIDTH)])  # image i is nearest to key i
    assert (queries @ unit_keys(tensors["keys"]).T).argmax(dim=1).tolist() == [0, 1]
    together = deep_vit(batch, insert=insert.bind(tensors, lambda: deep_vit(batch).cls)).cls
    for index in range(2):
        one = batch[index : index + 1]
        alone = deep_vit(one, insert=insert.bind(tensors, lambda one=one: deep_vit(one).cls)).cls
        assert torch.allclose(alone[0], together[index], atol=1e-5)


@pytest.mark.parametrize("insert", [Mixed((1, 2), 0.2, "append"), Grouped((0, 1), (2,))], ids=lambda kind: kind.kind)
def test_prompt_tokens_survive_their_json(insert):
    assert insert_from_json(insert_to_json(insert)) == insert
