"""cosformer bench: time and memory beside the peers, measured in turns -> a table and rows of results."""

from .command import main

__all__ = ["main"]
