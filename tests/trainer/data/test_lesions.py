"""Drawn lesions: deterministic, masks that fit, sites that differ, classes shown by structure and not by mean colour.

The bounds come from what the data is for: mean colour must not give the class away (at most 0.65 balanced accuracy of
a logistic regression on mean RGB), structure must (clearly above 0.8 for a linear model on local patterns), and a
lesion covers about 10 to 35 % of the picture.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import balanced_accuracy_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from edgefl_trainer.data import Federation, load_federation
from edgefl_trainer.data.lesions import SIGNS, draw_lesion, draw_skin, parse_settings
from edgefl_trainer.data.lesions.canvas import stream
from edgefl_trainer.data.lesions.plan import OPTIONS, class_shares, plan_rows
from edgefl_trainer.data.lesions.site import site_styles
from edgefl_trainer.data.lesions.view import paint_lesion, photograph


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Six sites of 100 pictures, nevus against the rest."""
    cache = tmp_path_factory.mktemp("cache")
    return load_federation(["lesions:sites=6,images=100,px=84"], image_px=84, task="nevus", cache_dir=cache)


def digest(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def test_same_seed_same_pictures(tmp_path: Path) -> None:
    """Two caches, two drawings, equal bytes; another seed draws others."""
    one, two, other = (
        load_federation([f"lesions:sites=2,images=12,seed={seed}"], image_px=48, cache_dir=tmp_path / str(i))
        for i, seed in enumerate((5, 5, 6))
    )
    assert digest(one.images) == digest(two.images) != digest(other.images)
    assert digest(one.masks) == digest(two.masks) != digest(other.masks)
    assert one.partition_sha256 == two.partition_sha256


def test_a_picture_does_not_depend_on_the_others(tmp_path: Path) -> None:
    few, many = (
        load_federation([f"lesions:sites=2,images={n},px=48"], image_px=48, cache_dir=tmp_path / "c") for n in (6, 12)
    )
    for i, name in enumerate(few.names):
        if name in many.names:
            np.testing.assert_array_equal(few.images[i], many.images[many.names.index(name)])
    assert set(few.names[:5]) <= set(many.names)


def test_a_site_alone_has_the_pictures_it_has_beside_the_others(tmp_path: Path) -> None:
    spec = "lesions:sites=3,images=20,px=48"
    together = load_federation([spec], image_px=48, cache_dir=tmp_path)
    alone = load_federation([f"{spec}@site=site-2"], image_px=48, cache_dir=tmp_path)
    assert list(alone.sites) == ["site-2"]
    for kind in ("train", "tune", "test"):
        np.testing.assert_array_equal(
            alone.images[alone.sites["site-2"].rows(kind)], together.images[together.sites["site-2"].rows(kind)]
        )


@pytest.mark.parametrize("label", sorted(SIGNS))
def test_the_mask_is_where_the_lesion_was_drawn(label: str) -> None:
    """The same photograph without the lesion differs inside the mask and nowhere else, but for soft edges."""
    px, covered, overlap = 84, [], []
    for number in range(12):
        style = replace(site_styles(6, 0)[number % 6], blur_px=0.1)
        lesion = paint_lesion(label, style, px, stream(0, 2, number))
        bare = lesion.layers.copy()
        bare.putalpha(0)
        image, mask = photograph(lesion, style, px, stream(0, 3, number))
        skin, empty = photograph(replace(lesion, layers=bare), style, px, stream(0, 3, number))
        assert not empty.any()
        changed = np.abs(image.astype(int) - skin).max(axis=2) > 12
        inside = mask > 0
        covered.append(inside.mean())
        overlap.append((changed & inside).sum() / (changed | inside).sum())
        assert set(np.unique(mask)) == {0, 255}
        assert (changed & ~grown(inside, 4)).sum() <= 0.03 * inside.sum()
        assert not (changed & ~grown(inside, 12)).any()
    assert np.mean(overlap) > 0.75
    assert min(covered) > 0.08
    assert max(covered) < 0.38


def grown(inside: np.ndarray, steps: int) -> np.ndarray:
    for _ in range(steps):
        inside = (
            inside | np.roll(inside, 1, 0) | np.roll(inside, -1, 0) | np.roll(inside, 1, 1) | np.roll(inside, -1, 1)
        )
    return inside


@pytest.mark.slow
def test_lesions_are_not_always_in_the_middle(drawn: Federation) -> None:
    inside = drawn.masks > 0
    rows = (inside.sum(2) * np.arange(84)).sum(1) / inside.sum((1, 2))
    assert rows.std() > 5  # pixels
    assert inside.mean((1, 2)).mean() == pytest.approx(0.22, abs=0.04)


def test_sites_look_different(drawn: Federation) -> None:
    """Bare skin tells the site: nearest site mean of 12 colour and light statistics, on pictures not averaged."""
    corners = drawn.images[:, ::12, ::12].reshape(len(drawn.images), -1).astype(float)
    site_of = np.zeros(len(corners), int)
    for s, site in enumerate(drawn.sites.values()):
        for kind in ("train", "tune", "test"):
            site_of[site.rows(kind)] = s
    train = np.concatenate([site.train for site in drawn.sites.values()])
    test = np.concatenate([site.test for site in drawn.sites.values()])
    means = np.stack([corners[train][site_of[train] == s].mean(0) for s in range(6)])
    nearest = np.linalg.norm(corners[test][:, None] - means, axis=2).argmin(1)
    assert (nearest == site_of[test]).mean() > 0.4  # chance is 0.17


def scored(features: np.ndarray, labels: np.ndarray, train: np.ndarray, test: np.ndarray, c: float = 1.0) -> float:
    model = make_pipeline(StandardScaler(), LogisticRegression(class_weight="balanced", C=c, max_iter=1000))
    model.fit(features[train], labels[train])
    return float(balanced_accuracy_score(labels[test], model.predict(features[test])))


def test_mean_colour_does_not_give_the_class_away(drawn: Federation) -> None:
    """Pooled over sites and at each site, on unseen lesions; also the mean colour of the lesion itself."""
    whole = drawn.images.mean(axis=(1, 2))
    inside = drawn.masks[..., None] > 0
    lesion = (drawn.images * inside).sum(axis=(1, 2)) / inside.sum(axis=(1, 2))
    learn = {name: np.concatenate([site.train, site.tune]) for name, site in drawn.sites.items()}
    every, test = np.concatenate(list(learn.values())), np.concatenate([s.test for s in drawn.sites.values()])
    for features in (whole, lesion):
        assert scored(features, drawn.labels, every, test) <= 0.65
    each = [scored(whole, drawn.labels, learn[name], site.test) for name, site in drawn.sites.items()]
    assert np.mean(each) <= 0.65


def test_structure_gives_the_class_away(drawn: Federation) -> None:
    """A linear model on responses of 48 principal patterns of 12-px patches, without any mean colour."""
    patches = drawn.images.reshape(-1, 7, 12, 7, 12, 3).swapaxes(2, 3).reshape(len(drawn.images), 49, -1) / 255.0
    patches = patches - patches.mean(axis=2, keepdims=True)  # (n, 49, 432)
    train = np.concatenate([np.concatenate([s.train, s.tune]) for s in drawn.sites.values()])
    test = np.concatenate([s.test for s in drawn.sites.values()])
    patterns = PCA(48, random_state=0).fit(patches[train[::2]].reshape(-1, 432)).components_
    response = patches @ patterns.T
    features = np.concatenate([np.abs(response).mean(1), np.abs(response).max(1), (response**2).mean(1)], axis=1)
    assert scored(features, drawn.labels, train, test, c=0.05) > 0.85


def test_every_site_has_every_class_unless_asked() -> None:
    for skew in ("0", "0.5", "1"):
        settings = parse_settings(OPTIONS | {"skew": skew})
        shares = np.stack([class_shares(settings, site) for site in range(6)])
        assert shares.min() > 0.05
        np.testing.assert_allclose(shares.sum(1), 1)
        assert (np.ptp(shares, axis=0).max() > 0.2) == (skew != "0")
    settings = parse_settings(OPTIONS | {"absent": "2"})
    for site in range(6):
        rows = [row for row in plan_rows(settings) if row.site == f"site-{site + 1}"]
        assert len({row.label for row in rows}) == 2
        assert "NV" in {row.label for row in rows}


def test_rows_have_the_size_asked_for_and_several_views() -> None:
    rows = plan_rows(parse_settings(OPTIONS | {"sites": "3", "images": "100"}))
    assert len(rows) == 300
    lesions = {row.lesion for row in rows}
    assert 1.3 < len(rows) / len(lesions) < 2.0
    assert len({(row.lesion, row.label, row.site) for row in rows}) == len(lesions)


def test_views_of_a_lesion_are_alike() -> None:
    """The signs go with the lesion: two views differ less in the lesion's colour than two lesions do."""
    style, px = site_styles(6, 0)[0], 64

    def tone(number: int, view: int) -> np.ndarray:
        lesion = paint_lesion("MEL", style, px, stream(0, 2, number))
        image, mask = photograph(lesion, style, px, stream(0, 3, number, view))
        return image[mask > 0].mean(0)

    tones = np.array([[tone(n, v) for v in range(2)] for n in range(12)])
    within = np.linalg.norm(tones[:, 0] - tones[:, 1], axis=1).mean()
    between = np.linalg.norm(tones[:, None, 0] - tones[None, :, 0], axis=2).sum() / (12 * 11)
    assert within < 0.6 * between


def test_healthy_skin_is_a_picture_without_a_lesion() -> None:
    skin = np.stack([draw_skin(site=s, number=n, px=84) for s in range(6) for n in range(4)])
    lesions = np.stack([draw_lesion("MEL", site=s, number=n, px=84)[0] for s in range(6) for n in range(4)])
    middle = (slice(None), slice(14, 70), slice(14, 70))
    assert skin[middle].std(axis=(1, 2)).mean() < 0.5 * lesions[middle].std(axis=(1, 2)).mean()
    assert digest(draw_skin(site=1, number=2, px=64)) == digest(draw_skin(site=1, number=2, px=64))


def test_pictures_drawn_larger_go_through_the_one_image_path(tmp_path: Path) -> None:
    """docs/design.md 2: Pillow's bicubic with antialias is the oracle."""
    small = load_federation(["lesions:sites=1,images=2,px=96"], image_px=48, cache_dir=tmp_path)
    large = load_federation(["lesions:sites=1,images=2,px=96"], image_px=96, cache_dir=tmp_path)
    for little, big in zip(small.images, large.images, strict=True):
        want = Image.fromarray(np.asarray(big)).resize((48, 48), Image.Resampling.BICUBIC)
        np.testing.assert_array_equal(little, np.asarray(want))
    assert set(np.unique(small.masks)) == {0, 255}
