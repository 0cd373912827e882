"""From packed codes to the operands of a matrix product: one small function per kind of code.

A row is read as integers of 16 bits (8 where rows lie on odd bytes). One register of a matrix
operand holds two such integers, and *stream* `j` is the half-precision pair of code `j` of both:
channel `j` of each group of `STREAMS` channels. Codes become float16 numbers that are exact but
for a factor: an affine code is used where it lies in its integer, as the subnormal number
`code * 2^(place - 24)`, which takes one AND.

Keys may be read as bytes instead, and their codes as 8-bit integers (`digit_operands`), where the
query is an integer of as many digits.

The functions with `PTX` are the same as those without, two or four values at a time.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import triton
import triton.language as tl

from kvq.kernels.byte_tables import TABLE_REGISTERS, choose_bytes
from kvq.kernels.rows import pick
from kvq.kernels.trellis_operands import labels_ptx, trellis_kind, window_index
from kvq.modes import Grid, Mode
from kvq.scale_word import StoredWord
from kvq.trellis import Trellis

#: The largest relative error of the levels at which a byte per level will do, as a share of the
#: rounding of the query's own dtype.
BYTE_SHARE = 0.25
#: Codebooks of at most this many levels are selected from constants; larger ones are tables.
MOST_CONSTANT_LEVELS = 16


@dataclass(frozen=True)
class SideSpec:
    """How one side of the cache becomes operands, as compile-time values.

    A row reads `scale * unit * (operand * weight(stream) - offset)`, with the scale and, where
    the stored word has one, less the zero-point or plus the minimum of the row.
    """

    head_dim: int
    bits: int
    #: Bytes of one integer.
    unit_bytes: int
    #: Codes of one integer.
    streams: int
    #: Integers of a row, and the same padded for a matrix product.
    count: int
    padded: int
    #: `affine`, `e4m3`, `bytes`, `halves`, `levels`, `table`; `labels` and `states` of a trellis.
    kind: str
    #: Bits of a code that are turned over: the sign bit of two's complement.
    flip: int
    #: What the stored word holds.
    word: str
    #: Factor of the operand of each stream.
    weights: tuple[float, ...]
    #: A level is `unit * (operand - offset)`.
    unit: float
    offset: float
    #: Operands as numbers, by code; for `bytes` the integers of the subnormals.
    levels: tuple[float, ...]
    #: `1 / N` of a rotation that the stored words do not hold.
    fold: float
    #: Whether codes become 8-bit integers, and queries sums of 8-bit digits.
    digits: bool
    #: Whose codes they are.
    trellis: Trellis | None

    @property
    def partial(self) -> int:
        """Integers of a row, to the next power of two."""
        return 1 << (self.count - 1).bit_length()

    @property
    def own_shift(self) -> bool:
        """Whether the stored word has a second number: a part of the row that no code changes."""
        return self.word in (str(StoredWord.FLOAT32_ZERO_POINT), str(StoredWord.FLOAT16_PAIR))

    @property
    def shifts(self) -> bool:
        """Whether a row's values have a part that does not depend on their codes."""
        return self.own_shift or self.offset != 0.0

    @property
    def level_bits(self) -> list[int]:
        """The bits of the levels as float16 numbers."""
        return [int.from_bytes(struct.pack("<e", level), "little") for level in self.levels]


@triton.constexpr_function
def place(bits: int, stream: int) -> tuple[int, int]:
    """Where the code of a stream lies: a right shift, and the place of its lowest bit after it.

    The place plus `bits` is at most 10, the mantissa of a float16.
    """
    low = stream * bits
    if bits >= 4:
        return low // 8 * 8, low % 8
    return (0, low) if low + bits <= 10 else (6, low - 6)


@triton.constexpr_function
def digit_place(bits: int, stream: int) -> tuple[int, int]:
    """The same in a byte, for 8-bit operands."""
    low = stream * bits
    return (0, low) if bits >= 4 else (low // 4 * 4, low % 4)


@lru_cache(maxsize=256)
def fit_bytes(levels: tuple[float, ...]) -> tuple[float, float, tuple[int, ...], float]:
    """Levels as integers: `unit * (integer - offset)`.

    Returns:
        unit, offset, integers from 0 to 127, and the relative root-mean-square error that is left
        (of equally likely levels).
    """
    values = np.array(levels)
    low, span = values[0], values[-1] - values[0]
    best = (math.inf, 1.0, 0.0, (0,))
    for largest in range(len(levels) - 1, 128):
        integers = np.rint((values - low) * (largest / span))
        design = np.stack([integers, np.ones_like(integers)], axis=1)
        (unit, constant), *_ = np.linalg.lstsq(design, values, rcond=None)
        error = math.sqrt(
            float(((design @ (unit, constant) - values) ** 2).sum() / (values**2).sum())
        )
        if error < best[0] * 0.999:
            best = (error, float(unit), float(-constant / unit), tuple(map(int, integers)))
    error, unit, offset, integers = best
    return unit, offset, integers, error


@lru_cache(maxsize=256)
def fit_halves(levels: tuple[float, ...]) -> tuple[float, tuple[float, ...]]:
    """Levels as float16 numbers: `unit * number`, with the unit that rounds them best."""
    values = np.array(levels)
    units = (2.0 ** np.linspace(0, 1, 4097)[:-1])[:, None] * np.abs(values).max() / 1024.0
    rounded = (values / units).astype(np.float16).astype(np.float64)
    fitted = (rounded * values).sum(1) / (rounded * rounded).sum(1)
    errors = ((rounded * fitted[:, None] - values) ** 2).sum(1)
    best = int(errors.argmin())
    return float(fitted[best]), tuple(float(v) for v in rounded[best])


@lru_cache(maxsize=1024)
def side_spec(
    mode: Mode,
    head_dim: int,
    unit_bytes: int,
    accuracy: float,
    ptx: bool,
    integers: bool = False,
) -> SideSpec:
    """The compile-time values of one side.

    Args:
        mode: How its rows are stored.
        head_dim: D.
        unit_bytes: 2, or 1 where rows lie on odd bytes.
        accuracy: Half an ulp of 1.0 in the query's dtype; levels of a codebook are as accurate.
            0.0 asks for float32 levels.
        ptx: Whether look-ups in registers may be used.
        integers: Whether 8-bit integers will do for operands: of keys, whose queries can be split
            into digits of as many.
    """
    bits = mode.bits
    # A three-bit row is read as its low crumbs; its high bits are read beside them.
    streams = 8 * unit_bytes // (2 if bits == 3 else bits)
    count = head_dim // streams
    padded = max(16, triton.next_power_of_2(count))
    weights = (1.0,) * streams
    unit, offset = 1.0, 0.0
    levels: tuple[float, ...] = ()
    affine = 2.0**24
    if mode.grid is Grid.SIGNED:
        # Read as unsigned integers, 128 more than the codes.
        kind, unit, offset = "affine", affine, 128 / affine
    elif mode.grid is Grid.E4M3:
        kind, unit = "e4m3", 256.0
    elif mode.trellis is not None:
        kind, unit, offset, levels = trellis_kind(mode.trellis, streams, unit_bytes, ptx)
    elif mode.codebook is None:
        kind, unit = "affine", affine
    else:
        exact = mode.codebook.levels
        levels = exact + (exact[-1],) * (2**bits - len(exact))
        kind, unit, offset, levels = _codebook_kind(levels, len(exact), bits, accuracy, ptx)
    if kind == "affine" and bits != 3:
        weights = tuple(2.0 ** -place(bits, j)[1] for j in range(streams))
    digits = integers and accuracy > 0.0 and kind in ("affine", "bytes") and bits != 3
    flip = 0x80 if mode.grid is Grid.SIGNED else 0
    if digits:
        unit_bytes, streams, count = 1, 8 // bits, head_dim * bits // 8
        padded = max(32, triton.next_power_of_2(count))
        unit, offset, flip = unit / affine, offset * affine, 0
        weights = tuple(float(1 << digit_place(bits, j)[1]) for j in range(streams))
        if kind == "bytes":
            weights = (1.0,) * streams
        if mode.grid is Grid.SIGNED:
            offset = 0.0
    return SideSpec(
        head_dim=head_dim,
        bits=bits,
        unit_bytes=unit_bytes,
        streams=streams,
        count=count,
        padded=padded,
        kind=kind,
        flip=flip,
        word=str(mode.word),
        weights=weights,
        unit=unit,
        offset=offset,
        levels=levels,
        fold=1.0 if mode.folds_gain else 1.0 / mode.gain(head_dim),
        digits=digits,
        trellis=mode.trellis,
    )


def _codebook_kind(
    levels: tuple[float, ...], num_levels: int, bits: int, accuracy: float, ptx: bool
) -> tuple[str, float, float, tuple[float, ...]]:
    """Kind, unit, offset and operands of a codebook."""
    if num_levels == 2:
        step = levels[1] - levels[0]
        return "affine", step * 2.0**24, -levels[0] / step * 2.0**-24, ()
    if accuracy == 0.0:
        return "table", 1.0, 0.0, levels
    unit, halves = fit_halves(levels)
    if len(levels) > MOST_CONSTANT_LEVELS:
        return "table", unit, 0.0, halves
    if bits != 2 or not ptx:
        return ("halves" if ptx else "levels"), unit, 0.0, halves
    step, zero, integers, error = fit_bytes(levels)
    if error <= BYTE_SHARE * accuracy:
        scale = 2.0**24
        return "bytes", step * scale, zero / scale, tuple(float(v) for v in integers)
    return "halves", unit, 0.0, halves


@triton.constexpr_function
def _each_half(value: int) -> int:
    return value * 0x10001


@triton.constexpr_function
def _pack_bytes(values: list[int]) -> int:
    return sum(value << (8 * i) for i, value in enumerate(values))


@triton.constexpr_function
def _affine_ptx(spec, stream):
    """`(x >> shift) & mask`, of both halves of a register."""
    shift, low = place(spec.bits, stream)
    mask = _each_half(((1 << spec.bits) - 1) << low)
    flip = f"xor.b32 t, $1, {spec.flip * 0x01010101:#x};" if spec.flip else "mov.b32 t, $1;"
    if mask == 0x00FF00FF and shift == 8:
        return f"{{ .reg .b32 t; {flip} prmt.b32 $0, t, 0, 0x4341; }}"
    move = f"shr.u32 t, t, {shift};" if shift else ""
    return f"{{ .reg .b32 t; {flip} {move} and.b32 $0, t, {mask:#x}; }}"


@triton.constexpr_function
def _e4m3_ptx(stream):
    """Sign to the sign, exponent and mantissa one bit lower: the number times 2^-8."""
    high, low = "shl.b32 t, $1, 8; shl.b32 u, $1, 7;", "mov.b32 t, $1; shr.u32 u, t, 1;"
    move = high if stream == 0 else low
    return (
        f"{{ .reg .b32 t, u; {move} and.b32 u, u, 0x3f803f80; "
        "lop3.b32 $0, t, 0x80008000, u, 0xea; }"
    )


@triton.constexpr_function
def _bytes_ptx(spec, stream):
    """Four crumbs choose four bytes of a register at once; two of them become subnormals."""
    table = _pack_bytes([int(level) for level in spec.levels])
    odd, which = stream % 2, stream // 2
    # The second operand of a permutation may be an immediate: nibbles from 4 on choose from it.
    move = "shr.u32 s, $1, 2;" if odd else "mov.b32 s, $1;"
    select = f"{move} lop3.b32 s, s, 0x33333333, 0x44444444, 0xea;"
    # A byte below 128 chosen by its sign is the zero byte that a subnormal needs.
    last = which | 8 + which << 4 | 4 + which << 8 | 12 + which << 12
    return (
        "{ .reg .b32 s, u, a, b; "
        + select
        + f" shr.u32 u, s, 16; prmt.b32 a, s, {table:#x}, s; "
        + f"prmt.b32 b, s, {table:#x}, u; "
        + f"prmt.b32 $0, a, b, {last:#x}; }}"
    )


@triton.constexpr_function
def _halves_ptx(spec, stream):
    """Low and high bytes of four float16 levels at once, and two of them put together."""
    words = spec.level_bits
    low = [word & 0xFF for word in words]
    high = [word >> 8 for word in words]
    head = "{ .reg .b32 y, s, z, g, l, h, m, n; " + TABLE_REGISTERS
    head += "prmt.b32 y, $1, $1, 0x3120; "
    if spec.bits == 4:
        pair, nibble = divmod(stream, 2)
        # Of nibbles in this order: their low three bits, and the fourth throughout a byte.
        head += f"shl.b32 z, y, 4; prmt.b32 g, z, y, {(0xD9C8, 0xFBEA)[pair]:#x}; "
        head += "and.b32 m, y, 0x77777777; " + ("shr.u32 m, m, 16; " if pair else "")
        for name, table in (("l", low), ("h", high)):
            head += choose_bytes(name, table[:8], "m") + choose_bytes("n", table[8:], "m")
            head += f"lop3.b32 {name}, g, n, {name}, 0xca; "
    else:
        # Byte i of both integers lies in half i of y: nibbles of one parity choose.
        which, odd = divmod(stream, 2)
        pair, nibble = divmod(which, 2)
        head += f"shr.u32 s, y, {2 * odd}; and.b32 s, s, 0x33333333; "
        if spec.bits == 3:
            # Four high bits in each byte of z; a product moves two of them to where nibbles end.
            head += "shr.u32 z, $2, 4; prmt.b32 z, $2, z, 0x6420; "
            mask, factor = (0x0A0A0A0A, 0x0A) if odd else (0x05050505, 0x14)
            head += f"and.b32 z, z, {mask:#x}; mul.lo.u32 z, z, {factor:#x}; "
            head += "and.b32 z, z, 0x44444444; or.b32 s, s, z; "
        head += f"shr.u32 s, s, {16 * pair}; "
        for name, table in (("l", low), ("h", high)):
            head += choose_bytes(name, table, "s")
    last = nibble | 4 + nibble << 4 | 2 + nibble << 8 | 6 + nibble << 12
    return head + f"prmt.b32 $0, l, h, {last:#x}; }}"


@triton.jit
def _in_pairs(x, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2)


@triton.constexpr_function
def _shift(spec, stream):
    return place(spec.bits, stream)[0]


@triton.constexpr_function
def _mask(spec, stream):
    return ((1 << spec.bits) - 1) << place(spec.bits, stream)[1]


@triton.constexpr_function
def _code_shift(spec, stream):
    return stream * (2 if spec.bits == 3 else spec.bits)


@triton.constexpr_function
def _code_mask(spec):
    return 3 if spec.bits == 3 else (1 << spec.bits) - 1


@triton.constexpr_function
def _level(spec, code):
    return spec.levels[code]


@triton.jit
def _code(x, high, SPEC: tl.constexpr, J: tl.constexpr):
    """The codes of stream `J`, as int32."""
    code = ((x.to(tl.int32) & 0xFFFF) >> _code_shift(SPEC, J)) & _code_mask(SPEC)
    if pick(SPEC, "bits") == 3:
        code = code | (((high.to(tl.int32) >> J) & 1) << 2)
    return code


@triton.jit
def _affine_operand(x, high, SPEC: tl.constexpr, J: tl.constexpr, PTX: tl.constexpr):
    """Codes where they lie, as subnormal numbers."""
    if pick(SPEC, "bits") == 3:
        y = _code(x, high, SPEC, J).to(tl.int16).to(tl.float16, bitcast=True)
    elif PTX:
        y = _in_pairs(x, _affine_ptx(SPEC, J))
    else:
        bits = (x.to(tl.int32) & 0xFFFF) ^ (pick(SPEC, "flip") * 0x0101)
        bits = (bits >> _shift(SPEC, J)) & _mask(SPEC, J)
        y = bits.to(tl.int16).to(tl.float16, bitcast=True)
    return y


@triton.jit
def _e4m3_operand(x, SPEC: tl.constexpr, J: tl.constexpr, PTX: tl.constexpr):
    """Numbers times 2^-8. The bits of a NaN, which no row holds, give a number."""
    if PTX:
        y = _in_pairs(x, _e4m3_ptx(J))
    else:
        code = (x.to(tl.int32) >> (8 * J)) & 0xFF
        bits = ((code & 0x7F) << 7) | ((code & 0x80) << 8)
        y = bits.to(tl.int16).to(tl.float16, bitcast=True)
    return y


@triton.jit
def _level_operand(
    x, high, table_ptr, SPEC: tl.constexpr, J: tl.constexpr, PTX: tl.constexpr, WIDE: tl.constexpr
):
    """Levels of a codebook."""
    KIND: tl.constexpr = pick(SPEC, "kind")
    if KIND == "labels":
        y = tl.inline_asm_elementwise(
            labels_ptx(SPEC, J), "=r,r,r", [x, high], dtype=tl.float16, is_pure=True, pack=2
        )
    elif KIND == "states":
        y = tl.load(table_ptr + window_index(x, high, SPEC, J))
    elif KIND == "bytes":
        y = _in_pairs(x, _bytes_ptx(SPEC, J))
    elif KIND == "halves" and pick(SPEC, "bits") == 3:
        y = tl.inline_asm_elementwise(
            _halves_ptx(SPEC, J), "=r,r,r", [x, high], dtype=tl.float16, is_pure=True, pack=2
        )
    elif KIND == "halves":
        y = _in_pairs(x, _halves_ptx(SPEC, J))
    else:
        code = _code(x, high, SPEC, J)
        if KIND == "table":
            y = tl.load(table_ptr + code)
        else:
            y = tl.full(code.shape, _level(SPEC, 0), tl.float32)
            for i in tl.static_range(1, 1 << pick(SPEC, "bits")):
                y = tl.where(code >= i, _level(SPEC, i), y)
        if not WIDE:
            y = y.to(tl.float16)
    return y


@triton.jit
def operands(x, high, table_ptr, SPEC: tl.constexpr, PTX: tl.constexpr, WIDE: tl.constexpr):
    """The streams of integers `x` as a tuple of tensors of its shape.

    Args:
        x: int16 integers (of 8 or 16 bits), each the codes of neighboring channels.
        high: Of three-bit codes, the high bits of the same channels; for the kind `labels`, the
            integers after those of `x`; otherwise anything.
        table_ptr: Levels by code, for the kind `table`; by window, for the kind `states`.
        SPEC: A `SideSpec`.
        PTX: Two values at a time.
        WIDE: Float64 operands, of the same numbers.
    """
    KIND: tl.constexpr = pick(SPEC, "kind")
    streams = ()
    for j in tl.static_range(pick(SPEC, "streams")):
        if KIND == "affine":
            y = _affine_operand(x, high, SPEC, j, PTX)
        elif KIND == "e4m3":
            y = _e4m3_operand(x, SPEC, j, PTX)
        else:
            y = _level_operand(x, high, table_ptr, SPEC, j, PTX, WIDE)
        if WIDE:
            y = y.to(tl.float64)
        streams = streams + (y,)
    return streams


@triton.constexpr_function
def _digit_ptx(spec, stream):
    """Four bytes at once: `(x >> shift) & mask`, minus 128 where they could reach it."""
    if spec.kind == "bytes":
        odd, half = stream % 2, stream // 2
        move = "shr.u32 s, $1, 2;" if odd else "mov.b32 s, $1;"
        table = _pack_bytes([int(level) for level in spec.levels])
        half_move = "shr.u32 s, s, 16;" if half else ""
        return (
            f"{{ .reg .b32 s; {move} lop3.b32 s, s, 0x33333333, 0x44444444, 0xea; {half_move} "
            f"prmt.b32 $0, s, {table:#x}, s; }}"
        )
    shift, low = digit_place(spec.bits, stream)
    mask = (((1 << spec.bits) - 1) << low) * 0x01010101
    move = f"shr.u32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
    if spec.bits == 4 and low:
        return f"lop3.b32 $0, $1, {mask:#x}, 0x80808080, 0x6a;"
    return f"{{ .reg .b32 t; {move} and.b32 $0, t, {mask:#x}; }}"


@triton.constexpr_function
def _digit_shift(spec, stream):
    return digit_place(spec.bits, stream)[0]


@triton.constexpr_function
def _digit_mask(spec, stream):
    return ((1 << spec.bits) - 1) << digit_place(spec.bits, stream)[1]


@triton.jit
def digit_operands(x, SPEC: tl.constexpr, PTX: tl.constexpr):
    """The streams of bytes `x` as int8 tensors of its shape.

    Codes stay where they lie in their byte. In the upper nibble that is 16 times the code, less
    128; everything else is its weight times the code or the level.
    """
    streams = ()
    for j in tl.static_range(pick(SPEC, "streams")):
        if pick(SPEC, "bits") == 8:
            y = x.to(tl.int8, bitcast=True)
        elif PTX:
            y = tl.inline_asm_elementwise(
                _digit_ptx(SPEC, j), "=r,r", [x], dtype=tl.int8, is_pure=True, pack=4
            )
        else:
            y = ((x.to(tl.int32) & 0xFF) >> _digit_shift(SPEC, j)) & _digit_mask(SPEC, j)
            if pick(SPEC, "bits") == 4 and j == 1:
                y = y ^ 0x80
            y = y.to(tl.uint8).to(tl.int8, bitcast=True)
        streams = streams + (y,)
    return streams


@triton.jit
def decode_words(words, SPEC: tl.constexpr):
    """Scale and shift of rows, float32: a row reads `scale * levels + shift`.

    A word that is not finite gives a scale of NaN. With a zero-point the shift still lacks the
    factor `scale`.
    """
    if pick(SPEC, "word") == "float32_zero_point":
        bits = words.to(tl.int32, bitcast=True)
        scale = (bits & -16).to(tl.float32, bitcast=True)
        shift = 0.0 - (bits & 15).to(tl.float32)
    elif pick(SPEC, "word") == "float16_pair":
        bits = words.to(tl.int32, bitcast=True)
        scale = (bits & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        shift = ((bits >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        scale = scale + shift * 0.0
    else:
        scale = words.to(tl.float32)
        shift = scale * 0.0
    return scale + scale * 0.0, shift
