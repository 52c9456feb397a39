"""Pathfinder: labels follow from the geometry alone, classes balance, dashes keep apart, pixels show it."""

from dataclasses import replace

import numpy as np
import pytest

from cosformer.tasks import build
from cosformer.tasks.pathfinder import DIFFICULTY, DRAWINGS, render, sketch


def components(dashes, margin):
    """Curves found from the dashes alone: two ends join where the points one margin beyond them coincide."""
    heading = dashes[:, 1] - dashes[:, 0]
    heading /= np.linalg.norm(heading, axis=1, keepdims=True)
    beyond = np.concatenate([dashes[:, 0] - margin * heading, dashes[:, 1] + margin * heading])
    owner = np.tile(np.arange(len(dashes)), 2)
    near = np.linalg.norm(beyond[:, None] - beyond[None], axis=-1) < 1e-2
    curve = np.arange(len(dashes))
    for i, j in np.argwhere(np.triu(near, 1)):
        curve[curve == curve[owner[i]]] = curve[owner[j]]
    return curve


def label_by_geometry(dashes, discs, margin, shuffle):
    drawn = dashes[~np.isnan(dashes[:, 0, 0])].astype(np.float64)
    shuffle.shuffle(drawn)  # the order of drawing must not matter
    curve = components(drawn, margin)
    marked = [curve[np.linalg.norm(drawn - disc, axis=-1).min(1).argmin()] for disc in discs]
    return int(marked[0] == marked[1]), curve


@pytest.mark.parametrize(
    "size, difficulty", [(32, "easy"), (32, "hard"), (128, "intermediate"), (256, "hard")]
)
def test_label_recomputed_from_the_geometry(size, difficulty):
    drawing = replace(DRAWINGS[size], dashes=DIFFICULTY[difficulty])
    made = sketch(np.random.default_rng(0), 150, drawing)
    assert len(made.labels) > 30
    shuffle = np.random.default_rng(1)
    for dashes, discs, label, margin in zip(made.dashes, made.discs, made.labels, made.margins):
        found, curve = label_by_geometry(dashes, discs, margin, shuffle)
        assert found == label
        lengths = sorted(np.bincount(curve)[np.bincount(curve) > 0], reverse=True)
        assert lengths[:2] == [drawing.dashes] * 2, "two long curves"
        assert set(lengths[2:]) <= {drawing.dashes // 3}, "distractors have a third of the dashes"


def test_dashes_keep_their_distance_and_stay_inside():
    drawing = DRAWINGS[32]
    made = sketch(np.random.default_rng(2), 100, drawing)
    fractions = np.linspace(0, 1, 9)[:, None]
    for dashes, margin in zip(made.dashes, made.margins):
        drawn = dashes[~np.isnan(dashes[:, 0, 0])].astype(np.float64)
        curve = components(drawn, margin)
        points = drawn[:, None, 0] * (1 - fractions) + drawn[:, None, 1] * fractions
        assert points.min() >= drawing.padding and points.max() <= drawing.window - 1 - drawing.padding
        apart = np.linalg.norm(points[:, None, :, None] - points[None, :, None], axis=-1).min((2, 3))
        assert apart[curve[:, None] != curve[None]].min() > 2 * margin, (
            "curves must be further apart than the dashes of one"
        )
        np.testing.assert_allclose(np.linalg.norm(drawn[:, 1] - drawn[:, 0], axis=1), drawing.dash, rtol=1e-4)


def test_turns_are_smaller_the_higher_the_continuity():
    spread = []
    for continuity in (1.0, 1.8, 4.0):
        nothing_in_the_way = {"window": 4000, "seed_distance": 900}
        open_field = replace(DRAWINGS[256], continuity=continuity, **nothing_in_the_way)
        made = sketch(np.random.default_rng(3), 80, open_field)
        heading = made.dashes[:, :28, 1] - made.dashes[:, :28, 0]
        angle = np.arctan2(heading[..., 1], heading[..., 0])
        turn = np.angle(np.exp(1j * (angle[:, 2:] - angle[:, :-2])))
        assert np.abs(turn).max() <= np.pi / 2 / continuity + 1e-3
        spread.append(np.std(turn))
    # Variance of density cos^2(c x) on |x| < pi / 2c is (pi^2 / 12 - 1 / 2) / c^2.
    np.testing.assert_allclose(spread, np.sqrt(np.pi**2 / 12 - 0.5) / np.array([1.0, 1.8, 4.0]), rtol=0.06)


def test_pixels_show_the_drawing():
    drawing = DRAWINGS[64]
    made = sketch(np.random.default_rng(4), 100, drawing)
    images = render(made, drawing)
    for image, dashes, discs in zip(images, made.dashes, made.discs):
        drawn = dashes[~np.isnan(dashes[:, 0, 0])]
        x, y = np.round(drawn.mean(1)).astype(int).T
        assert (image[y, x] > 60).all(), "the middle of a dash is dark"
        x, y = np.round(discs).astype(int).T
        assert (image[y, x] == 255).all(), "a disc is not white"
        rows, columns = np.mgrid[:64, :64]
        points = (
            drawn[:, None, 0] * (1 - np.linspace(0, 1, 6)[:, None])
            + drawn[:, None, 1] * np.linspace(0, 1, 6)[:, None]
        )
        points = np.concatenate([points.reshape(-1, 2), discs])
        away = np.hypot(columns[..., None] - points[:, 0], rows[..., None] - points[:, 1]).min(-1)
        assert image[away > drawing.radius + 1.5].max() == 0, "light where nothing was drawn"


def test_classes_balance_and_sets_depend_on_the_seed_only(tmp_path):
    small = {"difficulty": "easy", "examples": (250, 10, 10)}
    task = build("pathfinder", cache=tmp_path / "a", **small)
    again = build("pathfinder", cache=tmp_path / "b", **small)
    labels = task.train.values("labels")
    assert abs(labels.mean() - 0.5) < 4 * 0.5 / 250**0.5
    assert (task.train.values("input_ids") == again.train.values("input_ids")).all()
    other = build("pathfinder", cache=tmp_path / "b", seed=1, **small)
    assert (task.train.values("input_ids") != other.train.values("input_ids")).any()
    images = task.train.values("input_ids").reshape(250, -1)
    assert len(np.unique(images, axis=0)) == 250
    assert task.max_length == 1024 and images.shape[1] == 1024 and images.max() < task.vocab_size
    # Brightness must not tell the class.
    assert abs(np.corrcoef(images.mean(1), labels)[0, 1]) < 4 / 250**0.5


def test_wrong_sizes_are_refused(tmp_path):
    with pytest.raises(ValueError, match="size must be one of 32"):
        build("pathfinder", size=33, cache=tmp_path)
    with pytest.raises(ValueError, match="difficulty must be one of easy"):
        build("pathfinder", difficulty="very", cache=tmp_path)
