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

import triton
import triton.language as tl

from kvq.kernels.byte_tables import TABLE_REGISTERS, choose_bytes
from kvq.kernels.rows import pick
from kvq.kernels.side_spec import digit_place, place
from kvq.kernels.trellis_operands import labels_ptx, window_index


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


@triton.constexpr_function
def _sevens_ptx(spec, stream):
    """The same of levels whose bytes have seven bits, the lower one doubled.

    The sign of a byte is 0, so a nibble of 8 or more chooses 0: one half of the table has what the
    other has not, and their sum is the byte.
    """
    bits = spec.level_bits
    pair, nibble = divmod(stream, 2)
    body = "{ .reg .b32 y, s, t, l, h, n; " + TABLE_REGISTERS
    body += "prmt.b32 y, $1, $1, 0x3120; xor.b32 t, y, 0x88888888; "
    body += f"shr.u32 s, y, {16 * pair}; shr.u32 t, t, {16 * pair}; "
    for name, table in (("l", [word >> 1 & 0x7F for word in bits]), ("h", [w >> 8 for w in bits])):
        body += choose_bytes(name, table[:8], "s") + choose_bytes("n", table[8:], "t")
        body += f"add.u32 {name}, {name}, n; "
    last = nibble | 4 + nibble << 4 | 2 + nibble << 8 | 6 + nibble << 12
    return body + f"shl.b32 l, l, 1; prmt.b32 $0, l, h, {last:#x}; }}"


@triton.jit
def _in_pairs(x, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=tl.float16, is_pure=True, pack=2)


@triton.jit
def _in_fours(x, ASM: tl.constexpr):
    return tl.inline_asm_elementwise(ASM, "=r,r", [x], dtype=tl.int8, is_pure=True, pack=4)


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


@triton.constexpr_function
def _integer_level(spec, code):
    return int(spec.levels[code])


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
    elif KIND == "sevens":
        y = _in_pairs(x, _sevens_ptx(SPEC, J))
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
        return _crumbs_ptx([int(level) for level in spec.levels], stream)
    shift, low = digit_place(spec.bits, stream)
    mask = (((1 << spec.bits) - 1) << low) * 0x01010101
    move = f"shr.u32 t, $1, {shift};" if shift else "mov.b32 t, $1;"
    if spec.bits == 4 and low:
        return f"lop3.b32 $0, $1, {mask:#x}, 0x80808080, 0x6a;"
    return f"{{ .reg .b32 t; {move} and.b32 $0, t, {mask:#x}; }}"


@triton.constexpr_function
def _crumbs_ptx(table, stream):
    """Bytes of a table of four, by the even or odd crumbs of half a register."""
    half, odd = divmod(stream, 2)
    move = "shr.u32 s, $1, 2;" if odd else "mov.b32 s, $1;"
    half_move = "shr.u32 s, s, 16;" if half else ""
    return (
        f"{{ .reg .b32 s; {move} lop3.b32 s, s, 0x33333333, 0x44444444, 0xea; {half_move} "
        f"prmt.b32 $0, s, {_pack_bytes(table):#x}, s; }}"
    )


@triton.constexpr_function
def _plane_ptx(spec, stream, plane):
    """Seven bits of four levels at once; of sixteen in the manner of `_sevens_ptx`."""
    table = [int(level) >> (7 * plane) & 0x7F for level in spec.levels]
    if spec.bits == 2:
        return _crumbs_ptx(table, stream)
    body = "{ .reg .b32 s, t, a, b; " + TABLE_REGISTERS
    body += f"xor.b32 t, $1, 0x88888888; shr.u32 s, $1, {16 * stream}; "
    body += f"shr.u32 t, t, {16 * stream}; "
    body += choose_bytes("a", table[:8], "s") + choose_bytes("b", table[8:], "t")
    return body + "add.u32 $0, a, b; }"


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
            y = _in_fours(x, _digit_ptx(SPEC, j))
        else:
            y = ((x.to(tl.int32) & 0xFF) >> _digit_shift(SPEC, j)) & _digit_mask(SPEC, j)
            if pick(SPEC, "bits") == 4 and j == 1:
                y = y ^ 0x80
            y = y.to(tl.uint8).to(tl.int8, bitcast=True)
        streams = streams + (y,)
    return streams


@triton.jit
def plane_operands(x, SPEC: tl.constexpr, PTX: tl.constexpr, PLANE: tl.constexpr):
    """Seven bits of the levels of the streams of bytes `x`: of 14 the lower (0) or upper (1)."""
    streams = ()
    for j in tl.static_range(pick(SPEC, "streams")):
        if PTX:
            y = _in_fours(x, _plane_ptx(SPEC, j, PLANE))
        else:
            code = (x.to(tl.int32) >> _code_shift(SPEC, j)) & _code_mask(SPEC)
            level = tl.full(code.shape, _integer_level(SPEC, 0), tl.int32)
            for i in tl.static_range(1, 1 << pick(SPEC, "bits")):
                level = tl.where(code >= i, _integer_level(SPEC, i), level)
            y = ((level >> (7 * PLANE)) & 127).to(tl.int8)
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
