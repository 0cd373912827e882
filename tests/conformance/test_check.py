"""Checking outside implementations: our tiers and the oracle pass, what is wrong is told."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner, Result

from kvq.cli import GROUPS, app
from kvq.conformance.manifest import INPUTS, MANIFEST
from tests.conformance.implementations import HERE

KERNEL_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODES = (
    *("int8", "fp8", "int4", "int4@first_implementation", "affine4", "lloyd3"),
    "lloyd4_w16",
)
INT4 = "int4_per_token_head.float32.32"


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["vectors", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, (result.output, result.exception)
    assert "Traceback" not in result.output
    return result


def error(*arguments: object) -> str:
    """The line that a command fails with, after what it said on the way."""
    result = run(*arguments, code=2)
    assert not result.stdout
    *before, line = result.stderr.splitlines()
    assert all(other.startswith("checking ") for other in before)
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vectors")
    modes = [f"--mode={mode}" for mode in MODES]
    result = run("export", "--out", made, *modes, "--head-dim", 32, "--rows", 40, "--json")
    described = json.loads(result.stdout)
    assert described["manifest"] == str(made / MANIFEST)
    assert (described["modes"], described["cases"], described["rows"]) == (7, 21, 40)
    return made


def check(folder: Path, *arguments: object, code: int = 0) -> dict[str, dict[str, Any]]:
    """What `kvq vectors check --json` tells, by the name of the vectors."""
    document = json.loads(run("check", folder, *arguments, "--json", code=code).stdout)
    assert document["agree"] == (code == 0)
    return {row["name"]: row for row in document["checked"]}


# What is right


def test_the_reference_agrees(folder: Path) -> None:
    found = check(
        folder,
        *("--impl", "kvq.reference:quantize", "--dequantize", "kvq.reference:dequantize"),
        *("--attention", "kvq.reference:paged_attention"),
    )
    assert len(found) == 21 * 4
    assert all(row["differ"] == 0 and row["first"] is None for row in found.values())
    assert all(row["rows"] == (36 if "output" in name else 40) for name, row in found.items())


@pytest.mark.parametrize("mode", ["int4", "lloyd4_w16"])
def test_the_kernels_agree(mode: str, folder: Path) -> None:
    found = check(
        folder,
        *("--impl", "kvq.kernels:quantize", "--dequantize", "kvq.kernels:dequantize"),
        *("--attention", "kvq.kernels:paged_attention", "--device", KERNEL_DEVICE),
        *("--mode", mode, "--dtype", "float16"),
    )
    assert len(found) == 4


def test_the_public_functions_agree(folder: Path) -> None:
    functions = ("--impl", "kvq:quantize", "--dequantize", "kvq:dequantize")
    assert len(check(folder, *functions, "--dtype", "bfloat16")) == 7 * 3


def test_the_oracle_agrees(folder: Path) -> None:
    functions = (
        *("--impl", f"{HERE}:from_the_oracle", "--dequantize", f"{HERE}:read_by_the_oracle"),
    )
    modes = [f"--mode={mode}" for mode in ("int8", "fp8", "int4", "affine4", "lloyd3")]
    assert len(check(folder, *functions, *modes)) == 5 * 3 * 3


def test_a_better_precision_agrees(folder: Path) -> None:
    check(folder, "--attention", f"{HERE}:double_precision")


def test_functions_get_copies(folder: Path) -> None:
    # Of the rows that the first mode was given, the second must not see what became of them.
    check(folder, "--impl", f"{HERE}:in_place", "--mode", "int8", "--mode", "fp8")


# What is wrong


def only_wrong(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {name: row for name, row in found.items() if row["differ"]}


def test_wrong_codes_of_three_bits(folder: Path) -> None:
    # 32 channels of 3 bits: bytes 0 to 7 hold the low crumbs, bytes 8 to 11 the high bits. Bit 5
    # of byte 9 is the high bit of channel 13; the top bit of byte 0 is of channel 3.
    wrong = ("--impl", f"{HERE}:flipped_codes", "--mode", "lloyd3", "--dtype", "float32")
    (row,) = only_wrong(check(folder, *wrong, code=1)).values()
    assert row["name"] == "lloyd3_per_token_head.float32.32.codes"
    assert (row["rows"], row["differ"], row["numbers"]) == (40, 3, 3)
    assert row["kinds"] == {"beside_ties": 2, "subnormal": 1}
    first, last = row["first"], row["last"]
    assert (first["row"], first["kind"], first["where"]) == (
        7,
        "beside_ties",
        "byte 9, channel 13",
    )
    assert (last["row"], last["kind"], last["where"]) == (27, "beside_ties", "byte 0, channel 3")
    codes = load_file(folder / "lloyd3_per_token_head.safetensors")[row["name"]][7]
    low = int(codes[3]) >> 2 & 3  # channel 13: byte 3, second crumb
    high = int(codes[9]) >> 5 & 1
    assert first["expected"] == f"0x{int(codes[9]):02x} (code {4 * high + low})"
    assert first["found"] == f"0x{int(codes[9]) ^ 0x20:02x} (code {4 * (1 - high) + low})"


def test_the_channel_is_of_the_byte_that_is_told(folder: Path) -> None:
    # The high bit of channel 0 is wrong as well, but it lies in byte 8; byte 7 comes first.
    wrong = ("--impl", f"{HERE}:codes_of_both_planes", "--mode", "lloyd3", "--dtype", "float32")
    (row,) = only_wrong(check(folder, *wrong, code=1)).values()
    assert (row["differ"], row["numbers"]) == (1, 2)
    assert row["first"]["where"] == "byte 7, channel 28"
    assert row["last"]["where"] == "byte 8, channel 0"


def test_wrong_codes_as_they_are_printed(folder: Path) -> None:
    wrong = ("--impl", f"{HERE}:flipped_codes", "--mode", "int8", "--dtype", "float32")
    text = run("check", folder, *wrong, code=1).stdout
    name = "int8_per_token_head.float32.32.codes"
    code = int(load_file(folder / "int8_per_token_head.safetensors")[name][7, 9])
    signed = [byte - 256 if byte > 127 else byte for byte in (code, code ^ 0x20)]
    line = (
        f"row 7 (beside_ties), byte 9, channel 9: expected 0x{code:02x} (code {signed[0]}), "
        f"found 0x{code ^ 0x20:02x} (code {signed[1]})"
    )
    assert line in text
    assert "last   row 27 (beside_ties), byte 0, channel 0" in text
    assert "rows   beside_ties 2, subnormal 1" in text


@pytest.mark.parametrize(
    ("mode", "fields", "first", "last"),
    [
        ("int8", {"sign": 1, "exponent": 0, "mantissa": 2}, ["mantissa"], ["sign", "mantissa"]),
        (
            "int4",
            {"sign": 1, "exponent": 0, "mantissa": 0, "zero-point": 2},
            ["zero-point"],
            ["sign", "zero-point"],
        ),
        ("lloyd4_w16", {"sign": 1, "exponent": 0, "mantissa": 2}, ["mantissa"], ["sign", "mant"]),
        (
            "affine4",
            {
                **{"scale sign": 0, "scale exponent": 0, "scale mantissa": 2},
                **{"smallest sign": 1, "smallest exponent": 0, "smallest mantissa": 0},
            },
            ["scale mantissa"],
            ["scale mantissa", "smallest sign"],
        ),
    ],
)
def test_wrong_words(
    mode: str, fields: dict[str, int], first: list[str], last: list[str], folder: Path
) -> None:
    wrong = ("--impl", f"{HERE}:flipped_words", "--mode", mode, "--dtype", "float32")
    (row,) = only_wrong(check(folder, *wrong, code=1)).values()
    assert row["name"] == f"{mode}_per_token_head.float32.32.words"
    assert (row["differ"], row["numbers"], row["fields"]) == (2, 2, fields)
    assert row["kinds"] == {"spike": 1, "rotated_sparse": 1}
    assert (row["first"]["row"], row["first"]["where"], row["last"]["row"]) == (5, "", 10)
    assert row["first"]["fields"] == first
    assert [name[:4] for name in row["last"]["fields"]] == [name[:4] for name in last]


def test_how_a_word_is_told(folder: Path) -> None:
    wrong = ("--impl", f"{HERE}:flipped_words", "--mode", "int4", "--dtype", "float32")
    (row,) = only_wrong(check(folder, *wrong, code=1)).values()
    words = load_file(folder / "int4_per_token_head.safetensors")[row["name"]]
    bits = int(words.view(torch.int32)[5])
    scale = torch.tensor(bits & -16, dtype=torch.int32).view(torch.float32).item()
    told = f"0x{bits:08x} (scale {scale:.9g}, zero-point {bits & 15})"
    assert row["first"]["expected"] == told
    assert row["first"]["found"] == told.replace(f"0x{bits:08x}", f"0x{bits ^ 1:08x}").replace(
        f"zero-point {bits & 15}", f"zero-point {bits & 15 ^ 1}"
    )


def test_wrong_values(folder: Path) -> None:
    wrong = ("--dequantize", f"{HERE}:flipped_values", "--mode", "int4", "--dtype", "float32")
    (row,) = only_wrong(check(folder, *wrong, code=1)).values()
    assert row["name"] == f"{INT4}.values"
    assert (row["differ"], row["numbers"]) == (2, 3)
    assert row["kinds"] == {"e4m3_ties": 1, "zeros": 1}
    assert row["fields"]["sign"] == 2
    assert row["first"]["where"] == "channel 3"
    assert "exponent" in row["first"]["fields"]
    assert row["last"]["where"] == "channel 2"
    assert row["last"]["expected"] == "0x00000000 (0)"
    assert row["last"]["found"] == "0x80000000 (-0)"
    assert row["last"]["fields"] == ["sign"]


def test_wrong_attention(folder: Path) -> None:
    wrong = ("--attention", f"{HERE}:shifted_attention", "--mode", "int4", "--dtype", "float32")
    (row,) = check(folder, *wrong, code=1).values()
    assert (row["name"], row["rows"], row["differ"]) == (f"{INT4}.output", 36, 5)
    heads = {"query head 1": 2, "query head 0": 1, "query head 2": 1, "query head 3": 1}
    assert row["kinds"] == heads
    assert row["first"]["kind"] == "token 3, query head 1"
    assert row["first"]["where"] == "channel 5"
    assert row["first"]["found"] == "0.01"
    assert row["first"]["expected"].startswith("an error of at most ")
    assert row["last"]["kind"] == "token 4, query head 3"
    assert row["last"]["found"] == "nan"


def test_attention_with_another_scale_differs_in_every_case(folder: Path) -> None:
    found = check(folder, "--attention", f"{HERE}:larger_scale", code=1)
    assert len(only_wrong(found)) == len(found) == 21


def test_keys_past_the_end_must_not_be_multiplied(folder: Path) -> None:
    wrong = ("--attention", f"{HERE}:multiplied_by_zero", "--mode", "int8", "--dtype", "float32")
    (row,) = check(folder, *wrong, code=1).values()
    assert row["differ"] == 36
    assert row["first"]["found"] == "nan"


def test_kinds_can_be_skipped(folder: Path) -> None:
    wrong = ("--impl", f"{HERE}:no_nan_rows", "--mode", "int8", "--dtype", "float32")
    found = only_wrong(check(folder, *wrong, code=1))
    assert [row["kinds"] for row in found.values()] == [{"not_finite": 2}]
    found = check(folder, *wrong, "--skip-kind", "not_finite")
    assert all(row["rows"] == 38 for row in found.values())
    # Rows keep their numbers when others before them are left out.
    wrong = ("--impl", f"{HERE}:flipped_codes", "--mode", "int8", "--dtype", "float32")
    found = only_wrong(check(folder, *wrong, "--skip-kind", "gaussian", code=1))
    assert [row["first"]["row"] for row in found.values()] == [7]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("only_codes", f"impl must return (codes, words), got Tensor for {INT4}"),
        ("integer_codes", f"{INT4}.codes must be uint8, got int32"),
        ("long_words", f"{INT4}.words must be as in the vectors, of shape [40], got [40, 1]"),
        ("array_codes", f"{INT4}.codes must be a torch.Tensor, got ndarray"),
        ("raises", f"impl must return, got RuntimeError for {INT4}: no such kernel"),
        ("nothing", f"impl must name a function of {HERE}, got 'nothing'"),
        ("not_a_function", f"impl must name a function of {HERE}, got 'not_a_function'"),
    ],
)
def test_implementations_that_cannot_be_checked(name: str, message: str, folder: Path) -> None:
    assert error("check", folder, "--impl", f"{HERE}:{name}", "--mode", "int4") == message


# Files of answers


@pytest.fixture
def answers(folder: Path) -> dict[str, Tensor]:
    """The right answers of one mode."""
    tensors = load_file(folder / "int4_per_token_head.safetensors")
    wanted = ("codes", "words", "values", "output")
    return {name: t for name, t in tensors.items() if name.rpartition(".")[2] in wanted}


def dumped(tmp_path: Path, tensors: dict[str, Tensor]) -> Path:
    path = tmp_path / "answers.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def test_answers_in_a_file(folder: Path, answers: dict[str, Tensor], tmp_path: Path) -> None:
    path = dumped(tmp_path, answers)
    assert len(check(folder, "--dump", path, "--mode", "int4")) == 12
    # The exported file itself holds the right answers.
    own = folder / "int4_per_token_head.safetensors"
    assert len(check(folder, "--dump", own, "--mode", "int4_per_token_head")) == 12


def test_some_parts_in_a_file(folder: Path, answers: dict[str, Tensor], tmp_path: Path) -> None:
    name = "int4_per_token_head.float16.32.values"
    path = dumped(tmp_path, {name: answers[name]})
    found = check(folder, "--dump", path, "--mode", "int4", "--dtype", "float16")
    assert list(found) == [name]


def test_wrong_answers_in_a_file(folder: Path, answers: dict[str, Tensor], tmp_path: Path) -> None:
    name = "int4_per_token_head.bfloat16.32.codes"
    answers[name][11, 15] ^= 0xF0
    found = only_wrong(check(folder, "--dump", dumped(tmp_path, answers), "--mode=int4", code=1))
    assert list(found) == [name]
    first = found[name]["first"]
    assert first == found[name]["last"]
    assert (first["row"], first["kind"]) == (11, "rotated_one_sided")
    assert first["where"] == "byte 15, channel 31"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{INT4}.words"), f"must hold {INT4}.words, got no such tensor"),
        (
            lambda t: [t.pop(name) for name in list(t) if not name.endswith("codes")],
            f"must hold {INT4}.words, got no such tensor",
        ),
        (lambda t: t.update({f"{INT4}.code": t.pop(f"{INT4}.codes")}), f"got '{INT4}.code'"),
        (
            lambda t: t.update({f"{INT4}.codes": t[f"{INT4}.codes"].int()}),
            f"{INT4}.codes must be uint8, got int32",
        ),
        (
            lambda t: t.update({f"{INT4}.words": t[f"{INT4}.words"][:7]}),
            f"{INT4}.words must be as in the vectors, of shape [40], got [7]",
        ),
        (
            lambda t: t.update({f"{INT4}.output": t[f"{INT4}.output"].int()}),
            f"{INT4}.output must be float32 or float16 or bfloat16 or float64, got int32",
        ),
        (lambda t: t.clear(), "must hold codes or words or values or output of a case, got none"),
    ],
)
def test_files_that_cannot_be_checked(
    change, message: str, folder: Path, answers: dict[str, Tensor], tmp_path: Path
) -> None:
    change(answers)
    path = dumped(tmp_path, answers)
    assert message in error("check", folder, "--dump", path, "--mode", "int4")


def test_files_that_are_none(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.safetensors"
    assert error("check", folder, "--dump", path).startswith(f"{path}: cannot be read")
    path.write_text("text")
    assert "not a valid safetensors file" in error("check", folder, "--dump", path)
    # All modes are checked unless some are named.
    own = folder / "int4_per_token_head.safetensors"
    assert "must hold int8_per_token_head.float32.32.codes" in error(
        "check", folder, "--dump", own
    )


# Arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "one of --dump, or some of --impl, --dequantize and --attention, must be given"),
        (["--impl=kvq:quantize", "--dump=x"], "must be given, got --impl, --dump"),
        (["--impl=kvq"], "impl must be module:function, got 'kvq'"),
        (["--impl=kvq:"], "impl must be module:function, got 'kvq:'"),
        (["--attention=no.such:f"], "attention must name a module that can be imported"),
        (["--impl=kvq:quantise"], "impl must name a function of kvq, got 'quantise'"),
        (["--impl=kvq:quantize", "--mode=int5"], "mode must be one of int8, fp8"),
        (["--impl=kvq:quantize", "--mode=int2"], "got 'int2_per_token_head'"),
        (["--impl=kvq:quantize", "--head-dim=64"], "head_dim must be one of 32, got 64"),
        (["--impl=kvq:quantize", "--dtype=float64"], "dtype must be one of float32, float16"),
        (["--impl=kvq:quantize", "--skip-kind=x"], "skip_kind must be one of gaussian"),
        (["--impl=kvq:quantize", "--device=cuda:99"], "device must be one that torch finds"),
    ],
)
def test_arguments_that_are_refused(arguments: list[str], message: str, folder: Path) -> None:
    if "--device=cuda:99" in arguments and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert message in error("check", folder, *arguments)


def test_all_kinds_skipped(folder: Path) -> None:
    kinds = json.loads((folder / MANIFEST).read_text())["kinds"]
    skipped = [f"--skip-kind={kind['name']}" for kind in kinds]
    assert "leave something to check" in error("check", folder, "--impl=kvq:quantize", *skipped)


def test_a_module_that_fails_to_import(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kvq_test_broken.py").write_text("def f(:\n")
    assert "(SyntaxError: " in error("check", folder, "--impl", "kvq_test_broken:f")
    # One in the working folder is found.
    (tmp_path / "kvq_test_sound.py").write_text(
        "from kvq import quantize as q\nf = lambda *a: q(*a)"
    )
    check(folder, "--impl", "kvq_test_sound:f", "--mode", "int8", "--dtype", "float32")


def test_export_refuses(tmp_path: Path) -> None:
    assert "head_dim must be divisible by 16" in error(
        "export", "--out", tmp_path, "--head-dim=72"
    )
    assert "mode must be one of" in error("export", "--out", tmp_path, "--mode", "int5")
    assert not list(tmp_path.iterdir())


# Vectors that are not as they were


@pytest.fixture
def copied(folder: Path, tmp_path: Path) -> Path:
    for name in (MANIFEST, INPUTS, "int4_per_token_head.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    return tmp_path


def test_changed_vectors(folder: Path, copied: Path) -> None:
    arguments = ("check", copied, "--impl", "kvq:quantize", "--mode")
    assert not run(*arguments, "int4").stdout.count(" 1 ")
    path = copied / "int4_per_token_head.safetensors"
    contents = bytearray(path.read_bytes())
    contents[-1] ^= 1
    path.write_bytes(contents)
    assert "must have the SHA-256 of the manifest, got another" in error(*arguments, "int4")
    assert "int8_per_token_head.safetensors: cannot be read" in error(*arguments, "int8")
    document = (copied / MANIFEST).read_text()
    (copied / MANIFEST).write_text(document.replace('"uint8"', '"int8"'))
    (copied / "int4_per_token_head.safetensors").write_bytes(
        (folder / "int4_per_token_head.safetensors").read_bytes()
    )
    assert "codes must be int8 [40, 16] as in the manifest, got uint8" in error(*arguments, "int4")
    contents = bytearray((copied / INPUTS).read_bytes())
    contents[-1] ^= 1
    (copied / INPUTS).write_bytes(contents)
    assert f"{INPUTS}: " in error(*arguments, "int4")
    assert f"{copied / 'none' / MANIFEST}: cannot be read" in error(
        "check", copied / "none", "--impl", "kvq:quantize"
    )


def test_inspect(folder: Path, copied: Path) -> None:
    def inspect(path: Path, code: int) -> dict[str, Any]:
        result = CliRunner().invoke(app, ["inspect", str(path), "--json"])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    found = inspect(folder / MANIFEST, 0)
    assert (found["schema"], found["rows"], found["cases"]) == ("kvq-vectors/1", 40, 21)
    assert {row["state"] for row in found["files"]} == {"as recorded"}
    tensors = inspect(folder / INPUTS, 0)["tensors"]
    assert {"name": "float16.32.x", "tensor": "[40, 32] float16"} in tensors
    (copied / "int4_per_token_head.safetensors").write_text("changed")
    states = {row["file"]: row["state"] for row in inspect(copied / MANIFEST, 1)["files"]}
    assert states[INPUTS] == "as recorded"
    assert states["int4_per_token_head.safetensors"] == "changed"
    assert states["int8_per_token_head.safetensors"] == "missing"


# Help


SUBCOMMANDS = [(group, name) for group, module in GROUPS.items() for name in module.COMMANDS]


def test_help_lists_the_group() -> None:
    assert "vectors" in CliRunner().invoke(app, ["--help"]).stdout
    text = run("--help").stdout
    assert "export" in text
    assert "check" in text


@pytest.mark.parametrize(("group", "name"), SUBCOMMANDS)
def test_help_has_examples_and_json(group: str, name: str) -> None:
    text = " ".join(CliRunner().invoke(app, [group, name, "--help"]).stdout.split())
    assert "--json" in text
    for example in GROUPS[group].EXAMPLES[name]:
        assert example in text


@pytest.mark.parametrize(("group", "name"), SUBCOMMANDS)
def test_examples_can_be_parsed(group: str, name: str) -> None:
    commands: Any = typer.main.get_command(app)
    for example in GROUPS[group].EXAMPLES[name]:
        program, first, second, *arguments = shlex.split(example)
        assert (program, first, second) == ("kvq", group, name)
        commands.commands[group].commands[name].make_context(name, arguments)
