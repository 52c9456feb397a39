"""Long-Range Arena's Image: CIFAR-10 in grey, one token a pixel, `PIXELS` in a row."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .cache import digest, hashed
from .contract import SPLITS, DataError, Special, Task
from .published import arena
from .source import locate

SIDE = 32
PIXELS = SIDE * SIDE
LABELS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
GREY = np.array([0.2989, 0.587, 0.114], np.float32)  # TensorFlow's weights, as in the published pipeline
TRAIN = 0.9  # published: the first nine tenths of the training images train, the rest validate
Batch = tuple[np.ndarray, np.ndarray]  # pixels (N, PIXELS), labels (N,), both uint8


def _grey(colour: np.ndarray) -> np.ndarray:
    """(N, 3 * PIXELS), planes of red, green and blue -> (N, PIXELS), rounded as tf.image does."""
    mixed = np.einsum("ncp,c->np", colour.reshape(len(colour), 3, PIXELS).astype(np.float32) / 255, GREY)
    return np.minimum(mixed * 255.5, 255).astype(np.uint8)


def _binary(path: Path) -> Batch:
    raw, record = np.fromfile(path, np.uint8), 1 + 3 * PIXELS
    if not len(raw) or len(raw) % record:
        what = f"not a CIFAR-10 binary batch: {len(raw)} bytes is no multiple of {record}"
        raise DataError(what, path=path)
    raw = raw.reshape(-1, record)
    return _grey(raw[:, 1:]), raw[:, 0]


def _png(path: Path) -> np.ndarray:
    from PIL import Image, UnidentifiedImageError

    limit, Image.MAX_IMAGE_PIXELS = Image.MAX_IMAGE_PIXELS, None  # a long strip is no decompression bomb
    try:
        with Image.open(path) as strip:
            pixels = np.asarray(strip.convert("L"))
    except (UnidentifiedImageError, OSError, SyntaxError) as error:
        raise DataError(f"not a readable PNG: {error}", path=path) from None
    finally:
        Image.MAX_IMAGE_PIXELS = limit
    height, width = pixels.shape
    if width != SIDE or height % SIDE:
        expected = f"expected a strip of {SIDE} x {SIDE} images, got {width} x {height} pixels"
        raise DataError(expected, path=path)
    return pixels.reshape(-1, PIXELS)


def _files(folder: Path) -> list[Path]:
    """The folder's files, in whichever form it has them; training files in their published order."""
    forms = {"train_labels.u8": ("*.png", "*.u8"), "data_batch_1.bin": ("*_batch*.bin",)}
    for required, patterns in forms.items():
        if (folder / required).is_file():
            return sorted({path for pattern in patterns for path in folder.glob(pattern)})
    strips = "grey strips train_*.png, test.png with train_labels.u8, test_labels.u8"
    expected = f"data_batch_1.bin ... test_batch.bin (its binary version), or {strips}"
    raise DataError(f"expected CIFAR-10 as {expected}", path=folder)


def _read(path: Path) -> Batch:
    """A file's images and labels; the strips' are in separate files."""
    if path.suffix == ".png":
        return _png(path), np.empty(0, np.uint8)
    if path.suffix == ".u8":
        return np.empty((0, PIXELS), np.uint8), np.fromfile(path, np.uint8)
    return _binary(path)


def _rows(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    parts: dict[str, list[Batch]] = {"train": [], "test": []}
    for path in _files(folder):
        pixels, labels = _read(path)
        if len(bad := np.flatnonzero(labels >= len(LABELS))):
            what = f"image {bad[0]} has label {labels[bad[0]]}; labels are 0 ... {len(LABELS) - 1}"
            raise DataError(what, path=path)
        parts["test" if "test" in path.name else "train"].append((pixels, labels))
    if not (parts["train"] and parts["test"]):
        raise DataError("both training and test images are needed", path=folder)
    whole = {split: [np.concatenate(side) for side in zip(*part)] for split, part in parts.items()}
    for split, (pixels, labels) in whole.items():
        if len(pixels) != len(labels):
            told = f"{len(labels)} labels for {len(pixels)} images"
            raise DataError(told, path=folder / f"{split}_labels.u8")
    edge = int(len(whole["train"][0]) * TRAIN)
    whole["validation"] = [side[edge:] for side in whole["train"]]
    whole["train"] = [side[:edge] for side in whole["train"]]
    for split in SPLITS:
        for pixels, label in zip(*whole[split]):
            ids = pixels.astype(np.uint16) + Special.count
            yield split, {"input_ids": ids, "labels": int(label)}


def image(*, data: Any, cache: Any = None) -> Task:
    """Grey CIFAR-10, from its binary version or from strips of grey PNG; no class token."""
    source = locate(data)
    rows, content = partial(_rows, source), hashed([digest(path, cache) for path in _files(source)])
    return arena("image", rows, values=256, length=PIXELS, labels=LABELS, cache=cache, content=content)
