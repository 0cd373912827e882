"""Files that were valid once: bytes flipped, cut, spliced, and headers told lies.

A file of safetensors is the length of its header, the header (a JSON object of tensors by name,
and `__metadata__`, texts by name) and the numbers. Texts of ours hold JSON once more.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import Any, Final

from hypothesis import strategies as st

METADATA: Final = "__metadata__"
DEEP: Final = 20_000
_DTYPES: Final = (
    *("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "F6_E2M3", "I16", "U16", "F16"),
    *("BF16", "I32", "U32", "F32", "F64", "I64", "U64", "C64", "f32", "", "X"),
)
_SIZES: Final = (0, 1, 2, 3, 7, 2**31 - 1, 2**31, 2**40, 2**62, 2**63 - 1, 2**63, 2**64, -1)
#: What may stand where JSON has a value, as text: `json.dumps` would not write all of it.
_JSON: Final = (
    *("null", "true", "0", "-1", "1", "2", "5", "255", "9223372036854775808", "1.5", "-0.0"),
    *("1e30", "1e-320", "1e400", "NaN", "-Infinity", "1" * 400, "1" * 5000, '""', '"x"', '"0"'),
    *('"int8"', '"\\ud800"', '"\\u0000"', '"\\u001b[31mred"', '"[/bold]"', '"line\\nline"'),
    *("[]", "[0]", "[[]]", "[null]", "{}", '{"x": 1}', "[" * DEEP, "[" * 300 + "]" * 300, "nul"),
    '"' + "long" * 500 + '"',
)


class Raw(str):
    """JSON text that stands for itself."""

    __slots__ = ()


class Pairs(list[tuple[str, Any]]):
    """A JSON object as pairs, so that a key may occur twice."""


def parse(text: str) -> Any:
    """JSON with its objects as `Pairs`."""
    return json.loads(text, object_pairs_hook=Pairs)


def dump(value: Any) -> str:
    """The JSON text of what `parse` gives and `Raw` parts."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, Pairs):
        return "{" + ",".join(f"{json.dumps(key)}:{dump(item)}" for key, item in value) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(dump, value)) + "]"
    return json.dumps(value)


def split(contents: bytes) -> tuple[Pairs, bytes]:
    """Header and numbers."""
    end = 8 + int.from_bytes(contents[:8], "little")
    return parse(contents[8:end].decode()), contents[end:]


def join(header: Any, numbers: bytes) -> bytes:
    """A file again."""
    encoded = dump(header).encode("utf-8", "surrogatepass")
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + numbers


def _change(draw: st.DrawFn, value: Any, junk: st.SearchStrategy[Any]) -> Any:
    """A JSON value with something in it replaced, dropped, doubled or renamed."""
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        index = draw(st.integers(0, len(value) - 1))
        changed = type(value)(value)
        action = draw(st.sampled_from(("inside", "inside", "inside", "drop", "double", "rename")))
        if action == "drop":
            del changed[index]
        elif action == "double":
            changed.append(changed[index])
        elif isinstance(value, Pairs) and action == "rename":
            changed[index] = (draw(st.sampled_from(("x", "", "__proto__"))), changed[index][1])
        elif isinstance(value, Pairs):
            key, item = changed[index]
            changed[index] = (key, _change(draw, item, junk))
        else:
            changed[index] = _change(draw, changed[index], junk)
        return changed
    return draw(junk)


_ANY_JSON = st.one_of(
    st.sampled_from(_JSON).map(Raw), st.integers(-3, 600), st.floats(width=32), st.text(max_size=4)
)


def _change_tensor(draw: st.DrawFn, entry: Pairs) -> Any:
    """Dtype, shape or offsets of a tensor, as they cannot be, or can."""
    parts = dict(entry)
    key = draw(st.sampled_from(tuple(parts)))
    size = st.one_of(st.sampled_from(_SIZES), st.integers(0, 300))
    if key == "dtype":
        parts[key] = draw(st.sampled_from(_DTYPES))
    elif key == "shape":
        parts[key] = draw(st.lists(size, max_size=5))
    else:
        parts[key] = draw(st.lists(size, min_size=1, max_size=3))
    if draw(st.integers(0, 3)) == 0:
        return _change(draw, Pairs(parts.items()), _ANY_JSON)
    return Pairs(parts.items())


def _reshaped(draw: st.DrawFn, header: Pairs, numbers: bytes) -> bytes:
    """All offsets put right again after one tensor became another: only our own rules are left."""
    name, entry = draw(st.sampled_from([pair for pair in header if pair[0] != METADATA]))
    widths = {"BOOL": 1, "U8": 1, "I8": 1, "F16": 2, "BF16": 2, "F32": 4, "F64": 8, "I64": 8}
    dtype = draw(st.sampled_from((dict(entry)["dtype"], dict(entry)["dtype"], *widths)))
    shape = draw(
        st.one_of(
            st.lists(st.integers(0, 9), max_size=4),
            st.just([0, 2**40]),
            st.just([0, 3, 2**62]),
            st.permutations(dict(entry)["shape"]),
        )
    )
    made, rows, start = b"", Pairs(), 0
    for key, value in header:
        if key == METADATA:
            rows.append((key, value))
            continue
        first, last = dict(value)["data_offsets"]
        own, kind, size = numbers[first:last], dict(value)["dtype"], dict(value)["shape"]
        if key == name:
            count = widths.get(dtype, 4)
            for n in shape:
                count *= n
            kind, size = dtype, list(shape)
            own = (own * (count // max(1, len(own)) + 1) + bytes(count))[:count]
        made += own
        rows.append(
            (key, Pairs([("dtype", kind), ("shape", size), ("data_offsets", [start, len(made)])]))
        )
        start = len(made)
    return join(rows, made)


def _emptied(draw: st.DrawFn, header: Pairs) -> bytes:
    """One axis of every tensor that has it is of no size."""
    axis = draw(st.integers(0, 2))
    rows = Pairs()
    for key, value in header:
        if key != METADATA:
            parts = dict(value)
            shape = [0 if i == axis else size for i, size in enumerate(parts["shape"])]
            parts.update(shape=shape, data_offsets=[0, 0])
            value = Pairs(parts.items())  # noqa: PLW2901
        rows.append((key, value))
    return join(rows, b"")


def _sealed(contents: bytes) -> bytes:
    """With the digest of a codebook file, so that what lies behind that check is reached."""
    header, numbers = split(contents)
    table = dict(header)
    texts = dict(table[METADATA])
    raw = b""
    for name in ("levels", "thresholds"):
        first, last = dict(table[name])["data_offsets"]
        raw += numbers[first:last]
    for name in ("name", "recipe", "provenance"):
        raw += texts[name].encode() + b"\0"
    seal = hashlib.sha256(raw).hexdigest()
    metadata = Pairs((k, seal if k == "sha256" else v) for k, v in table[METADATA])
    return join(Pairs((k, metadata if k == METADATA else v) for k, v in header), numbers)


def _change_header(draw: st.DrawFn, contents: bytes) -> bytes:
    header, numbers = split(contents)
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return _emptied(draw, header)
    if kind < 3:
        return _reshaped(draw, header, numbers)
    place = draw(st.integers(0, len(header) - 1))
    metadata = [i for i, (key, _) in enumerate(header) if key == METADATA]
    # The texts are where rules are ours; most lies about tensors the library refuses.
    if metadata and draw(st.integers(0, 4)):
        place = metadata[0]
    key, value = header[place]
    action = draw(st.sampled_from(("inside",) * 8 + ("drop", "double", "rename", "replace")))
    if action == "drop":
        del header[place]
    elif action == "double":
        header.append((key, value))
    elif action == "rename":
        name = draw(st.sampled_from(("x", "", "layers.0.key", "layers.1.query", "layers.00.key")))
        header[place] = (name, value)
    elif action == "replace":
        header[place] = (key, draw(_ANY_JSON))
    elif key != METADATA:
        header[place] = (key, _change_tensor(draw, value))
    else:
        texts = Pairs(value)
        which = draw(st.integers(0, len(texts) - 1))
        name, text = texts[which]
        try:
            inner = parse(text) if isinstance(text, str) else None
        except ValueError:
            inner = None
        if inner is not None and draw(st.integers(0, 7)):
            for _ in range(draw(st.integers(1, 2))):
                inner = _change(draw, inner, _ANY_JSON)
            texts[which] = (name, dump(inner))
        elif draw(st.booleans()):
            texts[which] = (name, draw(st.one_of(st.text(max_size=9), st.sampled_from(_JSON))))
        else:
            texts = _change(draw, texts, _ANY_JSON)
        header[place] = (key, texts)
    return join(header, numbers)


def _change_bytes(draw: st.DrawFn, contents: bytes, others: list[bytes]) -> bytes:
    if not contents:
        return contents
    end = 8 + int.from_bytes(contents[:8], "little")
    inner = st.integers(0, max(0, min(end, len(contents)) - 1))
    where = st.one_of(inner, st.integers(0, max(0, len(contents) - 1)))
    first, last = sorted((draw(where), draw(where)))
    action = draw(st.sampled_from(("flip", "set", "cut", "drop", "insert", "splice", "length")))
    changed = bytearray(contents)
    if action == "flip":
        for place in draw(st.lists(where, min_size=1, max_size=5)):
            changed[place] ^= 1 << draw(st.integers(0, 7))
    elif action == "set":
        changed[first : first + 4] = draw(st.binary(min_size=1, max_size=4))
    elif action == "cut":
        del changed[first:]
    elif action == "drop":
        del changed[first : min(last, first + 64)]
    elif action == "insert":
        changed[first:first] = draw(st.binary(min_size=1, max_size=9))
    elif action == "splice":
        changed[first:] = draw(st.sampled_from(others))[last:]
    else:
        length = draw(st.one_of(st.sampled_from(_SIZES[:-1]), st.integers(0, 4096))) % 2**64
        changed[:8] = length.to_bytes(8, "little")
    return bytes(changed)


#: How a file that was changed before may answer.
_BROKEN: Final = (ValueError, TypeError, KeyError, AttributeError, RecursionError)


@st.composite
def mutants(draw: st.DrawFn, files: list[bytes]) -> bytes:
    """One of the valid files, changed once or twice."""
    contents = draw(st.sampled_from(files))
    for _ in range(draw(st.integers(1, 2))):
        try:
            if draw(st.integers(0, 5)):
                contents = _change_header(draw, contents)
            else:
                contents = _change_bytes(draw, contents, files)
        except _BROKEN:
            # What was changed before can no longer be taken apart.
            break
    if draw(st.booleans()):
        with contextlib.suppress(*_BROKEN):
            contents = _sealed(contents)
    return contents


@st.composite
def changed_json(draw: st.DrawFn, text: str) -> bytes:
    """A JSON text with something in it changed, as bytes; seldom its bytes themselves."""
    value = parse(text)
    for _ in range(draw(st.integers(1, 2))):
        value = _change(draw, value, _ANY_JSON)
    contents = dump(value).encode("utf-8", "surrogatepass")
    if draw(st.integers(0, 4)) == 0:
        contents = _change_bytes(draw, contents, [contents])
    return contents
