"""Failures that other quantizers had: the analysis must show each for what it is."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from kvq import reference
from kvq.activations import Activations, LayerActivations
from kvq.analysis.accounting import Accounting, account, shared_tables, size_in_bytes
from kvq.analysis.attention_error import log_weights, weight_error
from kvq.analysis.measure import Settings, measure
from kvq.analysis.quantization_error import quantization_error
from kvq.analysis.rounding_drift import DriftInput, rounding_drift
from kvq.analysis.samples import gaussian, outlier_channel
from kvq.analysis.score_bias import score_bias, scores
from kvq.analysis.summary import select
from kvq.modes import MODES, Mode, mode
from kvq.rounding import Rounding
from kvq.tier import QuantizedKV, new_paged_kv

SMALL = Settings(theory_rows=64, gaussian_tokens=64, gaussian_heads=2)


class TestTruncatingStores:
    """An int8 store that truncates: every code up to one step too small."""

    @pytest.fixture
    def x(self) -> torch.Tensor:
        return torch.randn((4096, 128), generator=torch.Generator().manual_seed(0))

    @pytest.mark.parametrize(
        ("rounding", "bias", "ratio", "slope"),
        [(Rounding.HALF_AWAY, 0.0, 1.0, 1.0), (Rounding.TOWARD_ZERO, -0.496, 0.9861, 0.9913)],
    )
    def test_probe(
        self, x: torch.Tensor, rounding: Rounding, bias: float, ratio: float, slope: float
    ) -> None:
        int8 = mode("int8").with_rounding(rounding)
        stored = reference.quantize(x, int8)
        x_hat = reference.dequantize(*stored, int8, 128)
        steps = ((x_hat.abs() - x.abs()) / stored.words[:, None]).mean()
        assert float(steps) == pytest.approx(bias, abs=0.01)
        assert float(x_hat.abs().sum() / x.abs().sum()) == pytest.approx(ratio, abs=5e-4)
        exact, approximate = (scores(x[:1, None], k[:, None], 1.0) for k in (x, x_hat))
        found = score_bias(
            exact,
            approximate,
            torch.ones(1, 4096, dtype=torch.bool),
            torch.zeros(1, dtype=torch.int64),
            torch.arange(4096),
        ).slope
        assert float(found.value) == pytest.approx(slope, abs=4 * float(found.standard_error))
        assert float(found.standard_error) < 3e-4

    def test_the_drift_reports_it_as_biased(self) -> None:
        item = DriftInput(
            gaussian(8, 4, 128), gaussian(512, 4, 128, 1), gaussian(512, 4, 128, 2),
            (511 - torch.arange(512)).expand(8, 512), 128**-0.5,
        )  # fmt: skip
        slopes = {
            rounding: next(
                drift.measured
                for drift in rounding_drift([item], mode("int8"), rounding, [512])
                if drift.metric == "slope"
            )
            for rounding in Rounding
        }
        for rounding, slope in slopes.items():
            distance = abs(float(slope.value) - 1) / float(slope.standard_error)
            assert (distance > 20) == (rounding is Rounding.TOWARD_ZERO), rounding


def test_codebooks_meet_the_ratio_that_theory_gives() -> None:
    # A codebook for unit variance on rows divided by their largest entry: 5.7 dB, not 9.3.
    x = torch.randn((4096, 1, 128), generator=torch.Generator().manual_seed(0))
    for name, least in (("int2", 9.1), ("lloyd3_unit", 14.4), ("lloyd4_unit", 20.0)):
        each = mode(name)
        x_hat = reference.dequantize(*reference.quantize(x, each), each, 128)
        assert float(quantization_error(x, x_hat, torch.arange(4096)).snr_db.value) > least


def test_the_theory_is_beside_the_measurement() -> None:
    key = gaussian(512, 4, 64)
    activations = Activations(
        {0: LayerActivations(None, key, gaussian(512, 4, 64, 1))},
        torch.arange(512),
        torch.arange(0),
        1.0,
    )
    tables = measure(activations, [mode("int2")], settings=SMALL)
    exact = select(tables["theory"], kind="exact", metric="relative_error")["value"].iloc[0]
    measured = select(
        tables["quantization_error"], metric="relative_error", tokens="all", side="key"
    )
    distance = (measured["value"] - exact).abs() / measured["standard_error"]
    assert distance.max() < 4


def test_outlier_channels_are_seen_in_scores_and_attention() -> None:
    key, query = outlier_channel(512, 1, 128), gaussian(64, 1, 128, 9)
    visible = torch.ones(64, 512, dtype=torch.bool)
    exact = scores(query, key, 128**-0.5)
    found = {}
    for each in (mode("int4"), mode("int4").without_rotation()):
        key_hat = reference.dequantize(*reference.quantize(key, each), each, 128)
        approximate = scores(query, key_hat, 128**-0.5)
        blocks = torch.arange(512) // 16
        found[each.name] = (
            quantization_error(key, key_hat, blocks).relative_error.value.sqrt().item(),
            score_bias(
                exact, approximate, visible, torch.arange(64), blocks
            ).centered_rmse.value.item(),
            weight_error(
                log_weights(exact, visible), log_weights(approximate, visible), torch.arange(64)
            ).kl_divergence.value.item(),
        )
    rotated, plain = found.values()
    assert all(b > 2 * a for a, b in zip(rotated, plain, strict=True))
    assert plain == pytest.approx((0.176, 0.96, 0.46), rel=0.1)
    assert rotated == pytest.approx((0.055, 0.30, 0.044), rel=0.15)


def test_a_first_token_that_is_large_is_reported_apart() -> None:
    x = torch.randn((1, 2, 64, 128), generator=torch.Generator().manual_seed(0))[0]
    x[:, 0] *= 25
    rows = x.transpose(0, 1).contiguous()
    activations = Activations(
        {0: LayerActivations(None, rows, rows)}, torch.arange(64), torch.arange(0), 1.0
    )
    tables = measure(activations, list(MODES.values()), settings=SMALL)
    for each in MODES.values():
        codes = reference.quantize(rows, each).codes
        assert torch.equal(codes[1:], reference.quantize(rows[1:].contiguous(), each).codes)
    share = select(tables["activation_statistics"], metric="first_token_share", rotation="none")
    assert (share["value"] > 0.85).all()
    errors = select(
        tables["quantization_error"], mode="int4_per_token_head", metric="mean_squared_error"
    ).set_index("tokens")["value"]
    assert errors["first"].min() > 100 * errors["rest"].max()


class TestAccounting:
    """Every stored tensor is counted, and nothing else."""

    TOKENS, HEADS = 100, 2

    def stored(self, each: Mode, head_dim: int) -> list[QuantizedKV]:
        x = torch.zeros((self.TOKENS, self.HEADS, head_dim))
        return [reference.quantize(x, each), reference.quantize(x, each)]

    def found(self, each: Mode, head_dim: int) -> Accounting:
        return account(each, self.stored(each, head_dim), block_size=16)

    @pytest.mark.parametrize("each", MODES.values(), ids=str)
    def test_exactly_the_bytes_of_the_tensors(self, each: Mode) -> None:
        found = self.found(each, 128)
        rows = [tensor for side in self.stored(each, 128) for tensor in side]
        tables = list(shared_tables(each, 128).values())
        assert found.stored_bytes == sum(t.numel() * t.element_size() for t in rows + tables)
        caches = [new_paged_kv(7, 16, self.HEADS, 128, each) for _ in range(2)]
        paged = [tensor for cache in caches for tensor in (cache.codes, cache.words)]
        assert found.paged_bytes == sum(t.numel() * t.element_size() for t in paged + tables)
        assert caches[0].words.numel() == 112 * self.HEADS
        assert found.values == 2 * self.TOKENS * self.HEADS * 128
        assert found.bits_per_value == Fraction(8 * found.stored_bytes, found.values)
        assert found.compression == Fraction(2 * found.values, found.stored_bytes)
        assert found.paged_compression < found.compression

    def test_tables(self) -> None:
        assert shared_tables(mode("int8"), 64) == {}
        tables = shared_tables(mode("lloyd2"), 64)
        assert {name: table.numel() for name, table in tables.items()} == {
            "signs_0": 64,
            "levels": 4,
            "thresholds": 3,
        }
        assert size_in_bytes(tables.values()) == 4 * 71

    def test_head_sizes_share_a_codebook_but_not_their_signs(self) -> None:
        each = mode("lloyd2")
        rows = [reference.quantize(torch.zeros(4, 2, d), each) for d in (64, 32, 64, 32)]
        assert account(each, rows).table_bytes == 4 * (64 + 32 + 4 + 3)

    @pytest.mark.parametrize(
        ("name", "head_dim", "ratio"),
        [
            ("int8", 128, 1.9394), ("fp8", 128, 1.9394), ("int4", 128, 3.7647),
            ("int2", 128, 7.1111), ("int8", 64, 1.8824), ("int4", 64, 3.5556), ("int2", 64, 6.4),
        ],
    )  # fmt: skip
    def test_ratios_of_rows(self, name: str, head_dim: int, ratio: float) -> None:
        found = self.found(mode(name), head_dim)
        rows = Fraction(found.baseline_bytes, found.code_bytes + found.word_bytes)
        assert float(rows) == pytest.approx(ratio, abs=5e-5)
        assert found.compression <= rows
