"""The lists of mutants cannot rot, and the makers of mutants make what they say."""

from __future__ import annotations

import ast
import json

import pytest

from tests.mutation.listed import equivalent, kernel_mutants, survivors
from tests.mutation.operators import mutants, sample
from tests.mutation.runner import ROOT
from tests.mutation.subsets import SUBSETS

RESULTS = ROOT / "results" / "mutation.json"


def made(text: str) -> list[str]:
    """The texts of all mutants of a text."""
    return [mutant.apply(text) for mutant in mutants("file.py", text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a < b", ["(a <= b)"]),
        ("a < b <= c", ["(a <= b <= c)", "(a < b < c)"]),
        ("a is not b", ["(a is b)"]),
        ("a + b", ["(a - b)"]),
        ("é * b", ["(é / b)"]),
        ("a and b", ["(a or b)"]),
        ("not a", ["(a)"]),
        ("-a", ["(a)"]),
        ("x = a if b else c", ["x = (c if b else a)"]),
        ("a = 3", ["a = (4)"]),
        ("a = 0.0", ["a = (1.0)"]),
        ("a = 1.5", ["a = (3.0)"]),
        ("a = True", ["a = (False)"]),
        ('a = "3f4c422a 3f4c422b"', ["a = ('3f4c422b 3f4c422b')", "a = ('3f4c422a 3f4c422a')"]),
        ('a = "text"', []),
        ("a = ScaleFit.UNBIASED", ["a = (ScaleFit.UNIT)"]),
        ("a = x.amin(d)", ["a = (x.amax(d))"]),
        ("a = min(x)", ["a = (max(x))"]),
        ("f(a)", ["pass"]),
        ("a |= b", ["pass"]),
        ("if a:\n    b", ["if (not (a)):\n    b"]),
        ("if a: raise E(f'{1}')", ["if (not (a)): raise E(f'{1}')", "if a: pass"]),
        ("def f(a: 'x' = b) -> 3:\n    'Say 1 + 1.'", []),
        ("@triton.jit(x=1)\ndef f(a):\n    return a + 1", []),
        ("@lru_cache(maxsize=4)\ndef f(a):\n    return a", []),
        ("assert a < b", []),
        ("import a", []),
    ],
)  # fmt: skip
def test_what_is_changed(text: str, expected: list[str]) -> None:
    assert made(text) == expected


def test_names_outlive_edits_elsewhere() -> None:
    text = "a = 1\nb = 2 + 2\n"
    names = [str(mutant) for mutant in mutants("f.py", text)]
    assert names == [
        "f.py: a = 1  [1 -> 2]",
        "f.py: b = 2 + 2  [2 + 2 -> 2 - 2]",
        "f.py: b = 2 + 2  [2 -> 3]",
        "f.py: b = 2 + 2  [2 -> 3 #2]",
    ]
    assert set(names) < {str(mutant) for mutant in mutants("f.py", "c = 7\n" + text)}


def test_a_sample_is_the_same_every_time_and_keeps_the_order() -> None:
    every = mutants("f.py", "".join(f"a{i} = {i}\n" for i in range(50)))
    chosen = sample(every, 20, 0)
    assert len(chosen) == 20
    assert chosen == sample(list(reversed(every)), 20, 0)[::-1]
    assert chosen == [mutant for mutant in every if mutant in chosen]
    assert chosen != sample(every, 20, 1)
    fewer = sample([mutant for mutant in every if "a7 " not in mutant.line], 20, 0)
    assert len(set(chosen) & set(fewer)) >= 19


def test_mutants_of_kernels_fit_the_kernels() -> None:
    found = kernel_mutants()
    assert len(found) >= 40
    assert len({str(mutant) for mutant in found}) == len(found)
    for mutant in found:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert mutant.apply(text) != text
        ast.parse(mutant.apply(text))
        assert mutant.file in SUBSETS


def test_files_and_tests_exist() -> None:
    for file, subset in SUBSETS.items():
        assert (ROOT / file).is_file(), file
        for argument in subset.tests:
            path, _, names = argument.removeprefix("--deselect=").partition("::")
            text = (ROOT / path).read_text(encoding="utf-8")
            assert not names or f"def {names.partition('[')[0]}(" in text, argument


def test_mutants_that_were_looked_at_are_mutants_and_have_a_reason() -> None:
    known = {str(mutant) for mutant in kernel_mutants()}
    for file in SUBSETS:
        text = (ROOT / file).read_text(encoding="utf-8")
        known |= {str(mutant) for mutant in mutants(file, text)}
    for name, reason in (equivalent() | survivors()).items():
        assert name in known, f"{name} is no mutant any more"
        assert reason.endswith(".")


def test_the_score_that_is_kept() -> None:
    total, *rows = json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]
    files = [row["file"] for row in rows]
    assert files == [file for file in SUBSETS if file in files]
    for row in (total, *rows):
        assert row["total"] == row["killed"] + row["equivalent"] + len(row["survivors"])
        assert all(survivor["reason"] for survivor in row["survivors"])
    for name in ("total", "killed", "equivalent"):
        assert total[name] == sum(row[name] for row in rows)
    assert total["total"] >= 300
    assert total["killed"] >= 0.95 * (total["total"] - total["equivalent"])
