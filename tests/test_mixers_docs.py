"""docs/adding-a-mechanism.md, executed: what it adds is found, keeps the contract, trains and generates."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from conftest import python_of

ROOT = Path(__file__).parents[1]
BLOCKS = python_of(ROOT / "docs" / "adding-a-mechanism.md")


def test_the_document_adds_mechanisms_that_keep_the_contract(tmp_path):
    kernel, use, fading, generating = BLOCKS
    package = tmp_path / "cosformer"
    shutil.copytree(ROOT / "src" / "cosformer", package, ignore=shutil.ignore_patterns("__pycache__"))
    # An editable install finds `cosformer` before the path does; in the copy's interpreter it must not.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__]\n"
    )
    (package / "mixers" / "squared.py").write_text(kernel)
    (package / "mixers" / "fading.py").write_text(fading)

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run("-c", use)
    run("-c", f"import torch\n{generating}")
    contract = ROOT / "tests" / "test_mixers.py"
    out = run(
        "-m",
        "pytest",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        str(contract),
        "--rootdir",
        str(tmp_path),
        "-k",
        "squared or fading",
    )
    assert int(re.search(r"(\d+) passed", out)[1]) > 40
