"""The shape of the package: who may import whom, what `import cosformer` loads, the README's map of files."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "cosformer"
FILES = sorted(p for p in PACKAGE.rglob("*.py"))
LONGEST = 350  # lines per file

# The rooms that a room may import from.
LAW = {
    "": {"mixers", "nn", "ops"},  # imported on use
    "__main__": {""},  # the version; verbs are imported by name
    "reference": set(),
    "seal": set(),
    "results": set(),
    "report": {"results"},
    "ops": set(),
    "decay": {"ops"},
    "mixers": {"decay", "ops"},
    "layer": {"decay", "mixers", "ops"},
    "nn": {"decay", "layer", "mixers", "ops"},
    "hf": {"decay", "layer", "mixers", "ops"},
    "tasks": set(),
    "train": {"hf", "mixers", "seal", "tasks"},
    "bench": {"", "hf", "mixers", "ops", "reference", "report", "results"},
    "compare": {"bench", "layer", "mixers", "report", "results", "seal", "tasks", "train"},
    "generate": {"hf", "seal"},
    "picture": {"mixers", "report"},
    "info": {"", "ops"},
}
# Within a room a module may import those on earlier lines; a room's facade, its __init__, comes last.
# Mechanisms import the registry, which imports them in turn once it is complete.
ORDER = {
    "ops": [
        "call modes triton",
        "checks fades memory packing shard triton.blocks triton.parts triton.tiles",
        "triton.device triton.kernels",
        "operator _native _torch triton.run",
        "_rows trust",  # trust compares with torch
        "_triton",
        "convolution norm plan step",
        "state",
        "linear parallel",
        "cosformer",
    ],
    "mixers": [
        "blocks keys",
        "contract",
        "positions",
        "kernel lowrank lsh polynomial random softmax sparse",
        "forgetting",
    ],
    "hf": [
        "labels",
        "cache checks loss parallel pooling reach rows saved sizes",
        "interface",
        "configuration pretrained",
        "int8",
        "blocks",
        "step",
        "loop seq2seq stack",
        "decoder encoder",
    ],
    "tasks": [
        "cache contract",
        "metrics reading table tokens",
        "packing published recall source",
        "corpus generated image listops pathfinder texts",
        "classification language seq2seq",
    ],
    "train": [
        "alive checkpoints malloc models sharded",
        "progress settings",
        "parallel",
        "trainer",
        "build",
        "dryrun run",
        "cli",
    ],
    "bench": ["exactness measure", "mixers models operators tune", "parallel"],
    "compare": ["plan", "quality", "budget looks", "comparison"],
    "report": [
        "heatmap style",
        "cells chart table",
        "costs",
        "summary tables",
        "figures",
        "page",
    ],
}
ONLY_IN = {
    "matplotlib": {"report"},
    "jinja2": {"report"},
    "transformers": {"hf", "tasks", "train", "compare", "generate", "bench"},
    "datasets": {"tasks"},
    "numpy": {"tasks"},
    "ctypes": {"ops._native", "ops.memory", "train.malloc"},
    "triton": {f"ops.triton.{name}" for name in ("device", "kernels", "run", "tiles")},
}


def room_of(module: str) -> str:
    return module.split(".")[0]


def level_of(module: str) -> int:
    """The line of ORDER that a module is on; the facade comes after all."""
    room, _, name = module.partition(".")
    lines = [line.split() for line in ORDER.get(room, [])]
    return next((number for number, line in enumerate(lines) if name in line), len(lines) if not name else -1)


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
    room = room_of(module)
    outside = [x for x in ours if room_of(x) != room]
    wrong = [x for x in outside if room_of(x) not in LAW[room] or "._" in x]  # only ops may import a backend
    if room in ORDER:
        facade_first = module.startswith("mixers.")  # the registry is complete before its mechanisms
        inside = [x for x in ours if room_of(x) == room and x != module and not (facade_first and x == room)]
        wrong += [x for x in inside if level_of(x) >= level_of(module)]
    said = [f"{module or '__init__'} imports {x or 'cosformer'}" for x in wrong]
    return said + [
        f"{module} imports {x}" for x in others if x in ONLY_IN and not allowed(module, ONLY_IN[x])
    ]


def allowed(module: str, places: set[str]) -> bool:
    return module in places or room_of(module) in places


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_law(path):
    module = name_of(path)
    assert room_of(module) in LAW, f"{path} has no place in the import law; give it one"
    assert level_of(module) >= 0 or room_of(module) not in ORDER, f"{path} has no place in ORDER; give it one"
    assert broken(path.read_text(), name_of(path), path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("ops._native", "from . import _torch"),
        ("ops._triton", "import triton"),
        ("ops.triton.blocks", "from .run import forward"),
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
        ("hf.cache", "from .decoder import CosformerModel"),
        ("train.settings", "from .run import train"),
        ("mixers.softmax", "from .kernel import Kernel"),
    ],
)
def test_import_law_can_be_broken(module, source):
    assert broken(source, module) != []


# The extra of pyproject.toml that installs what a room imports; the others need torch alone.
EXTRA = {"ops": "gpu", "hf": "hf", "bench": "hf", "generate": "hf", "tasks": "tasks", "train": "train",
         "compare": "train", "report": "report"}  # fmt: skip
CALLED = {"PIL": "pillow"}  # imported name: installed name
ASKED_FOR = {"fla"}  # by a user, who is then told to install it


def brought_by(extra: str | None) -> set[str]:
    """What an extra installs, according to pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = set()
    for wanted in [*project["dependencies"], *project["optional-dependencies"].get(extra, [])]:
        name, inner = re.match(r"([\w-]+)(?:\[(\w+)\])?", wanted).groups()
        found |= brought_by(inner) if name == "cosformer" else {name}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_what_is_imported_is_declared(path):
    module = name_of(path)
    _, others = imports(path.read_text(), module, path.name == "__init__.py")
    needed = {CALLED.get(name, name) for name in others - sys.stdlib_module_names - ASKED_FOR}
    assert needed <= brought_by(EXTRA.get(room_of(module))), f"{module} needs what its extra does not bring"


def loaded_by(statement: str, *heavy: str) -> str:
    code = f"import sys\n{statement}\nprint([m for m in {list(heavy)!r} if m in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_is_light():
    heavy = ("transformers", "triton", "matplotlib", "numpy.testing", "pandas")
    assert loaded_by("import cosformer", "torch", "numpy", *heavy) == "[]"
    assert loaded_by("from cosformer import *", *heavy) == "[]"
    assert loaded_by("import cosformer, json", "json") == "['json']"  # the test can fail


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


def test_the_oldest_libraries_are_those_that_are_tested():
    """What pyproject.toml admits is what `make test-oldest` installs."""
    tested = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints-oldest.txt").read_text(), re.M))
    admitted = re.search(r"^hf = (\[.*?\])", (ROOT / "pyproject.toml").read_text(), re.M)
    assert admitted
    floors = dict(word.split(">=") for word in ast.literal_eval(admitted[1]))
    assert floors == {name: tested[name] for name in floors}
    page = (ROOT / "docs" / "hugging-face.md").read_text()
    assert f"transformers {floors['transformers']} is the oldest supported version" in page


def test_every_file_says_its_job():
    for path in FILES:
        first = ast.get_docstring(ast.parse(path.read_text()))
        assert first, f"{path} does not say its job in its first line"


def test_no_file_is_too_long_to_hold_in_the_head():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_tests_share_their_helpers():
    """In conftest.py, judge.py and interpreter.py; helpers for Triton alone have files of their own."""
    for path in sorted(ROOT.glob("tests/test_*.py")):
        _, others = imports(path.read_text(), "tests", False)
        ours = {name for name in others if (ROOT / "tests" / f"{name}.py").exists()}
        assert {n for n in ours if "triton" not in n} <= {"conftest", "judge", "interpreter"}, path.name


def file_map() -> str:
    """One line for each file and folder of the package, from its first line."""
    lines = []
    for path in FILES:
        title = path.relative_to(PACKAGE)
        if len(title.parts) > 1:
            if title.parts[1:] != ("__init__.py",):
                continue
            title = f"{title.parent}/"
        job = ast.get_docstring(ast.parse(path.read_text())).split("\n")[0].rstrip(".")
        lines.append(f"{title!s:<12} {job}")
    return "\n".join(lines)


def test_file_map_in_readme():
    """Run this file as a script to print the map."""
    block = re.search(r"```text\nsrc/cosformer\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert block, "README.md has no file map"
    assert block.group(1).strip() == file_map().strip()


def room_map() -> str:
    """The files of each room, in their order."""
    return "\n".join(f"| `{room}` | {' > '.join(levels)} |" for room, levels in ORDER.items())


def test_architecture_names_what_is_there():
    """The walks name files and definitions that exist; the tables of rooms are LAW and ORDER."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    places = re.findall(r"`([\w./]+): (\w+)`", page)
    assert len(places) > 12
    for file, name in places:
        text = (PACKAGE / file).read_text()
        assert re.search(rf"\b(?:def|class|void|int|inline void) {name}\b", text), f"{file} has no {name}"
    rows = re.findall(r"^\| `(\w+)(?:\.py|/)` \|.*\| ([^|]+) \|$", page, re.M)
    small = {"", "__main__", "generate", "picture", "info"}
    assert {room: {*re.findall(r"`(\w+)`", knows)} for room, knows in rows} == {
        room: LAW[room] - {""} for room in LAW if room not in small
    }
    assert room_map() in page, "run this file as a script to print the table"


if __name__ == "__main__":
    print(file_map(), room_map(), sep="\n\n")
