"""The rules of the house that no other tool checks; each failure names the file and the rule."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvq
from kvq import reference
from kvq.modes import MODES, short_name
from kvq.tier import Tier

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvq"
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 450
# Files that were looked at again and are one thing: how long each may be.
LONGER = {
    "kvq/analysis/plots.py": 550,
    "kvq/integrations/capture.py": 480,
    "kvq/kernels/attention_loop.py": 520,
    "kvq/kernels/quantize.py": 630,
    "kvq/modes.py": 580,
    "kvq/reference/lloyd_max.py": 720,
    "kvq/tier.py": 565,
}

# Rooms from the ground up: a room imports from lower lines and from itself. The rooms of one line
# do not know each other.
FLOORS = (
    {"rounding", "scale_word", "value_checks"},
    {"codebooks", "trellis"},
    {"modes"},
    {"checks"},
    {"distributed", "files", "records", "rotary", "tier"},
    {"activations", "codebook_files", "key_transforms"},
    {"activation_slices", "calibration_files"},
    {"reference", "kernels"},
    {"key_operators", "operators"},
    {"dispatch"},
    {"__init__"},
    {"data", "encoded_files"},
    {"analysis", "compat", "integrations"},
    {"conformance", "evaluation"},
    {"commands"},
    {"cli"},
    {"__main__"},
)
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}

# Libraries that live in a few places only.
HOMES = {
    "matplotlib": (
        "kvq/analysis/codebook_plot.py",
        "kvq/analysis/plots.py",
        "kvq/analysis/quality_plot.py",
        "kvq/analysis/report.py",  # asks its version
        "paper_figures/",
    ),
    "scipy": ("kvq/reference/laws.py", "kvq/reference/lloyd_max.py", "kvq/analysis/"),
    "triton": ("kvq/kernels/",),
    "pandas": ("kvq/analysis/", "kvq/evaluation/", "paper_figures/"),
    "pyarrow": ("kvq/analysis/",),
    "transformers": ("kvq/integrations/",),
    "lm_eval": ("kvq/integrations/",),
    "typer": ("kvq/cli.py", "kvq/commands/"),
    "rich": ("kvq/cli.py", "kvq/commands/"),
}
# The table of modes can be read without torch.
WITHOUT_TORCH = {"codebooks", "modes", "rounding", "scale_word", "trellis", "value_checks"}
# `import kvq` loads none of these.
HEAVY = ("matplotlib", "pandas", "pyarrow", "rich", "scipy", "transformers", "triton", "typer")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of everything that a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{relative(path)}:{node.lineno} imports relatively"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imported_room(name: str) -> str | None:
    """The room of `kvq.room...`; what is not a room is a name that `kvq` hands on.

    A bare `import kvq`, to read the version, is always allowed, and so is the version.
    """
    first, _, rest = name.partition(".")
    if first != "kvq" or rest in ("", "__version__"):
        return None
    inner = rest.partition(".")[0]
    return inner if inner in FLOOR else "__init__"


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_imports_go_down(path: Path) -> None:
    own = room(path)
    assert own in FLOOR, f"{relative(path)}: give this room a place in FLOORS"
    for line, name in imports(path):
        other = imported_room(name)
        if other is not None and other != own:
            assert FLOOR[other] < FLOOR[own], f"{relative(path)}:{line}: {own} imports {other}"


@pytest.mark.parametrize(
    "path", [*FILES, *sorted((ROOT / "paper_figures").rglob("*.py"))], ids=relative
)
def test_libraries_stay_at_home(path: Path) -> None:
    for line, name in imports(path):
        library = name.partition(".")[0]
        homes = HOMES.get(library, (relative(path),))
        assert relative(path).startswith(homes), f"{relative(path)}:{line} imports {library}"
        assert library != "torch" or path.parent != PACKAGE or room(path) not in WITHOUT_TORCH


def test_import_kvq_is_light() -> None:
    # What torch itself loads is not ours.
    program = (
        "import json, sys, torch; before = set(sys.modules); import kvq; "
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    loaded = {name.partition(".")[0] for name in json.loads(out.stdout)}
    assert not loaded & set(HEAVY)


@pytest.mark.parametrize("path", FILES, ids=relative)
def test_no_file_is_long(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGER.get(relative(path), LONGEST), f"{relative(path)} has {lines} lines"


def test_long_files_are_still_long() -> None:
    for name in LONGER:
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        assert len(lines) > LONGEST, f"{name} needs no line in LONGER"


@pytest.mark.parametrize(
    "path", [path for path in FILES if room(path) in ("reference", "kernels")], ids=relative
)
def test_a_tier_never_asks_for_a_mode_by_name(path: Path) -> None:
    names = {*MODES, *map(short_name, MODES)}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            assert node.value not in names, f"{relative(path)}:{node.lineno} names a mode"
        if isinstance(node, ast.Compare | ast.Match):
            for part in ast.walk(node.subject if isinstance(node, ast.Match) else node):
                named = isinstance(part, ast.Attribute) and part.attr == "name"
                assert not (named and ast.unparse(part).endswith("mode.name")), (
                    f"{relative(path)}:{node.lineno} compares the name of a mode"
                )


def tier_functions() -> list[str]:
    return [name for name in vars(Tier) if not name.startswith("_")]


@pytest.mark.parametrize("name", tier_functions())
def test_the_reference_is_a_tier(name: str) -> None:
    expected = inspect.signature(getattr(Tier, name))
    parameters = [p for p in expected.parameters.values() if p.name != "self"]
    actual = inspect.signature(getattr(reference, name))
    assert actual == expected.replace(parameters=parameters)


def public_functions(path: Path) -> dict[str, str]:
    """The public functions of a file (those of Triton aside) and their signatures, as text.

    What `__all__` hands on from another file of the room is one of them.
    """
    found, handed_on = {}, set()
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for node in body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            handed_on = set(ast.literal_eval(node.value))
    for node in body:
        if isinstance(node, ast.ImportFrom) and handed_on:
            other = ROOT / f"{str(node.module).replace('.', '/')}.py"
            names = handed_on & {alias.name for alias in node.names}
            if names and other.parent == path.parent:
                found |= {k: v for k, v in public_functions(other).items() if k in names}
        if (
            isinstance(node, ast.FunctionDef)
            and not node.name.startswith("_")
            and not any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
        ):
            returns = node.returns and ast.unparse(node.returns)
            found[node.name] = f"({ast.unparse(node.args)}) -> {returns}"
    return found


FACING = [
    path
    for path in sorted((PACKAGE / "kernels").glob("*.py"))
    if path.name != "__init__.py" and (PACKAGE / "reference" / path.name).exists()
]


@pytest.mark.parametrize("path", FACING, ids=relative)
def test_facing_files_have_the_same_signatures(path: Path) -> None:
    mirrored = public_functions(PACKAGE / "reference" / path.name)
    for name, signature in public_functions(path).items():
        if name in mirrored:
            assert signature == mirrored[name], f"{relative(path)}: {name}"


@pytest.mark.parametrize("name", tier_functions())
def test_a_facing_file_has_every_function_of_a_tier(name: str) -> None:
    source = Path(inspect.getfile(getattr(reference, name)))
    facing = PACKAGE / "kernels" / source.name
    assert not facing.exists() or name in public_functions(facing), relative(facing)


def test_the_face_defines_nothing() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    assert not [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert sorted(kvq.__all__) == sorted(set(kvq.__all__))
    assert all(hasattr(kvq, name) for name in kvq.__all__)
