"""Prepared data: folders named by the content and settings they come from, written whole or not at all."""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LAYOUT = 3  # part of every key: raise it when the stored format, or what a setting means, changes
LARGE = 1 << 26  # bytes from which a file's digest is cached; smaller files are hashed each time
TICK = 2.0  # seconds within which a file may change twice and keep its timestamps


def root(cache: str | os.PathLike | None = None) -> Path:
    """`cache`, or $COSFORMER_CACHE, or `cosformer` in the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache or os.environ.get("COSFORMER_CACHE") or Path(home, "cosformer")).expanduser()


def hashed(*what: Any) -> str:
    """A short hash of anything JSON can hold, the same on every machine."""
    text = json.dumps([LAYOUT, *what], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def digest(path: Path, cache: str | os.PathLike | None = None) -> str:
    """A hash of the file's content; large files' are cached under path, size, inode and timestamps."""
    stat = path.stat()
    seen = (str(path.resolve()), stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)
    kept = root(cache) / "digests" / hashed(*seen)
    if stat.st_size >= LARGE and kept.is_file():
        return kept.read_text()
    with open(path, "rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    if stat.st_size >= LARGE and time.time() - stat.st_ctime > TICK:
        kept.parent.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}")
        draft.write_text(found)
        draft.rename(kept)
    return found


def prepared(
    name: str, make: Callable[[Path], None], *, cache: str | os.PathLike | None = None, **settings
) -> Path:
    """The folder that `make` fills for these settings, made now if it does not exist yet.

    It is filled under a temporary name and renamed when complete, so readers never see it half full, and
    several processes may ask at once. `settings` must hold everything the result depends on: files by the
    digest of their content, never by path.
    """
    folder = root(cache) / f"{name}-{hashed(settings)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
    try:
        make(draft)
        (draft / "settings.json").write_text(json.dumps(settings))
        draft.chmod(0o755)  # mkdtemp makes private folders; a cache may be shared
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was first, with the same content
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder
