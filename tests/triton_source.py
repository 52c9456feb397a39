"""A hash of what decides how the triton kernels compile: rows of benchmarks/triton.jsonl carry it."""

import hashlib

from cosformer.ops.triton.blocks import FILE

SOURCES = ("tiles.py", "kernels.py", "blocks.json")


def source() -> str:
    return hashlib.sha256(b"".join((FILE.parent / name).read_bytes() for name in SOURCES)).hexdigest()[:12]
