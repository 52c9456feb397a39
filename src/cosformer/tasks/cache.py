"""Prepared data: folders named by the content and settings they come from, written whole or not at all."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

LAYOUT = 2  # part of every key: raise it when what is written, or what a setting means, changes


def root(cache: str | os.PathLike | None = None) -> Path:
    """`cache`, or $COSFORMER_CACHE, or `cosformer` in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache or os.environ.get("COSFORMER_CACHE") or Path(home, "cosformer")).expanduser()


def digest(path: Path) -> str:
    """The file's content as one short string."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def prepared(
    name: str, make: Callable[[Path], None], *, cache: str | os.PathLike | None = None, **settings
) -> Path:
    """The folder `make` filled for these settings, made now if it is not there yet.

    It is filled under another name and renamed when complete, so no reader ever sees a part of it, and
    several processes may ask at once. `settings` must hold everything the result depends on: the content of
    files by digest, never by path.
    """
    text = json.dumps({"layout": LAYOUT, **settings}, sort_keys=True)
    folder = root(cache) / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        make(draft)
        (draft / "settings.json").write_text(text)
        draft.chmod(0o755)  # mkdtemp's folders are private, a shared cache is not
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first, and its folder holds the same
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder
