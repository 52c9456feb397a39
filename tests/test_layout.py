"""The shape of the package: who may import whom, what `import cosformer` loads, the README's map of files."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "cosformer"
FILES = sorted(p for p in PACKAGE.rglob("*.py"))

# What of ours a module may import, besides modules of its own folder. `ops` keeps its modules apart, too.
LAW = {
    "": {"nn", "ops", "hf"},
    "__main__": {""},  # the version; verbs are imported by name
    "reference": set(),
    "report": set(),
    "ops": {"ops.cosformer", "ops.linear"},
    "ops.cosformer": {"ops.checks", "ops.linear"},
    "ops.linear": {"ops.call", "ops.checks", "ops.operator", "ops.state"},
    "ops.state": {"ops.call", "ops.checks", "ops.operator"},
    "ops.operator": {"ops.call", "ops.checks"},  # backends are named there and imported when called
    "ops.checks": {"ops.call"},
    "ops._torch": {"ops.call", "ops.packing"},
    "ops._native": {"ops.call"},
    "ops.packing": {"ops.call"},
    "ops.call": set(),
    "mixers": {"ops", "ops.checks", "ops.linear"},
    "decay": set(),
    "nn": {
        "decay",
        "mixers",
        "ops",
        "ops.checks",
        "ops.operator",
    },  # the constructor checks what the operator would refuse later
    "hf": {"nn", "decay", "mixers", "ops"},
    "tasks": set(),
    "models": {"hf", "mixers", "tasks"},
    "train": {"models", "tasks"},
    "compare": {
        "bench",
        "bench.exactness",
        "bench.measure",
        "bench.models",
        "models",
        "report",
        "tasks",
        "train",
        "train.progress",
    },
    "generate": {"hf"},
    "picture": {"mixers", "report"},
    "info": {"", "ops.operator"},
    "bench": {"", "reference", "ops", "ops.operator", "mixers", "hf", "report"},
}
ONLY_IN = {
    "matplotlib": {"report"},
    "transformers": {"hf", "tasks", "models", "train", "compare", "generate", "bench"},
    "datasets": {"tasks"},
    "numpy": {"tasks"},
    "ctypes": {"ops._native"},
    "triton": set(),
}


def place(module: str) -> str:
    """The entry of the law that a module falls under."""
    return module if module in LAW else module.split(".")[0]


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(source: str, module: str, is_package: bool) -> tuple[set[str], set[str]]:
    """(our modules, top-level names of others) imported anywhere in the source, inside functions too."""
    ours, others = set(), set()
    here = module.split(".") if module else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            others |= {a.name.split(".")[0] for a in node.names if not a.name.startswith("cosformer")}
            ours |= {
                a.name.removeprefix("cosformer").lstrip(".")
                for a in node.names
                if a.name.startswith("cosformer")
            }
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and not (node.module or "").startswith("cosformer"):
                others.add(node.module.split(".")[0])
                continue
            if node.level == 0:
                base = node.module.removeprefix("cosformer").lstrip(".")
            else:
                up = node.level - (1 if is_package else 0)
                base = ".".join([*here[: len(here) - up], *([node.module] if node.module else [])])
            for a in node.names:  # `from . import x` may name a module
                sub = f"{base}.{a.name}".lstrip(".")
                file = PACKAGE / sub.replace(".", "/")
                ours.add(sub if file.with_suffix(".py").exists() or (file / "__init__.py").exists() else base)
    return ours, others


def broken(source: str, module: str, is_package: bool = False) -> list[str]:
    ours, others = imports(source, module, is_package)
    here = place(module)
    own = set() if here.startswith("ops") or here == "" else {here}
    wrong = [
        f"{module or '__init__'} imports {x or 'cosformer'}" for x in ours if place(x) not in LAW[here] | own
    ]
    return wrong + [f"{module} imports {x}" for x in others if x in ONLY_IN and here not in ONLY_IN[x]]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_law(path):
    assert place(name_of(path)) in LAW, f"{path} has no place in the import law; give it one"
    assert broken(path.read_text(), name_of(path), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ops._native", "from . import _torch"),
        ("ops.call", "from .operator import attend"),
        ("ops.state", "from .linear import linear_stream"),
        ("ops._torch", "import numpy"),
        ("ops.linear", "from ..reference import attention"),
        ("ops.cosformer", "def f():\n    import cosformer.nn"),
        ("nn", "import matplotlib.pyplot as plt"),
        ("report", "from .bench import Case"),
        ("nn", "from transformers import Trainer"),
        ("tasks.language", "from ..hf import CosformerConfig"),
        ("mixers.kernel", "from ..ops._torch import forward"),
        ("hf.decoder", "from ..reference import attention"),
    ],
)
def test_import_law_can_be_broken(module, source):
    assert broken(source, module) != []


def loaded_by(statement: str, *heavy: str) -> str:
    code = f"import sys\n{statement}\nprint([m for m in {list(heavy)!r} if m in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_is_light():
    heavy = ("transformers", "triton", "matplotlib", "numpy.testing", "pandas")
    assert loaded_by("import cosformer", *heavy) == "[]"
    assert loaded_by("import cosformer, json", "json") == "['json']"  # the test can tell


def test_contributing_says_where_libraries_are_imported():
    page = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    for library in ("transformers", "matplotlib", "datasets", "numpy"):
        found = re.search(
            rf"{library}(?: and \w+)? (?:is |are )?(?:imported )?only in ((?:`[\w.]+`(?:, | and )?)+)", page
        )
        assert found, f"CONTRIBUTING.md does not say where {library} may be imported"
        assert set(re.findall(r"`([\w.]+)`", found[1])) == ONLY_IN[library], library


def test_contributing_names_the_oldest_python():
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    assert oldest and f"needs Python {oldest[1]} or newer" in (ROOT / "CONTRIBUTING.md").read_text()


def test_every_file_says_its_job():
    for path in FILES:
        first = ast.get_docstring(ast.parse(path.read_text()))
        assert first, f"{path} does not say its job in its first line"


def file_map() -> str:
    """One line a file, from its first line; of the folders besides ops, one line each."""
    lines = []
    for path in FILES:
        title = path.relative_to(PACKAGE)
        if title.parts[0] != "ops" and len(title.parts) > 1:
            if title.name != "__init__.py":
                continue
            title = f"{title.parent}/"
        job = ast.get_docstring(ast.parse(path.read_text())).split("\n")[0].rstrip(".")
        lines.append(f"{title!s:<18} {job}")
    return "\n".join(lines)


def test_file_map_in_readme():
    """Run this file as a script to print the map."""
    block = re.search(r"```text\nsrc/cosformer\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block, "README.md has no file map"
    assert block.group(1).strip() == file_map().strip()


if __name__ == "__main__":
    print(file_map())
