"""Which tests answer for which file, the quickest first, and how many mutants are made of it.

The tests of a file finish in seconds: where a test of the suite takes longer, some of its cases
stand here by name. The order of the files is that of the results.

Not here: `kernels/launch.py`, whose choices change no bit, and what is there to be measured.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Subset(NamedTuple):
    """The tests of a file."""

    #: Mutants that are made of the file, beside those written by hand.
    sample: int
    #: Arguments of pytest.
    tests: tuple[str, ...]


def _cases(test: str, *cases: str) -> tuple[str, ...]:
    return tuple(f"{test}[{case}]" for case in cases)


_REFERENCE: Final = "tests/reference/test_"
#: Every rule that an argument can break.
_BAD_INPUT: Final = "tests/bad_input/test_functions.py"
#: The write path against the oracle: a variant of every part, and rows that are not ordinary.
_ROWS: Final = (
    f"{_REFERENCE}rounding.py",
    f"{_REFERENCE}scaling.py",
    f"{_REFERENCE}quantize_roundings.py",
    *_cases(
        f"{_REFERENCE}quantize.py::test_planted_rows_have_the_oracles_bits",
        *(
            f"128-torch.float32-{stem}_per_token_head"
            for stem in (
                *("int4", "int8", "fp8", "int2", "affine4", "lloyd3_unbiased_w16"),
                *("smax2_search_norm_match_w16", "lloyd4"),
            )
        ),
    ),
    *_cases(
        f"{_REFERENCE}quantize.py::test_modes_that_anybody_can_make_have_the_oracles_bits",
        *("int4@first_implementation", "int4@toward_zero", "affine4@half_even", "int8@half_even"),
        *("affine4@unrotated", "smax4@unrotated", "int4_per_token_head@two_rounds"),
        *("lloyd4_per_token_head@two_plain_rounds", "int2_per_token_head@repeated_signs"),
        *("lloyd4+even_5", "smax4+even_11_norm_match", "lloyd4+wide_3"),
        *("affine4_per_token_head@3_bits", "lloyd2_per_token_head@rounded"),
    ),
    f"{_REFERENCE}quantize.py::test_numbers_beside_thresholds",
    f"{_REFERENCE}quantize.py::test_zero_points_beside_ties",
    f"{_REFERENCE}quantize.py::test_refusals",
    f"{_REFERENCE}quantize.py::test_a_batch_larger_than_a_chunk_equals_its_parts",
    f"{_REFERENCE}quantize.py::test_a_tensor_that_requires_grad_is_stored_without_its_graph",
    f"{_REFERENCE}quantize.py::test_thresholds_belong_to_the_level_above",
    f"{_REFERENCE}quantize_rows.py",
    f"--deselect={_REFERENCE}quantize_rows.py::test_every_finite_float16_row_has_a_finite_word",
    f"{_REFERENCE}search.py::test_of_equal_merits_the_first_wins",
)
_TABLES: Final = (
    "tests/test_modes.py",
    f"{_REFERENCE}trellis.py",
    *_cases(
        f"{_REFERENCE}digests.py::test_known_codes_words_and_values",
        *(f"cpu-trellis{bits}_per_token_head-1024x64 bfloat16" for bits in (2, 3)),
    ),
)
_CACHE: Final = "tests/parity/test_cache.py"
_LIMITS: Final = "tests/parity/test_cache_limits.py"
_WRITES: Final = (
    f"{_LIMITS}::test_one_token",
    f"{_LIMITS}::test_nothing_to_write",
    f"{_LIMITS}::test_scan_and_claims_find_the_last_writers",
    f"{_LIMITS}::test_the_first_and_the_last_slot_and_nothing_beside_them",
    f"{_LIMITS}::test_slots_that_are_no_slots_are_skipped",
    f"{_LIMITS}::test_of_tokens_with_one_slot_the_last_is_written",
    f"{_LIMITS}::test_tokens_past_the_mapping_are_padding",
    f"{_CACHE}::test_a_mapping_shorter_than_the_tokens",
    f"{_CACHE}::test_an_interleaved_view_of_one_buffer",
    f"{_CACHE}::test_more_tokens_than_a_program_scans",
    f"{_CACHE}::test_no_tokens",
    f"{_CACHE}::test_copy_blocks_can_swap",
    *_cases(f"{_CACHE}::test_every_mode_as_keys_with_another_as_values", "fp8_per_token_head"),
    *_cases(
        "tests/parity/test_every_launch.py::test_the_covering_array",
        "int4_per_token_head-bfloat16-80-qkv_slice-HND",
    ),
)
#: The kernels against the reference.
_PARITY: Final = (
    "tests/parity/test_quantize.py::test_every_byte",
    "tests/parity/test_quantize.py::test_bad_input",
    "tests/parity/test_quantize.py::test_no_rows",
    "tests/parity/test_quantize.py::test_thresholds_belong_to_the_level_above",
    "tests/parity/test_quantize.py::test_every_byte_of_e4m3_reads_as_its_number",
    "tests/parity/test_quantize.py::test_an_inverse_divides_before_the_butterfly",
    "tests/parity/test_quantize.py::test_any_word_that_is_not_finite_reads_as_a_nan_row",
    "tests/parity/test_quantize.py::test_a_lane_that_is_not_finite_wherever_it_is",
    *_cases(
        "tests/parity/test_quantize.py::test_planted_rows",
        *(
            f"{stem}_per_token_head"
            for stem in (
                *("int2", "int4", "affine4", "int8", "fp8", "lloyd1", "lloyd2_norm_match"),
                *("lloyd3_unbiased_w16", "lloyd4", "smax3", "smax2_search_norm_match_w16"),
            )
        ),
    ),
    "tests/parity/test_quantize.py::test_a_guess_and_one_comparison_find_the_code",
    "tests/parity/test_quantize.py::test_no_guess_where_none_is_good_enough",
    "tests/parity/test_quantize.py::test_of_equal_merits_the_first_wins",
    "tests/parity/test_quantize.py::test_a_gain_whose_levels_square_to_zero_has_no_merit",
    "tests/parity/test_quantize.py::test_of_merits_that_overflow_the_first_wins",
    "tests/parity/test_quantize.py::"
    "test_the_smallest_row_of_a_codebook_mode_and_the_largest_ranges",
    "tests/parity/test_quantize.py::test_numbers_beside_thresholds",
    "tests/parity/test_quantize.py::test_zero_points_beside_ties",
    "tests/parity/test_quantize.py::test_a_few_modes_that_anybody_can_make",
    "tests/parity/test_quantize.py::test_rows_that_are_rounded_to_their_dtype_once_rotated",
    "tests/parity/test_quantize.py::test_hadamard_transform",
    *_cases(
        "tests/parity/test_every_launch.py::test_the_covering_array",
        "int4_per_token_head-bfloat16-80-qkv_slice-HND",
        "lloyd3_unbiased_per_token_head-float32-80-expanded-NHD",
        "smax2_per_token_head-bfloat16-80-qkv_slice-HND",
    ),
)
_PAGES: Final = "tests/parity/test_attention.py"
#: Attention against its budget: every kind of operand and feature, in the smallest cases.
_ATTENTION: Final = (
    f"{_PAGES}::test_empty_batches",
    f"{_PAGES}::test_no_blocks_at_all",
    f"{_PAGES}::test_the_output_alone",
    f"{_PAGES}::test_queries_of_no_sequence_see_nothing",
    f"{_PAGES}::test_a_table_that_is_too_narrow",
    f"{_PAGES}::test_a_short_bias_ends",
    f"{_PAGES}::test_large_queries_and_small_ones",
    f"{_PAGES}::test_float32_queries_see_the_last_bits_of_a_scale",
    f"{_PAGES}::test_nothing_visible_is_zero_even_for_a_nan_query",
    f"{_PAGES}::test_a_nan_value_counts_even_where_its_weight_vanishes",
    f"{_PAGES}::test_keys_whose_biases_are_all_the_least_number_are_seen",
    f"{_PAGES}::test_windows_of_a_program_begin_in_different_tiles",
    f"{_PAGES}::test_rows_of_an_odd_number_of_bytes",
    f"{_PAGES}::test_the_hyperbolic_tangent_is_accurate_relative_to_its_value",
    *_cases(
        f"{_PAGES}::test_a_covering_array",
        "int4_per_token_head-lloyd2_norm_match_per_token_head-"
        "window+soft_cap+alibi+sinks+tree+bias+padding-bfloat16",
        "affine4@unrotated-lloyd2_per_token_head-"
        "window+soft_cap+alibi+sinks+tree+bias+padding-bfloat16",
        "int8_per_token_head-trellis3_unbiased_per_token_head-"
        "window+soft_cap+alibi+sinks+trees+token_bias+padding-float32",
        "lloyd3_unit_per_token_head-lloyd3_unit_per_token_head-alibi-float16",
        "int4_per_token_head@3_bits-smax3_search_per_token_head-window-bfloat16",
        "smax3_search_unbiased_w16_per_token_head-lloyd1_norm_match_per_token_head-"
        "token_bias-bfloat16",
        "lloyd1_per_token_head-int4@unrotated-head_bias-float16",
        "smax4+fresh_200-fp8_per_token_head@rotated-plain-float32",
        "lloyd4_per_token_head-affine4_per_token_head@1_bits-key_bias-float16",
        "lloyd2_per_token_head-lloyd3_per_token_head-sinks-bfloat16",
        "lloyd1+fresh_2-lloyd2_unbiased_w16_per_token_head-padding-float32",
        "lloyd4_search_per_token_head-int2_per_token_head-plain-bfloat16",
    ),
    *_cases(
        f"{_PAGES}::test_scales_far_apart_and_outliers",
        "('affine4', 'affine4')-torch.float16-1.0",
        "('fp8', 'fp8')-torch.float32-1.0",
        "('int4', 'int4')-torch.bfloat16-8.0",
    ),
    *_cases(f"{_PAGES}::test_scales_that_change_from_tile_to_tile", "plain-growing"),
    *_cases(
        f"{_PAGES}::test_many_splits",
        "window+padding-(64, 64, 3)",
        "sinks+bias-(64, 64, 1)",
    ),
    *_cases(f"{_PAGES}::test_what_is_hidden_may_be_anything", "int4_per_token_head", "affine4"),
    *_cases(f"{_PAGES}::test_a_nan_row_reaches_who_sees_it", "affine4", "lloyd3"),
    *_cases(f"{_PAGES}::test_a_block_that_does_not_exist", "-1", "None"),
    f"{_PAGES}::test_views_and_index_dtypes_change_no_bit",
    "tests/parity/test_trellis.py::test_rows_on_odd_bytes",
)

#: By file.
SUBSETS: Final[dict[str, Subset]] = {
    "kvq/codebooks.py": Subset(
        10,
        (
            "tests/test_modes.py",
            f"{_REFERENCE}codebook_files.py::test_faults",
            f"{_REFERENCE}lloyd_max.py::test_what_ships_is_what_its_recipe_fits",
            f"{_REFERENCE}lloyd_max.py::test_name_recipe_and_provenance",
            _BAD_INPUT,
        ),
    ),
    "kvq/trellis.py": Subset(20, (*_TABLES, _BAD_INPUT)),
    "kvq/scale_word.py": Subset(12, _ROWS),
    "kvq/modes.py": Subset(
        14,
        (
            "tests/test_modes.py",
            *_cases(
                f"{_REFERENCE}digests.py::test_known_codes_words_and_values",
                "cpu-lloyd2_search_per_token_head-1024x64 bfloat16",
                "cpu-smax2_search_per_token_head-1024x64 bfloat16",
            ),
            *_ROWS,
        ),
    ),
    "kvq/reference/scaling.py": Subset(10, _ROWS),
    "kvq/reference/rounding.py": Subset(10, _ROWS),
    "kvq/reference/packing.py": Subset(8, (f"{_REFERENCE}packing.py",)),
    "kvq/reference/hadamard.py": Subset(10, (f"{_REFERENCE}hadamard.py",)),
    "kvq/reference/quantize.py": Subset(16, (*_ROWS, _BAD_INPUT)),
    "kvq/reference/trellis.py": Subset(
        8,
        (
            f"{_REFERENCE}trellis.py",
            *_cases(
                f"{_REFERENCE}quantize.py::test_planted_rows_have_the_oracles_bits",
                "128-torch.float32-trellis2_per_token_head",
                "128-torch.float32-trellis3_per_token_head",
            ),
        ),
    ),
    "kvq/reference/exact.py": Subset(6, (f"{_REFERENCE}exact.py",)),
    "kvq/reference/cache.py": Subset(6, (f"{_REFERENCE}cache.py", _BAD_INPUT)),
    "kvq/reference/attention.py": Subset(12, (f"{_REFERENCE}attention.py",)),
    "kvq/reference/rotary.py": Subset(4, (f"{_REFERENCE}rotary.py", _BAD_INPUT)),
    "kvq/reference/key_transforms.py": Subset(
        6,
        (
            f"{_REFERENCE}key_transforms.py",
            f"--deselect={_REFERENCE}key_transforms.py::test_attention_is_within_its_budget",
        ),
    ),
    "kvq/reference/laws.py": Subset(4, (f"{_REFERENCE}laws.py", f"{_REFERENCE}lloyd_max.py")),
    "kvq/reference/lloyd_max.py": Subset(
        4, (f"{_REFERENCE}lloyd_max.py", f"{_REFERENCE}lloyd_max_samples.py")
    ),
    "kvq/kernels/rounding.py": Subset(3, _PARITY),
    "kvq/kernels/scaling.py": Subset(
        0,
        (
            *_PARITY,
            *_cases("tests/parity/test_attention.py::test_a_nan_row_reaches_who_sees_it", "fp8"),
        ),
    ),
    "kvq/kernels/rows.py": Subset(1, _PARITY),
    "kvq/kernels/packing.py": Subset(4, _PARITY),
    "kvq/kernels/hadamard.py": Subset(4, _PARITY),
    "kvq/kernels/codebook.py": Subset(1, _PARITY),
    "kvq/kernels/quantize.py": Subset(
        6,
        (
            *_PARITY,
            *_cases(
                "tests/parity/test_trellis.py::test_search_and_decode",
                "trellis2_per_token_head-16",
            ),
        ),
    ),
    "kvq/kernels/trellis.py": Subset(2, ("tests/parity/test_trellis.py",)),
    "kvq/kernels/cache.py": Subset(4, _WRITES),
    "kvq/kernels/merge.py": Subset(2, ("tests/parity/test_merge.py",)),
    "kvq/kernels/byte_tables.py": Subset(3, ("tests/parity/test_operand_ptx.py",)),
    "kvq/kernels/side_spec.py": Subset(8, ("tests/parity/test_operand_ptx.py", *_ATTENTION)),
    "kvq/kernels/operands.py": Subset(8, ("tests/parity/test_operand_ptx.py", *_ATTENTION)),
    "kvq/kernels/trellis_operands.py": Subset(
        4,
        tuple(
            f"tests/parity/test_trellis.py::test_{name}"
            for name in (
                *("labels_in_registers", "a_window_too_wide_for_rows_on_odd_bytes"),
                "what_follows_comes_from_other_threads",
                *("rows_on_odd_bytes", "attention"),
            )
        ),
    ),
    "kvq/kernels/attention.py": Subset(
        8,
        (
            *_ATTENTION,
            "tests/parity/test_attention.py::test_rotated_queries_keep_more_bits_than_one_float16",
        ),
    ),
    "kvq/kernels/attention_loop.py": Subset(2, _ATTENTION),
    "kvq/kernels/attention_queries.py": Subset(2, _ATTENTION),
    "kvq/kernels/attention_tile.py": Subset(1, _ATTENTION),
    "kvq/kernels/attention_pages.py": Subset(2, _ATTENTION),
    "kvq/kernels/attention_ends.py": Subset(2, _ATTENTION),
}
