"""Reconstruction from first principles: docs/security.md check 53."""

import numpy as np
import pytest

from edgefl_trainer.audit.reconstruction import class_pictures, fit_decoder, similarities, thumbnails

PX, COUNT = 24, 160


def smooth_pictures(seed: int, count: int = COUNT) -> np.ndarray:
    """Pictures of 6x6 colours each, drawn large."""
    colours = np.random.default_rng(seed).integers(0, 256, (count, 6, 6, 3))
    return colours.repeat(PX // 6, axis=1).repeat(PX // 6, axis=2).astype(np.uint8)


def test_a_payload_that_holds_the_picture_gives_it_back() -> None:
    """Linear in the picture and as many numbers as it has: the regression inverts it."""
    known, sought = smooth_pictures(0), smooth_pictures(1, 20)
    mixing = np.random.default_rng(2).normal(size=(108, 108))
    decoder = fit_decoder(thumbnails(known, 6) @ mixing, known)
    assert similarities(decoder.decode(thumbnails(sought, 6) @ mixing, PX), sought).mean() > 0.9


def test_a_payload_without_the_picture_gives_the_mean() -> None:
    """What is decoded is then as like as the mean picture is, which is the floor."""
    known, sought = smooth_pictures(0), smooth_pictures(1, 20)
    noise = np.random.default_rng(3)
    decoder = fit_decoder(noise.normal(size=(COUNT, 8)), known)
    found = similarities(decoder.decode(noise.normal(size=(20, 8)), PX), sought).mean()
    floor = similarities(class_pictures(known, np.zeros(COUNT, int), 1)[np.zeros(20, int)], sought).mean()
    assert abs(found - floor) < 0.03


def test_a_curved_payload_takes_the_gaussian_kernel() -> None:
    """The squares of two numbers do not tell their sign linearly, but a payload on a circle tells its angle."""
    angle = np.random.default_rng(4).uniform(0, 2 * np.pi, COUNT)
    light = 127 + 120 * np.sign(np.sin(3 * angle))
    pictures = np.broadcast_to(light[:, None, None, None], (COUNT, PX, PX, 3)).astype(np.uint8)
    assert fit_decoder(np.stack([np.sin(angle), np.cos(angle)], axis=1), pictures).kernel == "gaussian"


def test_a_constant_payload_is_decoded_to_the_mean() -> None:
    known = smooth_pictures(0)
    found = fit_decoder(np.ones((COUNT, 5)), known).decode(np.ones((1, 5)), PX)
    assert found[0] == pytest.approx(known.mean(axis=0) / 255, abs=1e-3)


def test_equal_pictures_are_alike_and_negatives_are_not() -> None:
    """Wang et al. 2004: 1 for equal pictures only."""
    pictures = smooth_pictures(0, 8)
    assert similarities((pictures / 255).astype(np.float32), pictures) == pytest.approx(np.ones(8))
    assert (similarities((1 - pictures / 255).astype(np.float32), pictures) < 0.2).all()


def test_class_pictures_are_means_and_the_last_is_of_all() -> None:
    pictures, labels = smooth_pictures(0, 6), np.array([0, 0, 2, 2, 2, -1])
    found = class_pictures(pictures, labels, 3)
    assert found[2] == pytest.approx(pictures[2:5].mean(axis=0) / 255, abs=1e-6)
    assert found[1] == pytest.approx(pictures.mean(axis=0) / 255, abs=1e-6) and (found[-1] == found[1]).all()
