"""Which tier a public function takes, and what it says to what no tier can take."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import kvq
from kvq import reference
from kvq.operators import attention_tier, find_tier
from kvq.tier import AttentionOutput, PagedKV, Tier, new_paged_kv

FUNCTIONS = [name for name in vars(Tier) if not name.startswith("_")]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cache(device: str = "cpu") -> PagedKV:
    return new_paged_kv(2, 4, 3, 64, kvq.mode("int4"), device=device)


def attention(x: Tensor, **how: Any) -> Any:
    """Rows `[5, 3, 64]` as the queries of one sequence of five tokens."""
    device = x.device
    return kvq.paged_attention(
        x,
        cache(device.type),
        cache(device.type),
        torch.arange(2, device=device).view(1, 2),
        torch.arange(5, 6, device=device),
        torch.arange(0, 6, 5, device=device),
        scale=1.0,
        **how,
    )


#: Every function, called with rows `[5, 3, 64]` on some device; the name of what is looked at.
CALLS: dict[str, tuple[str, Callable[..., Any]]] = {
    "quantize": ("x", lambda x, **how: kvq.quantize(x, "int4", **how)),
    "dequantize": (
        "codes",
        lambda x, **how: kvq.dequantize(
            x.new_zeros(5, 32, dtype=torch.uint8), x.new_zeros(5), "int4", 64, **how
        ),
    ),
    "hadamard_transform": (
        "x",
        lambda x, **how: kvq.hadamard_transform(x, kvq.HADAMARD, **how),
    ),
    "pack_codes": ("codes", lambda x, **how: kvq.pack_codes(x.to(torch.uint8), 4, **how)),
    "unpack_codes": (
        "packed",
        lambda x, **how: kvq.unpack_codes(x.to(torch.uint8), 4, 128, **how),
    ),
    "reshape_and_cache": (
        "key",
        lambda x, **how: kvq.reshape_and_cache(
            x,
            x,
            cache(x.device.type),
            cache(x.device.type),
            torch.arange(5, device=x.device),
            **how,
        ),
    ),
    "copy_blocks": (
        "cache.codes",
        lambda x, **how: kvq.copy_blocks(
            cache(x.device.type), torch.tensor([[0, 1]], device=x.device), **how
        ),
    ),
    "paged_attention": ("query", attention),
    "merge_attention": (
        "parts",
        lambda x, **how: kvq.merge_attention([AttentionOutput(x, x.new_zeros(5, 3))], **how),
    ),
}


def test_every_function_is_called() -> None:
    assert set(CALLS) == set(FUNCTIONS)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_tensor_on_the_cpu_goes_to_the_reference(function: str) -> None:
    assert find_tier("x", torch.zeros(1), function) is reference


@pytest.mark.parametrize("function", CALLS)
def test_the_kernels_can_be_told(function: str) -> None:
    pytest.importorskip("triton")
    from kvq import kernels

    assert find_tier("x", torch.zeros(1), function, "kernels") is kernels
    CALLS[function][1](torch.zeros(5, 3, 64, device=DEVICE), tier="kernels")


@pytest.mark.gpu
@pytest.mark.parametrize("function", CALLS)
def test_a_tensor_on_a_gpu_goes_to_the_kernels(function: str) -> None:
    from kvq import kernels

    assert find_tier("x", torch.zeros(1, device="cuda"), function) is kernels


def test_a_float64_query_goes_to_the_reference() -> None:
    pytest.importorskip("triton")
    query = torch.ones(5, 3, 64, device=DEVICE, dtype=torch.float64)
    assert attention_tier(query) is reference
    assert attention(query).dtype is torch.float64
    assert attention(query, tier="reference").dtype is torch.float64
    with pytest.raises(
        TypeError,
        match="^query must be float32, float16 or bfloat16 for the kernel tier, got float64 "
        r'\(tier="reference" takes it\)$',
    ):
        attention(query, tier="kernels")
    # Merging it is no trouble.
    part = AttentionOutput(query, query[..., 0])
    assert kvq.merge_attention([part], tier="kernels").output.dtype is torch.float64


def test_there_are_two_tiers() -> None:
    with pytest.raises(
        ValueError, match=r"^tier must be 'reference' or 'kernels', got 'interpreter'$"
    ):
        kvq.quantize(torch.zeros(2, 64), "int4", tier="interpreter")  # type: ignore[arg-type]


@pytest.mark.parametrize("function", CALLS)
def test_without_triton(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(
        ImportError, match=r"^tier must be 'reference' without triton, got 'kernels' \(install"
    ):
        CALLS[function][1](torch.zeros(5, 3, 64), tier="kernels")
    CALLS[function][1](torch.zeros(5, 3, 64))


def test_nothing_but_the_kernels_needs_triton() -> None:
    program = (
        "import sys; sys.modules['triton'] = None; import kvq, torch; "
        "kvq.quantize(torch.zeros(2, 64), 'int4')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("function", CALLS)
def test_the_cpu_without_the_interpreter(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from kvq.kernels import launch

    monkeypatch.setattr(launch, "INTERPRETED", False)
    argument, call = CALLS[function]
    with pytest.raises(
        ValueError,
        match=rf"^{argument} must be on a CUDA device for the kernel tier, got cpu "
        r"\(TRITON_INTERPRET=1 runs the kernels on the CPU\)$",
    ):
        call(torch.zeros(5, 3, 64), tier="kernels")


@pytest.mark.parametrize("tier", [None, "reference", "kernels"])
@pytest.mark.parametrize(
    ("device", "rule"), [("meta", "that holds values"), ("mps", "with float64")]
)
@pytest.mark.parametrize("function", CALLS)
def test_a_device_that_no_tier_works_on(
    function: str, device: str, rule: str, tier: str | None
) -> None:
    argument, call = CALLS[function]
    with (
        FakeTensorMode(),
        pytest.raises(ValueError, match=f"^{argument} must be on a device {rule}, got {device}$"),
    ):
        call(torch.empty(5, 3, 64, device=device), tier=tier)


@pytest.mark.parametrize("function", CALLS)
def test_a_device_that_the_kernels_do_not_work_on(function: str) -> None:
    kernels = pytest.importorskip("kvq.kernels")
    x = torch.empty(5, 3, 64, device="meta")
    codes = x.to(torch.uint8)
    index = torch.zeros(2, dtype=torch.int64, device="meta")
    mode = kvq.mode("int4")
    calls: dict[str, Callable[[], object]] = {
        "quantize": lambda: kernels.quantize(x, mode),
        "dequantize": lambda: kernels.dequantize(codes[..., :32], x[..., 0], mode, 64),
        "hadamard_transform": lambda: kernels.hadamard_transform(x, kvq.HADAMARD),
        "pack_codes": lambda: kernels.pack_codes(codes, 4),
        "unpack_codes": lambda: kernels.unpack_codes(codes, 4, 128),
        "reshape_and_cache": lambda: kernels.reshape_and_cache(
            x, x, cache("meta"), cache("meta"), torch.arange(5, device="meta"), check=False
        ),
        "copy_blocks": lambda: kernels.copy_blocks(
            cache("meta"), torch.zeros(1, 2, dtype=torch.int64, device="meta"), check=False
        ),
        "paged_attention": lambda: kernels.paged_attention(
            x, cache("meta"), cache("meta"), index[None], index[:1], index, scale=1.0, check=False
        ),
        "merge_attention": lambda: kernels.merge_attention([AttentionOutput(x, x[..., 0])]),
    }
    with pytest.raises(
        ValueError,
        match=f"^{CALLS[function][0]} must be on a CUDA device for the kernel tier, got meta",
    ):
        calls[function]()


@pytest.mark.parametrize("tier", ["reference", "kernels"])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda x, tier: kvq.quantize(x.double(), "int4", tier=tier),
            "^x must be float32, float16 or bfloat16, got float64$",
        ),
        (
            lambda x, tier: kvq.hadamard_transform(x.int(), kvq.HADAMARD, tier=tier),
            "^x must be float32, float16 or bfloat16, got int32$",
        ),
        (
            lambda x, tier: kvq.dequantize(x, x[..., 0], "int8", 64, tier=tier),
            "^codes must be uint8, got float32$",
        ),
        (
            lambda x, tier: kvq.dequantize(
                x.to(torch.uint8), x[..., 0].half(), "int8", 64, tier=tier
            ),
            "^words must be float32, got float16$",
        ),
        (lambda x, tier: kvq.pack_codes(x, 4, tier=tier), "^codes must be uint8, got float32$"),
        (
            lambda x, tier: kvq.unpack_codes(x, 4, 128, tier=tier),
            "^packed must be uint8, got float32$",
        ),
        (
            lambda x, tier: kvq.reshape_and_cache(
                x, x.double(), cache(DEVICE), cache(DEVICE), x[:, 0, 0].int(), tier=tier
            ),
            "^value must be float32, float16 or bfloat16, got float64$",
        ),
        (
            lambda x, tier: kvq.reshape_and_cache(
                x, x, cache(DEVICE), cache(DEVICE), x[:, 0, 0], tier=tier
            ),
            "^slot_mapping must be int32 or int64, got float32$",
        ),
        (
            lambda x, tier: kvq.copy_blocks(cache(DEVICE), x[0, :, :2].short(), tier=tier),
            "^pairs must be int32 or int64, got int16$",
        ),
        (lambda x, tier: kvq.quantize(x.tolist(), "int4", tier=tier), "^x must be a torch.Tensor"),
    ],
)
def test_another_dtype(call: Callable[[Tensor, str], object], message: str, tier: str) -> None:
    if tier == "kernels":
        pytest.importorskip("triton")
    with pytest.raises(TypeError, match=message):
        call(torch.zeros(5, 3, 64, device=DEVICE), tier)
