"""Failures that other quantizers of KV caches had in public, and the tests that none is here.

Each row is a fault, a thread that tells of it, and the tests that hold it: of its whole kind, in
every mode, tier, dtype or shape it could be in. Where a thread's own example contradicts this
package's formats the test says so: float64 input is refused, rotated rows are `sqrt(N)` times as
long, attention has an error budget in place of a fixed tolerance, e4m3fnuz is refused by name, and
so are fewer distinct samples than levels.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parent
ROOT = TESTS.parent
WRITE = "parity/test_known_failures.py::"
READ = "parity/test_known_failures_attention.py::"
GPU = "parity/test_known_failures_gpu.py::"
REFERENCE = "reference/test_known_failures.py::"
CACHES = "integrations/test_known_failures.py::"
ANALYSIS = "analysis/test_known_failures.py::"
ATTENTION = "reference/test_attention.py::"
QUANTIZE = "reference/test_quantize.py::"
ROWS = "reference/test_quantize_rows.py::"
PAGES = "reference/test_cache.py::"
LIMITS = "parity/test_cache_limits.py::"
PARITY = "parity/test_attention.py::"


class Failure(NamedTuple):
    """A fault that somebody had."""

    fault: str
    #: Owner, repository, `issues` or `pull`, and number of a thread on GitHub.
    thread: str
    #: `file::test` below `tests/`.
    tests: tuple[str, ...]

    @property
    def url(self) -> str:
        return f"https://github.com/{self.thread}"


FAILURES = (
    # What is stored.
    Failure(
        "a row of zeros is divided by a scale of zero",
        "ROCm/aiter/issues/4289",
        (
            READ + "test_a_row_of_zeros_is_no_division_by_zero",
            ROWS + "test_zeros_read_as_plus_zero_among_other_rows",
            "parity/test_quantize.py::test_planted_rows",
        ),
    ),
    Failure(
        "a store to int8 truncates",
        "vllm-project/vllm/pull/45361",
        (
            WRITE + "test_a_store_rounds_and_does_not_truncate",
            ANALYSIS + "TestTruncatingStores::test_probe",
            ANALYSIS + "TestTruncatingStores::test_the_drift_reports_it_as_biased",
            "reference/test_quantize_roundings.py::test_ties_go_where_the_rounding_says",
        ),
    ),
    Failure(
        "codes are made with another scale than the stored one",
        "kekzl/imp/pull/250",
        (
            WRITE + "test_codes_are_those_of_the_stored_scale",
            WRITE + "test_an_exact_scale_that_encodes_would_be_seen",
            "reference/test_scaling.py::TestZeroPoint::test_sits_in_the_low_four_bits",
            "reference/test_scaling.py::TestZeroPoint::"
            "test_truncation_costs_at_most_fifteen_units_in_the_last_place",
        ),
    ),
    Failure(
        "a clamped zero-point loses the offset of a one-sided row",
        "openvinotoolkit/nncf/pull/4074",
        (
            WRITE + "test_one_sided_rows_are_not_saturated",
            ROWS + "test_the_first_implementation_loses_one_sided_rows",
        ),
    ),
    Failure(
        "a zero-point is added after the clamp",
        "pytorch/executorch/pull/2167",
        (
            WRITE + "test_no_code_spills_into_its_neighbor",
            ROWS + "test_codes_stay_in_range_whatever_the_offset",
            QUANTIZE + "test_changing_one_lane_changes_one_nibble",
            "reference/test_packing.py::test_a_code_changes_its_own_bits_only",
        ),
    ),
    Failure(
        "fp8 overflows to NaN, or wraps",
        "jax-ml/ml_dtypes/issues/400",
        (
            WRITE + "test_fp8_saturates_and_never_makes_a_nan",
            GPU + "test_fp8_saturates_at_every_largest_magnitude",
            QUANTIZE + "test_a_lane_that_is_not_finite_makes_its_own_row_nan_and_no_other",
            "reference/test_rounding.py::test_no_rounding_can_make_a_nan_of_448",
        ),
    ),
    Failure(
        "fp8 is rounded twice, always toward zero",
        "FlashML-org/FreeToken/pull/85",
        (
            WRITE + "test_fp8_rounds_once",
            GPU + "test_fp8_rounds_once",
            GPU + "test_fp8_rounds_once_otherwise",
            "reference/test_rounding.py::test_numbers_that_a_stop_at_half_precision_rounds_twice",
        ),
    ),
    Failure(
        "e4m3fnuz is taken for e4m3fn",
        "vllm-project/vllm/pull/45681",
        (
            WRITE + "test_another_dialect_of_fp8_is_refused_by_name",
            WRITE + "test_fp8_bytes_are_those_of_e4m3fn",
            "reference/test_rounding.py::test_decoding_gives_the_enumerated_table",
        ),
    ),
    Failure(
        "+128 is stored as -128",
        "uxlfoundation/oneDNN/pull/5879",
        (
            WRITE + "test_int8_never_wraps",
            ROWS + "test_int8_codes_keep_their_sign_and_stop_at_127",
            "reference/test_quantize_roundings.py::"
            "test_codes_are_clamped_where_a_stochastic_rounding_could_leave_the_grid",
        ),
    ),
    Failure(
        "a view is read as if it were packed",
        "vllm-project/vllm/pull/49092",
        (
            WRITE + "test_views_are_not_read_as_if_they_were_packed",
            QUANTIZE + "test_every_case_has_the_oracles_bits",
            QUANTIZE + "test_the_input_is_left_alone_and_shares_no_memory_with_the_result",
            "parity/test_every_launch.py::test_the_covering_array",
            PAGES + "test_inputs_of_any_stride",
            PARITY + "test_views_and_index_dtypes_change_no_bit",
        ),
    ),
    Failure(
        "the last elements of a row are dropped",
        "TheTom/llama-cpp-turboquant/pull/4",
        (
            WRITE + "test_the_last_codes_are_packed",
            WRITE + "test_the_last_channels_of_a_row_are_stored",
            "reference/test_packing.py::test_refusals",
        ),
    ),
    Failure(
        "a kernel is hard-coded for one width of codes",
        "vllm-project/vllm/pull/38479",
        (
            WRITE + "test_no_width_is_hard_coded",
            WRITE + "test_every_code_is_used",
            "parity/test_quantize.py::test_every_byte",
            "test_modes.py::test_parts_that_do_not_go_together",
        ),
    ),
    # Rotation.
    Failure(
        "a head size that is no power of two is rotated by what is not orthogonal",
        "vllm-project/vllm/issues/41413",
        (
            WRITE + "test_head_sizes_that_are_no_power_of_two",
            "reference/test_hadamard.py::test_equals_scipys_matrix",
            "reference/test_hadamard.py::test_rows_of_the_rotation_are_orthogonal",
            "reference/test_hadamard.py::test_a_head_size_that_does_not_mix_is_refused_by_name",
        ),
    ),
    Failure(
        "a butterfly in float16 overflows",
        "AmesianX/TurboQuant/issues/2",
        (
            WRITE + "test_sums_that_float16_cannot_hold",
            WRITE + "test_large_float16_rows_come_back",
            ROWS + "test_every_finite_float16_row_has_a_finite_word",
        ),
    ),
    Failure(
        "single tokens are rotated otherwise than many",
        "Blaizzy/mlx-vlm/pull/973",
        (
            WRITE + "test_tokens_one_by_one_are_tokens_at_once",
            PAGES + "test_writing_in_pieces_is_writing_at_once",
            QUANTIZE + "test_rows_alone_equal_rows_together",
        ),
    ),
    Failure(
        "a table of one dtype or device serves another",
        "NVIDIA/TransformerEngine/pull/2395",
        (
            WRITE + "test_tables_of_one_dtype_do_not_serve_another",
            GPU + "test_tables_of_one_device_do_not_serve_another",
            "reference/test_hadamard.py::test_tables_of_several_dtypes_do_not_meet",
            "reference/test_hadamard.py::test_a_caller_cannot_change_the_table",
        ),
    ),
    # Codebooks.
    Failure(
        "a fit leaves levels that are never used",
        "vortex-data/vortex/pull/8076",
        (
            "reference/test_lloyd_max.py::test_no_level_is_dead",
            "reference/test_lloyd_max.py::test_gaussian_errors_are_exact",
            "reference/test_lloyd_max.py::test_gaussian_levels_are_exact",
            "reference/test_lloyd_max_samples.py::test_a_bad_start_leaves_no_level_dead",
            "reference/test_lloyd_max.py::test_a_fit_that_stopped_early_says_so",
        ),
    ),
    Failure(
        "an empty cluster becomes NaN",
        "subhadarship/kmeans_pytorch/issues/41",
        (
            WRITE + "test_a_codebook_of_a_heavy_tail_finds_the_nearest_level",
            "reference/test_lloyd_max_samples.py::test_refusals",
            "reference/test_lloyd_max_samples.py::test_cauchy_against_k_means",
        ),
    ),
    Failure(
        "Gaussian levels are stretched to the largest entry of a row",
        "turboderp-org/exllamav3/pull/180",
        (
            REFERENCE + "test_levels_are_not_stretched_to_the_largest_entry",
            ANALYSIS + "test_codebooks_meet_the_ratio_that_theory_gives",
            ANALYSIS + "test_the_theory_is_beside_the_measurement",
        ),
    ),
    Failure(
        "a codebook is fitted again for every quantizer",
        "rajveer43/VeloxQuant-MLX/issues/508",
        (
            "reference/test_lloyd_max.py::test_fits_are_remembered",
            "reference/test_lloyd_max.py::test_importing_fits_nothing",
            "reference/test_lloyd_max.py::test_256_levels_are_fast",
            "test_house.py::test_import_kvq_is_light",
        ),
    ),
    Failure(
        "keys are close and attention is wrong",
        "ahb-sjsu/turboquant-pro/pull/98",
        (ANALYSIS + "test_outlier_channels_are_seen_in_scores_and_attention",),
    ),
    Failure(
        "a broken file of a codebook or a cache is loaded",
        "ml-explore/mlx-swift-lm/pull/451",
        (
            "reference/test_codebook_files.py::test_faults",
            "reference/test_codebook_files.py::test_every_flipped_byte_is_found",
            "reference/test_codebook_files.py::test_every_truncation_is_found",
            "reference/test_codebook_files.py::test_pickles_are_never_loaded",
            "reference/test_codebook_files.py::test_files_that_cannot_be_read",
            "reference/test_codebook_files.py::test_codebooks_round_trip",
            "test_encoded_files.py::test_files_refused",
            "test_encoded_files.py::test_other_files_refused",
            "test_encoded_files.py::test_truncated_and_foreign_files_refused",
            "test_encoded_files.py::test_changed_bytes_are_read_or_refused",
            "test_activations.py::test_changed_bytes_are_read_or_refused",
            "test_activations.py::test_other_files_are_refused",
            "integrations/test_key_transforms.py::test_calibration_files_are_refused",
        ),
    ),
    # The paged write.
    Failure(
        "the padding of a graph is written",
        "vllm-project/vllm/pull/13922",
        (
            WRITE + "test_nothing_is_written_but_the_mapped_tokens",
            PAGES + "test_padding_is_not_written",
            LIMITS + "test_tokens_past_the_mapping_are_padding",
            "parity/test_cache.py::test_every_mode_as_keys_with_another_as_values",
        ),
    ),
    Failure(
        "a slot or a page out of range is written or read",
        "microsoft/onnxruntime/pull/32391",
        (
            WRITE + "test_nothing_is_written_but_the_mapped_tokens",
            PAGES + "test_interleaved_views_with_guard_pages",
            PAGES + "test_the_last_of_duplicate_slots_wins_with_code_and_word",
            LIMITS + "test_slots_that_are_no_slots_are_skipped",
            LIMITS + "test_of_tokens_with_one_slot_the_last_is_written",
            ATTENTION + "test_a_block_that_does_not_exist",
            PARITY + "test_a_block_that_does_not_exist",
        ),
    ),
    Failure(
        "a second view of a cache clears it",
        "vllm-project/vllm/pull/51091",
        (
            WRITE + "test_a_second_view_clears_nothing",
            PAGES + "test_a_second_view_of_a_buffer_sees_the_first_ones_rows",
        ),
    ),
    Failure(
        "keys and values are written differently",
        "vllm-project/vllm/issues/50084",
        (
            WRITE + "test_keys_and_values_are_treated_alike",
            PAGES + "test_every_pair_of_modes",
            "parity/test_cache.py::test_every_mode_as_keys_with_another_as_values",
        ),
    ),
    # The paged read.
    Failure(
        "offsets wrap at 2^31",
        "vllm-project/vllm/pull/47671",
        (
            READ + "test_offsets_past_two_to_the_31",
            PAGES + "test_a_cache_of_more_than_two_gigabytes",
            LIMITS + "test_offsets_past_2_31_in_a_sparse_file",
            LIMITS + "test_inputs_past_2_31_in_a_sparse_file",
            LIMITS + "test_a_full_cache_of_more_than_2_31_bytes",
            "parity/test_attention_gpu.py::test_offsets_past_two_to_the_31",
        ),
    ),
    Failure(
        "a sequence of length zero is NaN",
        "vllm-project/vllm/pull/57094",
        (
            READ + "test_a_sequence_of_length_zero_is_zero",
            READ + "test_a_sequence_of_length_zero_among_splits",
            ATTENTION + "test_a_sequence_of_length_zero",
            PARITY + "test_nothing_visible_is_zero_even_for_a_nan_query",
        ),
    ),
    Failure(
        "a sliding window is off by one",
        "sgl-project/sglang/pull/32087",
        (
            READ + "test_no_window_is_off_by_one",
            ATTENTION + "test_a_window_counts_the_query_itself",
        ),
    ),
    Failure(
        "a group of query heads is no power of two",
        "Sandermage/genesis-vllm-patches/issues/7",
        (
            READ + "test_any_group_of_query_heads",
            ATTENTION + "test_any_group_of_query_heads",
            "parity/test_attention_gpu.py::test_every_ratio_of_heads",
        ),
    ),
    Failure(
        "queries that are fewer than keys do not see the history",
        "gittensor-ai-lab/sparkinfer/issues/3",
        (
            READ + "test_the_last_queries_stand_at_the_end_of_the_keys",
            READ + "test_many_tokens_at_once_are_many_calls_of_one",
            ATTENTION + "test_the_last_queries_stand_at_the_end_of_the_keys",
            ATTENTION + "test_many_tokens_at_once_are_many_calls_of_one",
        ),
    ),
    Failure(
        "a table is narrower than its sequence, or wider",
        "Dao-AILab/flash-attention/pull/2711",
        (
            READ + "test_a_table_that_is_too_narrow_is_refused",
            READ + "test_a_page_past_the_end_is_not_read",
            ATTENTION + "test_a_table_that_is_too_narrow",
            ATTENTION + "test_a_wider_table_and_pages_past_the_end_do_not_matter",
            PARITY + "test_a_table_that_is_too_narrow",
            PAGES + "test_attention_reads_what_was_written",
        ),
    ),
    Failure(
        "a reader makes up the stride of blocks",
        "ROCm/aiter/pull/3498",
        (
            READ + "test_an_interleaved_cache_is_written_and_read",
            ATTENTION + "test_views_are_read_as_they_lie",
            PARITY + "test_views_and_index_dtypes_change_no_bit",
        ),
    ),
    Failure(
        "the bits of a sequence depend on its batch",
        "sgl-project/sglang/pull/35938",
        (
            READ + "test_companions_and_splits_decide_nothing",
            PARITY + "test_companions_do_not_change_a_bit",
            PARITY + "test_many_splits",
            ATTENTION + "test_companions_do_not_change_a_bit",
            "parity/test_attention_gpu.py::test_sixty_four_companions_do_not_change_a_bit",
        ),
    ),
    Failure(
        "a scale is dropped or applied twice for some dtype",
        "vllm-project/vllm/pull/42580",
        (
            READ + "test_no_scale_is_dropped_or_applied_twice",
            READ + "test_a_scale_that_is_given_is_the_one_that_counts",
            ATTENTION + "test_powers_of_two_pass_through",
        ),
    ),
    # The cache object.
    Failure(
        "reordering, cropping or selecting touches a part of what is stored",
        "huggingface/transformers/pull/45510",
        (
            CACHES + "test_what_is_done_to_sequences_is_done_to_all_that_is_stored",
            "integrations/test_operations.py::test_select_repeat_and_reorder",
            "integrations/test_operations.py::test_fifty_reorders_are_one",
            "integrations/test_operations.py::test_crop",
            "integrations/test_operations.py::test_crop_and_go_on",
            "integrations/test_operations.py::test_crop_to_nothing_and_go_on",
            "integrations/test_operations.py::test_reset",
            "integrations/test_operations.py::test_nothing_is_quantized_twice",
            "integrations/test_generation.py::test_beam_search",
        ),
    ),
    Failure(
        "length or dtype is wrong when a cache is used again",
        "NVIDIA/kvpress/issues/27",
        (
            CACHES + "test_the_length_and_the_dtype_after_every_update",
            "integrations/test_generation.py::test_a_second_generation_goes_on",
            "integrations/test_models.py::test_half_precision",
        ),
    ),
    Failure(
        "a large first token costs the others their precision",
        "huggingface/transformers/issues/35185",
        (
            CACHES + "test_the_first_tokens_can_be_kept_as_they_came",
            QUANTIZE + "test_a_token_with_a_large_norm_changes_no_other_token",
            ANALYSIS + "test_a_first_token_that_is_large_is_reported_apart",
            "integrations/test_packed_attention.py::test_is_the_definition",
        ),
    ),
    # Accounting.
    Failure(
        "a ratio of compression leaves scales or values out",
        "TheTom/turboquant_plus/pull/53",
        (
            ANALYSIS + "TestAccounting::test_exactly_the_bytes_of_the_tensors",
            ANALYSIS + "TestAccounting::test_ratios_of_rows",
            "integrations/test_operations.py::test_memory_is_every_stored_byte",
            "integrations/test_operations.py::test_bits_per_value_are_those_of_the_mode",
        ),
    ),
    Failure(
        "quantizing takes more memory than float16 does",
        "ml-explore/mlx-lm/issues/1587",
        (
            REFERENCE + "test_no_copy_in_float32_is_made_of_all_rows",
            CACHES + "test_an_update_keeps_no_copy_in_float32",
            GPU + "test_a_write_takes_no_memory_beside_the_cache",
            "integrations/test_gpu.py::test_memory_is_the_allocators_growth",
        ),
    ),
    # Running.
    Failure(
        "a CUDA graph bakes in what the host knew",
        "kekzl/imp/pull/986",
        (
            READ + "test_no_launch_depends_on_a_number_that_is_on_the_device",
            GPU + "test_a_captured_write_and_read_sees_what_has_changed",
            LIMITS + "test_a_captured_write_writes_what_is_there_when_it_is_replayed",
            LIMITS + "test_no_call_waits_for_the_device",
            "parity/test_attention_gpu.py::test_a_graph_whose_lengths_change",
            "parity/test_attention_gpu.py::test_nothing_waits_for_the_device",
            "integrations/test_gpu.py::test_a_captured_step_is_the_step",
        ),
    ),
    Failure(
        "every number of tokens is compiled anew",
        "vllm-project/vllm/issues/43009",
        (
            READ + "test_few_variants_would_be_compiled",
            GPU + "test_few_variants_are_compiled",
        ),
    ),
    Failure(
        "tokens are on an axis of the grid that ends at 65,535",
        "vllm-project/vllm/pull/52381",
        (
            GPU + "test_more_tokens_than_an_axis_of_the_grid_takes",
            GPU + "test_more_rows_than_an_axis_of_the_grid_takes",
            GPU + "test_more_queries_than_an_axis_of_the_grid_takes",
            READ + "test_tokens_are_on_the_first_axis_of_every_grid",
            LIMITS + "test_more_than_65535_tokens",
            LIMITS + "test_more_than_65535_rows",
        ),
    ),
    Failure(
        "an interpreter multiplies the bits of bfloat16",
        "triton-lang/triton/issues/11584",
        (
            READ + "test_bfloat16_is_multiplied_as_numbers",
            PARITY + "test_a_covering_array",
        ),
    ),
    Failure(
        "int4 of few heads is written wrongly now and then",
        "vllm-project/vllm/issues/53086",
        (
            WRITE + "test_small_head_counts_are_written_the_same_every_time",
            GPU + "test_small_head_counts_are_written_the_same_every_time",
            QUANTIZE + "test_small_head_counts_give_the_same_bytes_every_time",
        ),
    ),
)


@cache
def functions_of(path: Path) -> dict[str, ast.FunctionDef]:
    """The tests of a file by name, those of a class as `Class::test`."""
    found = {}
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    found[f"{node.name}::{item.name}"] = item
        elif isinstance(node, ast.FunctionDef):
            found[node.name] = node
    return {name: node for name, node in found.items() if "test_" in name}


def find(test: str) -> ast.FunctionDef | None:
    """The function of `file::test`, if there is one."""
    file, _, name = test.partition("::")
    path = TESTS / file
    return functions_of(path).get(name) if path.is_file() else None


def runs_by_default(test: str) -> bool:
    """Whether `make test` takes it: neither it nor its file has a marker that is left out."""
    node = find(test)
    assert node is not None
    marks = " ".join(map(ast.unparse, node.decorator_list))
    text = (TESTS / test.partition("::")[0]).read_text(encoding="utf-8")
    for line in re.findall(r"^pytestmark = (?:\[[^]]*\]|.*)", text, flags=re.MULTILINE):
        marks += line
    return not re.search(r"mark\.(gpu|slow|product|browser|realmodel)\b", marks)


def test_there_are_45() -> None:
    assert len(FAILURES) == 45
    assert len({failure.fault for failure in FAILURES}) == 45
    assert len({failure.url for failure in FAILURES}) == 45


@pytest.mark.parametrize("failure", FAILURES, ids=lambda failure: failure.fault)
def test_a_failure_is_held(failure: Failure) -> None:
    """Its tests exist, each once, and one at least needs no GPU."""
    assert re.fullmatch(r"[\w.-]+/[\w.-]+/(issues|pull)/\d+", failure.thread)
    assert len(set(failure.tests)) == len(failure.tests)
    for test in failure.tests:
        assert find(test) is not None, f"tests/{test} does not exist"
    assert any(map(runs_by_default, failure.tests))


def test_every_test_that_says_so_is_in_the_table() -> None:
    named = {test for failure in FAILURES for test in failure.tests}
    for path in sorted(TESTS.glob("*/test_known_failures*.py")):
        for name in functions_of(path):
            test = f"{path.relative_to(TESTS).as_posix()}::{name}"
            assert test in named or name in HELD_OTHERWISE, f"{test} is in no row"


#: Tests of the probes themselves, and of what their rows need beside them.
HELD_OTHERWISE = {
    "test_every_mode_is_of_one_of_the_kinds",
    "TestAccounting::test_tables",
    "TestAccounting::test_head_sizes_share_a_codebook_but_not_their_signs",
}
