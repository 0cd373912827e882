"""What every command refuses: at least one line for each of its options.

A new command or option needs a line here; `test_commands.py` names what has none.
"""

# A line of a table is a line here.
# ruff: noqa: E501

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.bad_input.command_table import Line, bad

MODE = "mode must be one of int8, fp8, int4, ..., got"
READ = "cannot be read (No such file or directory)"
FILE = "must be the path of a file, got the folder"
PLACE = "must be where files can be written, got {under} under {text}"
DTYPES = "must be one of 'float32', 'float16', 'bfloat16', got"
NO_VALUE = "does not take a value"


def flag(option: str, before: str = "") -> Line:
    """A flag takes no value."""
    return bad(option, f"{before} {option}=3".strip(), f"Option '{option}' {NO_VALUE}")


def no_number(option: str, before: str = "") -> Iterator[Line]:
    """What typer itself refuses, each release in its own words."""
    for value in ("x", "''"):
        yield bad(option, f"{before} {option} {value}", f"Invalid value for '{option}': ")


def at_least(option: str, least: int, before: str = "") -> Iterator[Line]:
    """A number that is too small, and what is none."""
    name = option.removeprefix("--").replace("-", "_")
    for value in (least - 1, least - 2):
        yield bad(
            option, f"{before} {option} {value}", f"{name} must be at least {least}, got {value}"
        )
    yield from no_number(option, before)


def modes(option: str, before: str = "") -> Iterator[Line]:
    """Names that no mode has."""
    for value in ("int5", "INT4", "''"):
        shown = "" if value == "''" else value
        yield bad(option, f"{before} {option} {value}".strip(), f"{MODE} '{shown}'")


def outputs(option: str, before: str) -> Iterator[Line]:
    """Where no file can be written."""
    name = option.removeprefix("--")
    yield bad(option, f"{before} {option} {{folder}}".strip(), f"{name} {FILE} {{folder}}")
    yield bad(option, f"{before} {option} {{under}}".strip(), f"{name} {PLACE}")
    yield bad(option, f"{before} {option} ''".strip(), f"{name} {FILE} .")


def inputs(option: str, before: str = "") -> Iterator[Line]:
    """Files that are none of ours, or of another kind."""
    for name, reason in (
        ("missing", READ),
        ("folder", "cannot be read (Is a directory)"),
        ("empty", "is empty"),
        ("text", "not a valid safetensors file (...)"),
        ("pickle", "is a pickle or a zip archive, which is never loaded"),
        ("deep", "not a valid safetensors file (...)"),
    ):
        given = f"{before} {{{name}}}" if option == "file" else f"{before} {option} {{{name}}}"
        yield bad(option, given.strip(), f"{{{name}}}: {reason}")


def of_schema(option: str, before: str, wanted: str, given: str, found: str) -> Line:
    """A file of ours, but of another kind."""
    return bad(
        option,
        f"{before} {option} {{{given}}}".strip(),
        f"{{{given}}}: schema must be kvq-{wanted}/1, got 'kvq-{found}/1'",
    )


def on_a_model(rest: str) -> Iterator[Line]:
    """The options of what runs a model on a text; `rest` is what else the command needs."""
    model, text = "--model {missing}", "--text {text}"
    yield bad(
        "--model",
        f"{text} {rest} {model}",
        "model must be a folder or a .gguf file on disk, got {missing}",
    )
    yield bad(
        "--model",
        f"{text} {rest} --model {{text}}",
        "model must be a folder or a .gguf file on disk, got {text}",
    )
    yield bad(
        "--model",
        f"{text} {rest} --model {{folder}}",
        "model must hold safetensors or GGUF weights, got {folder}",
    )
    yield bad(
        "--model",
        f"{text} {rest} --model {{model}}",
        "model must be one that transformers can load, got {model} (...)",
    )
    yield bad(
        "--model",
        f"{text} {rest} --model {{gguf}}",
        "model must be one that transformers can load, got {gguf} (...)",
    )
    yield bad(
        "--text",
        f"{model} {rest} --text {{missing}}",
        "text must be a file that can be read, got {missing} (No such file or directory)",
    )
    yield bad(
        "--text",
        f"{model} {rest} --text {{folder}}",
        "text must be a file that can be read, got {folder} (Is a directory)",
    )
    yield bad(
        "--text", f"{model} {rest} --text {{latin}}", "text must be UTF-8, got {latin} (...)"
    )
    base = f"{model} {text} {rest}"
    for value in ("gpu", "cuda:99", "meta", "''"):
        shown = "" if value == "''" else value
        rule = "that torch knows" if value in ("gpu", "''") else "that torch finds"
        yield bad(
            "--device", f"{base} --device {value}", f"device must be one {rule}, got '{shown}'"
        )
    for value in ("float64", "int8", "''", "Float32"):
        shown = "" if value == "''" else value
        yield bad("--dtype", f"{base} --dtype {value}", f"dtype {DTYPES} '{shown}'")
    yield bad(
        "--gguf-file",
        f"{text} {rest} --model {{folder}} --gguf-file x.gguf",
        "gguf_file must be that of a .gguf file in the folder, got 'x.gguf'",
    )
    yield bad(
        "--gguf-file",
        f"{text} {rest} --model {{folder}} --gguf-file ''",
        "gguf_file must be that of a .gguf file in the folder, got ''",
    )
    yield bad(
        "--gguf-file",
        f"{text} {rest} --model {{gguf}} --gguf-file x.gguf",
        "gguf_file must be left out with a .gguf file as model, got x.gguf",
    )


def recipes(before: str) -> Iterator[Line]:
    """Texts that are no recipe."""
    for text, message in (
        ("int5", f"{MODE} 'int5'"),
        ("''", f"{MODE} ''"),
        ("k=int4", "recipe must have k= and v=, got 'k=int4'"),
        ("k=int4,v=int5", f"{MODE} 'int5'"),
        ("k=int4,v=int4,first=-1", "recipe must be a mode, or parts among ..., got 'first=-1' in"),
        ("k=int4,v=int4,first=x", "recipe must be a mode, or parts among ..., got 'first=x' in"),
        ("k=int4,v=int4,center=mean", "recipe must be ..., got 'center=mean' in"),
        ("k=int4,k=int8,v=int4", "recipe must name a part once, got 'k=int8' in"),
        ("k=int4,v=int4,first=1,first=2", "recipe must name a part once, got 'first=2' in"),
        ("int4@sideways", "rounding must be one of 'half_away', ..., got 'sideways'"),
        ("int2@half_even", "mode must round to take another rounding, got int2"),
        ("lloyd3+{missing}", "{missing}: " + READ),
        ("int4+{book}", "mode must be a codebook mode to take another codebook, got int4"),
    ):
        yield bad("--recipe", f"{before} --recipe {text}", message)


NEEDS = "--model {missing} --text {text}"
CAPTURE = f"{NEEDS} --out {{out}}"
ENCODE = "{acts} --out {out}"

LINES: Final[dict[str, list[Line]]] = {
    "modes": [
        *at_least("--head-dim", 1),
        flag("--markdown"),
        flag("--families"),
        bad("--families", "--json --families", "families must be left out with --json, got True"),
        bad("--into", "--into {missing}", "into must be a text file, got {missing} (No such file or directory)"),
        bad("--into", "--into {folder}", "into must be a text file, got {folder} (Is a directory)"),
        bad("--into", "--into {latin}", "into must be a text file, got {latin} (...)"),
        bad("--into", "--into {text}", "text must hold the lines <!-- kvq modes: begin --> and ..., got one without"),
        bad("--into", "--into {text} --json", "json must be left out with --into, got True"),
        bad("--markdown", "--into {text} --markdown", "markdown must be left out with --into, got True"),
        bad("--markdown", "--json --markdown", "markdown must be left out with --json, got True"),
    ],
    "fit": [
        bad("--levels", "--law norm", "Missing option '--levels'"),
        *no_number("--levels", "--law norm"),
        *(
            bad("--levels", f"--law norm --levels {n}", f"num_levels must be 2 to 256, got {n}")
            for n in (-1, 0, 1, 257)
        ),
        bad("--law", "--levels 4", "either --law or --from must be given"),
        bad("--law", "--levels 4 --law norm --from {acts}", "either --law or --from must be given"),
        bad("--law", "--levels 4 --law ''", "law must be a name with numbers, ..., got ''"),
        bad("--law", "--levels 4 --law normal", "law must be sphere, ..., got 'normal'"),
        bad("--law", "--levels 4 --law t(df=1)", "law must have a finite variance above zero, got t(df=1)"),
        *(line for line in inputs("--from", "--levels 4") if "{folder}" not in line.arguments),
        bad("--from", "--levels 4 --from {folder}", "files must be at least one, got none in {folder}"),
        of_schema("--from", "--levels 4", "activations", "book", "codebook"),
        *modes("--base", "--levels 4 --from {acts}"),
        *modes("--base", "--levels 4 --law norm"),
        bad("--base", "--levels 4 --from {acts} --base int4", "base must be a codebook mode, got int4"),
        bad("--side", "--levels 4 --from {acts} --side query", "side must be one of key, value, got query"),
        bad("--side", "--levels 4 --law norm --side key", "side must be left out with --law, got key"),
        bad("--layer", "--levels 4 --from {acts} --layer 1", "layer must be one of 0, 3, got 1"),
        bad("--layer", "--levels 4 --from {acts} --layer -1", "layer must be one of 0, 3, got -1"),
        *no_number("--layer", "--levels 4 --from {acts}"),
        bad("--layer", "--levels 4 --law norm --layer 0", "layer must be left out with --law, got 0"),
        bad("--head", "--levels 4 --from {acts} --head 2", "head must be one of 0, 1, got 2"),
        bad("--head", "--levels 4 --law norm --head 0", "head must be left out with --law, got 0"),
        *no_number("--head", "--levels 4 --from {acts}"),
        *inputs("--calibration", "--levels 4 --from {acts}"),
        of_schema("--calibration", "--levels 4 --from {acts}", "calibration", "book", "codebook"),
        bad("--calibration", "--levels 4 --from {acts} --calibration {calibration}", "calibration must have every layer, got none for layer 0"),
        bad("--calibration", "--levels 4 --law norm --calibration {calibration}", "calibration must be left out with --law, got {calibration}"),
        flag("--weigh", "--levels 4 --law norm"),
        bad("--weigh", "--levels 4 --law norm --weigh", "weigh must be left out with --law, got True"),
        bad("--weigh", "--levels 4 --law norm --no-weigh", "weigh must be left out with --law, got False"),
        flag("--symmetric", "--levels 4 --law norm"),
        bad("--symmetric", "--levels 4 --law signed_max(64) --symmetric", "symmetric must be False for a law that is not symmetric"),
        bad("--name", "--levels 4 --law norm --name a/b", "name must be made of letters, digits, ..., got 'a/b'"),
        bad("--name", "--levels 4 --law norm --name ''", "name must be made of letters, digits, ..., got ''"),
        *outputs("--out", "--levels 4 --law norm"),
        bad("more", "--levels 4 {missing}", "{missing}: " + READ),
        bad("more", "--levels 4 --law norm {acts}", "either --law or --from must be given"),
        bad("--resume", "--levels 4 --from {acts} --resume {text}", "resume must be the path of a folder, got the file {text}"),
        bad("--resume", "--levels 4 --from {acts} --resume {under}", "resume must be where files can be written, got {under}"),
        bad("--resume", "--levels 4 --law norm --resume {out}", "resume must be left out with --law, got {out}"),
        bad("--device", "--levels 4 --law norm --device gpu", "device must be one that torch knows, got 'gpu'"),
        bad("--device", "--levels 4 --from {acts} --device cuda:99", "device must be one that torch finds, got 'cuda:99'"),
        bad("--out", "--levels 4 --law norm --out {out}.png", "out must be another file than the picture, got {out}.png for both"),
        *outputs("--picture", "--levels 4 --law norm"),
        bad("--picture", "--levels 4 --law norm --picture {out}", "picture must end in one of ..., got {out}"),
        bad("--picture", "--levels 4 --law norm --picture {out}.xyz", "picture must end in one of ..., got {out}.xyz"),
        bad("--picture", "--levels 4 --law norm --out {out}.svg --picture {out}.svg", "out must be another file than the picture, got {out}.svg for both"),
    ],
    "report": [
        *inputs("--input", "--out {out}"),
        of_schema("--input", "--out {out}", "activations", "book", "codebook"),
        bad("--out", "--out {text}", "out must be the path of a folder, got the file {text}"),
        bad("--out", "--out {under}", "out must be where files can be written, got {under}"),
        *modes("--mode", "--out {out}"),
        bad("--mode", "--out {out} --mode int4 --mode int4", "modes must have different names, got 'int4_per_token_head' twice"),
        bad("--mode", "--out {out} --replay {missing} --mode int4", "mode must be left out with --replay, got int4"),
        *inputs("--codebook", "--out {out}"),
        bad("--codebook", "--out {out} --replay {missing} --codebook {book}", "codebook must be left out with --replay, got {book}"),
        *modes("--base", "--out {out}"),
        bad("--base", "--out {out} --codebook {book} --base int4", "mode must be a codebook mode to take another codebook, got int4"),
        *no_number("--seed", "--out {out}"),
        bad("--seed", "--out {out} --seed -1", "seed must be at least 0, got -1"),
        bad("--seed", f"--out {{out}} --seed {2**63}", f"seed must be at most {2**63 - 1}, got {2**63}"),
        bad("--seed", "--out {out} --replay {missing} --seed 3", "seed must be left out with --replay, got 3"),
        bad("--replay", "--out {out} --replay {missing}", "{missing}: " + READ),
        bad("--replay", "--out {out} --replay {folder}", "{folder}: cannot be read (Is a directory)"),
        bad("--replay", "--out {out} --replay {acts}", "{acts}: not valid JSON (...)"),
        bad("--replay", "--out {out} --replay {other}", "{other}: schema must be kvq-report/1, got 'other/1'"),
        bad("--replay", "--out {out} --replay {list}", "{list}: schema must be kvq-report/1, got None"),
        bad("--replay", "--out {out} --replay {deep}", "{deep}: not valid JSON (...)"),
        *(
            bad("--tolerance", f"--out {{out}} --tolerance {value}", f"tolerance must be finite and not negative, got {value}")
            for value in ("nan", "inf", "-0.1")
        ),
        bad("--tolerance", "--out {out} --tolerance 0.1", "tolerance must be left out without --replay, got 0.1"),
        bad("--tolerance", "--out {out} --tolerance x", "Invalid value for '--tolerance': "),
    ],
    "predict": [
        *inputs("--input"),
        bad("--input", "--input {alone}", "layer must have queries to predict its scores, got none"),
        *modes("--mode"),
        bad("--mode", "--mode int4 --mode int4", "modes must have different names, got 'int4_per_token_head' twice"),
        *outputs("--csv", ""),
    ],
    "recommend": [
        *inputs("--input", "--bits 4"),
        bad("--input", "--bits 4 --input {alone}", "layer must have queries to predict its scores, got none"),
        *(
            bad("--bits", f"--bits {value}", f"bits must be positive and finite, got {value}")
            for value in ("0.0", "-1.0", "nan", "inf")
        ),
        bad("--bits", "--bits x", "Invalid value for '--bits': "),
        bad("--bits", "--input {acts} --mode int8 --bits 2", "bits must be at least 9 for the modes given, got 2"),
        bad("--bits", "''", "unexpected extra argument"),
        *modes("--mode", "--bits 4"),
        bad("--mode", "--bits 4 --mode int4 --mode int4", "modes must have different names, got 'int4_per_token_head' twice"),
        bad("--mode", "--check {other} --mode int4", "mode must be left out with --check, got int4"),
        bad("--check", "--check {other} --bits 4", "one of --bits and --check must be given, and not both"),
        bad("--check", "--check {missing}", "{missing}: " + READ),
        bad("--check", "--check {folder}", "{folder}: cannot be read (Is a directory)"),
        bad("--check", "--check {text}", "{text}: not a result of kvq eval (...)"),
        bad("--check", "--check {other}", "{other}: schema must be kvq-eval/1, got 'other/1'"),
        bad("--check", "--check {list}", "{list}: not a result of kvq eval (...)"),
        bad("--check", "--check {number}", "{number}: not a result of kvq eval (...)"),
        bad("--check", "--check {deep}", "{deep}: not a result of kvq eval (...)"),
        bad("--check", "--check {latin}", "{latin}: not a result of kvq eval (...)"),
        *outputs("--out", "--check {other}"),
        bad("--out", "--bits 4 --out {out}", "out must be left out with --bits, got {out}"),
    ],
    "capture": [
        *on_a_model("--out {out}"),
        *outputs("--out", NEEDS),
        *(
            bad("--layers", f"{CAPTURE} --layers {value}", f"layers must be comma-separated integers, got '{shown}'")
            for value, shown in (("0;4", "0;4"), ("''", ""), ("1.5", "1.5"), ("0,", "0,"), ("x", "x"))
        ),
        *at_least("--tokens", 2, CAPTURE),
        *at_least("--first-position", 0, CAPTURE),
        *at_least("--queries", 0, CAPTURE),
        bad("--compute-dtype", f"{CAPTURE} --compute-dtype float64", f"compute_dtype {DTYPES} 'float64'"),
        flag("--require-rotary", CAPTURE),
    ],
    "calibrate": [
        *on_a_model("--out {out}"),
        *outputs("--out", NEEDS),
        *at_least("--windows", 1, CAPTURE),
        *at_least("--tokens", 1, CAPTURE),
    ],
    "encode": [
        *inputs("file", "--mode int4 --out {out}"),
        bad("file", "{book} --mode int4 --out {out}", "{book}: schema must be kvq-activations/1, got 'kvq-codebook/1'"),
        *outputs("--out", "{acts} --mode int4"),
        bad("--out", "{acts} --mode int4", "Missing option '--out'"),
        bad("--mode", ENCODE, "mode must be given, with --mode or --key-mode, got nothing"),
        *modes("--mode", ENCODE),
        *modes("--key-mode", f"{ENCODE} --mode int4"),
        bad("--key-mode", f"{ENCODE} --value-mode int4", "mode must be given, with --mode or --key-mode, got nothing"),
        *modes("--value-mode", f"{ENCODE} --mode int4"),
        *inputs("--codebook", f"{ENCODE} --mode lloyd3"),
        bad("--codebook", f"{ENCODE} --mode int4 --codebook {{book}}", "mode must be a codebook mode to take another codebook, got int4"),
        *inputs("--key-codebook", f"{ENCODE} --mode lloyd3"),
        of_schema("--value-codebook", f"{ENCODE} --mode lloyd3", "codebook", "acts", "activations"),
        bad("--tier", f"{ENCODE} --mode int4 --tier abacus", "Invalid value for '--tier': ...'abacus' is not one of 'reference', 'kernels'"),
        bad("--tier", f"{ENCODE} --mode int4 --tier ''", "Invalid value for '--tier': ...'' is not one of 'reference', 'kernels'"),
    ],
    "inspect": [
        bad("file", "{missing}", "{missing}: " + READ),
        bad("file", "{folder}", "{folder}: cannot be read (Is a directory)"),
        bad("file", "{empty}", "{empty}: is empty"),
        *(bad("file", f"{{{name}}}", f"{{{name}}}: ...") for name in ("text", "latin", "pickle", "list", "number", "other", "deep", "gguf")),
        bad("file", "''", ".: cannot be read (Is a directory)"),
    ],
    "parity": [
        *modes("--mode"),
        *no_number("--rows"),
        bad("--rows", "--rows -1", "rows must not be negative, got -1"),
        flag("--interpreter"),
        *at_least("--jobs", 1),
        bad("--out", "--out {folder}", f"out {FILE} {{folder}}"),
        bad("--out", "--out {under}", f"out {PLACE}"),
        *(
            bad("--out", f"--out {{{name}}}", f"{{{name}}}: not a result of kvq parity (...)")
            for name in ("text", "list", "number", "empty", "deep", "latin")
        ),
        bad("--out", "--out {other}", "{other}: schema must be kvq-parity/1, got 'other/1'"),
    ],
    "bench": [
        bad("what", "''", "what must be write or decode, got ''"),
        bad("what", "read", "what must be write or decode, got 'read'"),
        *modes("--mode", "write"),
        *at_least("--tokens", 1, "write"),
        bad("--tokens", "decode --tokens 16", "tokens must be left out with decode, got 16"),
        flag("--more", "decode"),
        bad("--more", "write --more", "more must be left out with write, got True"),
        bad("--more", "decode --centered --more", "more must be left out with --centered, got True"),
        flag("--centered", "decode"),
        bad("--centered", "write --centered", "what must be decode with --centered, got 'write'"),
        *outputs("--out", "write"),
    ],
    "eval": [
        *on_a_model("--recipe int4 --out {out}"),
        *recipes(CAPTURE),
        bad("--recipe", f"{CAPTURE} --recipe kvq4", "calibration must be given for the recipe k=smax4..., got none"),
        bad("--recipe", f"{CAPTURE} --recipe int4 --recipe int4", "recipes must each be named once, got int4, int4"),
        bad("--out", f"{NEEDS} --out {{text}}", "out must be the path of a folder, got the file {text}"),
        bad("--out", f"{NEEDS} --out {{under}}", "out must be where files can be written, got {under}"),
        *outputs("--keep", CAPTURE),
        *at_least("--tokens", 2, CAPTURE),
        *at_least("--windows", 1, CAPTURE),
        *at_least("--decode", 0, CAPTURE),
        *at_least("--batch", 1, CAPTURE),
        bad("--decode", f"{CAPTURE} --tokens 64 --decode 63", "decode must be at most 62 of a window's 64 tokens, got 63"),
        *at_least("--generate", 0, CAPTURE),
        *at_least("--prompts", 1, CAPTURE),
        *at_least("--prompt-tokens", 1, CAPTURE),
        bad("--prompt-tokens", f"{CAPTURE} --tokens 32 --prompt-tokens 64", "prompt_tokens must be at most the window's 32, got 64"),
        *at_least("--passkey", 1, CAPTURE),
        *at_least("--context", 1, CAPTURE),
        *inputs("--calibration", CAPTURE),
        of_schema("--calibration", CAPTURE, "calibration", "book", "codebook"),
        *at_least("--position-offset", 0, CAPTURE),
    ],
    "serving": [
        bad("--shape", "--device cpu --shape huge", "shape must be one of llama3-8b, tiny, got 'huge'"),
        bad("--shape", "--device cpu --shape ''", "shape must be one of llama3-8b, tiny, got ''"),
        *recipes("--device cpu --shape tiny"),
        bad("--recipe", "--device cpu --shape tiny --recipe kvq4", "recipe must need no calibration here, got k=smax4"),
        *at_least("--sequences", 1, "--device cpu"),
        *at_least("--inputs", 1, "--device cpu"),
        *at_least("--outputs", 2, "--device cpu"),
        *at_least("--chunk", 0, "--device cpu"),
        flag("--dynamic", "--device cpu"),
        bad("--dtype", "--device cpu --shape tiny --dtype float64", f"dtype {DTYPES} 'float64'"),
        bad("--device", "--shape tiny --device gpu", "device must be one that torch knows, got 'gpu'"),
        bad("--device", "--shape tiny --device cuda:99", "device must be one that torch finds, got 'cuda:99'"),
        *outputs("--out", "--device cpu --shape tiny"),
    ],
    "vectors export": [
        bad("--out", "", "Missing option '--out'"),
        bad("--out", "--out {text}", "out must be the path of a folder, got the file {text}"),
        bad("--out", "--out {under}", "out must be where files can be written, got {under}"),
        *modes("--mode", "--out {out}"),
        bad("--head-dim", "--out {out} --head-dim 40", "head_dim must be divisible by 16, ..., got 40"),
        *no_number("--head-dim", "--out {out}"),
        bad("--dtype", "--out {out} --dtype float64", "dtype must be one of float32, float16, bfloat16, got 'float64'"),
        *at_least("--rows", 1, "--out {out}"),
        bad("--seed", "--out {out} --seed -1", "seed must be between 0 and 2^32 - 1, got -1"),
        *no_number("--seed", "--out {out}"),
    ],
    "vectors check": [
        bad("folder", "{missing} --impl kvq:quantize", READ),
        bad("folder", "{folder} --impl kvq:quantize", READ),
        bad("--impl", "{folder}", "one of --dump, or some of --impl, ... must be given, got none"),
        bad("--impl", "{folder} --impl kvq", "impl must be module:function, got 'kvq'"),
        bad("--impl", "{folder} --impl no_such:f", "impl must name a module that can be imported, got 'no_such:f'"),
        bad("--impl", "{folder} --impl kvq:quantize --dump {text}", "must be given, got --impl, --dump"),
        bad("--dequantize", "{folder} --dequantize kvq:nothing", "dequantize must name a function of kvq, got 'nothing'"),
        bad("--attention", "{folder} --attention ''", "attention must be module:function, got ''"),
        bad("--dump", "{folder} --dump {missing}", READ),
        *modes("--mode", "{folder} --impl kvq:quantize"),
        *no_number("--head-dim", "{folder} --impl kvq:quantize"),
        bad("--device", "{folder} --impl kvq:quantize --device gpu", "device must be one that torch knows, got 'gpu'"),
    ],
}  # fmt: skip

#: Options that take whatever is given, and why.
OPEN: Final[dict[str, dict[str, str]]] = {
    name: {
        "--text-source": "words for the record",
        "--license-notes": "words for the record",
    }
    for name in ("capture", "calibrate", "eval")
} | {
    "vectors check": {
        "--dtype": "selects among what the folder has, which tests/conformance checks",
        "--skip-kind": "selects among what the folder has, which tests/conformance checks",
    }
}
