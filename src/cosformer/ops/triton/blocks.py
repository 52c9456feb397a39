"""The block sizes of the triton kernels, read from blocks.json: a table by size and device, no autotuner.

A row applies to keys and values up to its `size`, to operands of matrix products of `bits` bits (16:
bfloat16, 19: TF32, 32: exact float32, which needs more registers), and to any device with at least that much
`shared` memory, or only to `device` if named. The first row that applies is used. `cosformer bench --device
cuda --tune` puts the rows of a device on top.
"""

import json
from functools import cache
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("blocks.json")


class Tiles(NamedTuple):
    """How one kernel cuts D and E, and the warps and stages it runs with."""

    key: int
    value: int
    warps: int
    stages: int

    @property
    def launched(self) -> dict[str, int]:
        """Triton's launch options; fused multiply-adds are explicit, since the default changes."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}

    def within(self, D: int, E: int) -> "Tiles":
        """The tiles, no larger than these sizes need; a matrix product needs at least 16."""
        return self._replace(key=min(self.key, _power(D)), value=min(self.value, _power(E)))


class Blocks(NamedTuple):
    """The tokens of a chunk, how many steps `gather` takes for one, and the tiles of each kernel."""

    chunk: int
    steps: int
    gather: Tiles
    read: Tiles
    grad: Tiles


class Row(NamedTuple):
    """One line of the table."""

    device: str | None
    size: int
    bits: int
    shared: int
    blocks: Blocks


INTERPRETED = Blocks(32, 2, *(Tiles(16, 16, 4, 1) for _ in range(3)))  # small, so that tests need several


@cache
def rows() -> list[Row]:
    """The table, read once per process."""
    found = []
    for device, size, bits, shared, chunk, steps, *tiles in json.loads(FILE.read_text()):
        found.append(Row(device, size, bits, shared, Blocks(chunk, steps, *(Tiles(*t) for t in tiles))))
    return found


def put(row: Row) -> None:
    """Put a row on top of the table, replacing the one for the same case, if any."""
    rows()[:] = [row, *(other for other in rows() if other[:4] != row[:4])]
    blocks.cache_clear()


def save() -> None:
    """Write the table, one row a line."""
    lines = [json.dumps([*row[:4], *row.blocks]) for row in rows()]
    FILE.write_text("[\n" + ",\n".join(lines) + "\n]\n")


@cache
def blocks(D: int, E: int, bits: int, device: str, shared: int) -> Blocks:
    """The blocks of a call; `device` is the device's name, `shared` the shared memory of a program there."""
    found = next(
        row.blocks
        for row in rows()
        if max(D, E) <= row.size
        and bits == row.bits
        and shared >= row.shared
        and row.device in (None, device)
    )
    return fitted(found, D, E)


def fitted(found: Blocks, D: int, E: int) -> Blocks:
    return Blocks(found.chunk, found.steps, *(tiles.within(D, E) for tiles in found[2:]))


def _power(n: int) -> int:
    """The least power of two that is at least n, and at least 16."""
    return max(16, 1 << (n - 1).bit_length())
