"""Mutants of a Python file: one small change each, as a replacement of bytes.

Left alone are what the arithmetic does not depend on: annotations, docstrings, messages of errors,
decorators, assertions for the type checker; and the bodies of Triton kernels, which are no Python
(`kernel_mutants` has theirs).
"""

from __future__ import annotations

import ast
import copy
import hashlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Final, NamedTuple


class Mutant(NamedTuple):
    """One change. `str(mutant)` is its name in lists."""

    file: str
    #: The source line it is on, stripped; with `change` it outlives edits elsewhere in the file.
    line: str
    #: `old -> new`, and which of them where a file has several of one name.
    change: str
    #: The bytes of the file that `new` stands for.
    start: int
    end: int
    new: str

    def __str__(self) -> str:
        return f"{self.file}: {self.line}  [{self.change}]"

    def apply(self, text: str) -> str:
        """The file with the change."""
        data = text.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()


_COMPARISONS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_BINARY: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
    ast.MatMult: ast.Mult,
}
#: Functions that are easily mistaken for one another.
_NAMES: Final = {
    "min": "max",
    "max": "min",
    "amin": "amax",
    "amax": "amin",
    "argmin": "argmax",
    "argmax": "argmin",
    "minimum": "maximum",
    "maximum": "minimum",
    "clamp_min": "clamp_max",
    "clamp_max": "clamp_min",
    "any": "all",
    "all": "any",
    "floor": "ceil",
    "trunc": "round",
    "rint": "trunc",
    "cos": "sin",
    "sin": "cos",
    "sum": "prod",
}
#: The members of enumerations, each of which becomes the next.
_MEMBERS: Final = {
    "Grid": ("SIGNED", "UNSIGNED", "E4M3", "CODEBOOK", "TRELLIS"),
    "Normalization": (
        *("ABSMAX", "ZERO_RANGE", "CLAMPED_RANGE", "MIN_RANGE", "RMS", "SIGNED_MAX"),
    ),
    "Rounding": ("HALF_AWAY", "HALF_EVEN", "TOWARD_ZERO", "STOCHASTIC"),
    "ScaleFit": ("UNIT", "LEAST_SQUARES", "NORM_MATCH", "UNBIASED"),
    "StoredWord": ("FLOAT32", "FLOAT32_ZERO_POINT", "FLOAT16_PAIR", "FLOAT16"),
}
_NEXT: Final = {
    (kind, member): following
    for kind, members in _MEMBERS.items()
    for member, following in zip(members, members[1:] + members[:1], strict=True)
}
#: Float32 numbers as hexadecimal words: the codebooks.
_WORDS: Final = re.compile(r"[0-9a-f]{8}(?: [0-9a-f]{8})* ?")


def mutants(file: str, text: str) -> list[Mutant]:
    """All mutants of a file, in the order of the text.

    Args:
        file: Its name, which the mutants bear.
        text: What is in it.
    """
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = text.splitlines()
    found = []
    seen: Counter[tuple[str, str]] = Counter()
    tree = ast.parse(text)
    for node, old, new in sorted(
        _changes(tree), key=lambda change: (change[0].lineno, change[0].col_offset)
    ):
        line = lines[node.lineno - 1].strip()
        name = _describe(node, old, new)
        seen[line, name] += 1
        if seen[line, name] > 1:
            name += f" #{seen[line, name]}"
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = starts[node.lineno - 1] + node.col_offset
        end = starts[node.end_lineno - 1] + node.end_col_offset
        whole = f"({new})" if isinstance(node, ast.expr) else new
        found.append(Mutant(file, line, name, start, end, whole))
    return found


def sample(found: list[Mutant], number: int, seed: int) -> list[Mutant]:
    """So many of them, chosen by their names: an edit of the file leaves the others chosen."""

    def rank(mutant: Mutant) -> bytes:
        name = f"{seed} {mutant.file} {mutant.line} {mutant.change}"
        return hashlib.sha256(name.encode()).digest()

    chosen = set(sorted(found, key=rank)[:number])
    return [mutant for mutant in found if mutant in chosen]


_Change = tuple[ast.expr | ast.stmt, str, str]


def _describe(node: ast.AST, old: str, new: str) -> str:
    """`old -> new`; of a list of words only the one that differs."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        words = zip(old[1:-1].split(), new[1:-1].split(), strict=True)
        ((old, new),) = [pair for pair in words if pair[0] != pair[1]]
    return f"{old} -> {new}"


def _changes(node: ast.AST) -> Iterator[_Change]:
    """What is changed, its text and the new text, of a node and all below it."""
    if isinstance(node, ast.FunctionDef) and any(
        ast.unparse(decorator).startswith("triton.jit") for decorator in node.decorator_list
    ):
        return
    if isinstance(node, ast.stmt):
        yield from _of_statement(node)
    if isinstance(node, ast.expr):
        for new in _of_expression(node):
            yield node, ast.unparse(node), ast.unparse(new)
    for child in _parts(node):
        yield from _changes(child)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """The children of a node that the arithmetic depends on."""
    if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.Assert | ast.JoinedStr):
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
        return
    if isinstance(node, ast.AnnAssign) and ast.unparse(node.annotation) == "TypeAlias":
        return
    # `zip(..., strict=True)` is an assertion too.
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "ctx"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child


def _of_statement(node: ast.stmt) -> Iterator[_Change]:
    """Leave it out, or turn its condition over."""
    deletable = isinstance(node, ast.Raise | ast.AugAssign) or (
        isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )
    if deletable:
        yield node, ast.unparse(node).splitlines()[0], "pass"
    if isinstance(node, ast.If):
        yield node.test, ast.unparse(node.test), f"not ({ast.unparse(node.test)})"


def _of_expression(node: ast.expr) -> Iterator[ast.expr]:
    """The expressions that could stand there by mistake."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                new.ops = [*ops[:i], _COMPARISONS[type(op)](), *ops[i + 1 :]]
                yield new
        case ast.BinOp(op=op):
            new.op = _BINARY[type(op)]()
            yield new
        case ast.BoolOp(op=op):
            new.op = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield new
        case ast.UnaryOp(operand=operand):
            yield operand
        case ast.IfExp(body=body, orelse=orelse):
            new.body, new.orelse = orelse, body
            yield new
        case ast.Constant(value=value):
            for other in _other_constants(value):
                yield ast.Constant(other)
        case ast.Attribute(value=ast.Name(id=kind), attr=member) if (kind, member) in _NEXT:
            new.attr = _NEXT[kind, member]
            yield new
        case ast.Call(func=ast.Name(id=name) as function) if name in _NAMES:
            function.id = _NAMES[name]
            yield new
        case ast.Call(func=ast.Attribute(attr=name) as function) if name in _NAMES:
            function.attr = _NAMES[name]
            yield new


def _other_constants(value: object) -> Iterator[object]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        yield value + 1
    elif isinstance(value, float):
        yield 2 * value if value else 1.0
    elif isinstance(value, str) and _WORDS.fullmatch(value):
        words = value.split()
        for i, word in enumerate(words):
            changed = f"{int(word, 16) ^ 1:08x}"
            yield " ".join((*words[:i], changed, *words[i + 1 :]))
