"""Writes the pages of the API, one for each module of the package, when the site is built.

The pages hold directives that mkdocstrings fills in from the source, which is read and never run.
In the navigation of `mkdocs.yml` the entry `api/` stands for all of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PACKAGE: Final = Path(__file__).parents[2] / "kvq"
#: The entry of `mkdocs.yml` that the pages take the place of.
ENTRY: Final = "api/"
#: The command line has a page of its own, and data none.
NOT_HERE: Final = {"cli", "commands", "data", "__main__"}
#: One page for what it hands on: the rest is Triton, for which the reference is the text.
FACES: Final = {"kernels"}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages into the navigation."""
    for section in config.nav or []:
        for title, entries in section.items() if isinstance(section, dict) else ():
            if ENTRY in (entries if isinstance(entries, list) else ()):
                section[title] = ["api/index.md", *navigation(PACKAGE)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages to the files of the site."""
    files.append(File.generated(config, "api/index.md", content=_index()))
    for path in _modules(PACKAGE, everything=True):
        files.append(File.generated(config, _uri(path), content=page(path)))
    return files


def navigation(folder: Path) -> list[Any]:
    """The pages of a package: its own first, then one for each module, and packages nested."""
    entries: list[Any] = [{_name(folder): _uri(folder)}]
    for path in _modules(folder):
        nested = path.is_dir() and path.name not in FACES
        entries.append({_name(path): navigation(path) if nested else _uri(path)})
    return entries


def page(path: Path) -> str:
    """The page of a module: what it defines, and what it hands on in `__all__`."""
    return f"# {_name(path)}\n\n::: {_name(path)}\n"


def _index() -> str:
    """The first page: every module with the first sentence of its docstring."""
    lines = [("module", "what it is"), ("---", "---")]
    for path in _modules(PACKAGE, everything=True):
        target = _uri(path).removeprefix("api/")
        source = path / "__init__.py" if path.is_dir() else path
        text = ast.get_docstring(ast.parse(source.read_text(encoding="utf-8"))) or ""
        lines.append((f"[`{_name(path)}`]({target})", " ".join(text.partition("\n\n")[0].split())))
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return (
        "# API\n\nThese pages are made from the docstrings. `T` is the number of tokens, `H` of "
        "KV heads, `D` the head size and `B` the bytes of the codes of one row. A line "
        "*Exactness* says what is the same bit for bit, and where; a line *Source*, where a thing "
        f"comes from.\n\n{table}"
    )


def _modules(folder: Path, *, everything: bool = False) -> Iterator[Path]:
    """The modules and packages of a package; with everything, itself and those below as well."""
    if everything:
        yield folder
    for path in sorted(folder.iterdir()):
        package = (path / "__init__.py").exists()
        if path.stem.startswith("__") or path.stem in NOT_HERE:
            continue
        if package and everything and path.name not in FACES:
            yield from _modules(path, everything=True)
        elif package or path.suffix == ".py":
            yield path


def _name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def _uri(path: Path) -> str:
    inner = path.relative_to(PACKAGE)
    if path == PACKAGE:
        return "api/kvq.md"
    nested = path.is_dir() and path.name not in FACES
    return f"api/{inner}/index.md" if nested else f"api/{inner.with_suffix('.md').as_posix()}"
