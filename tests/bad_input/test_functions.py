"""Every public function with every kind of bad input: an error that says what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bad_input import (
    analysis_rows,
    cache_rows,
    core_rows,
    file_rows,
    fit_rows,
    mode_rows,
    model_rows,
)
from tests.bad_input.table import Call, Row, check_complete, check_row, every_row

ROOMS = (core_rows, cache_rows, mode_rows, fit_rows, file_rows, model_rows, analysis_rows)
CALLS = [call for room in ROOMS for call in room.CALLS]
ALONE = [call for room in ROOMS for call in getattr(room, "ALONE", ())]


@pytest.mark.parametrize(("call", "parameter", "row"), every_row([*CALLS, *ALONE]))
def test_refused(call: Call, parameter: str, row: Row, tmp_path: Path) -> None:
    check_row(call, parameter, row, tmp_path)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_every_parameter_has_a_row(call: Call) -> None:
    check_complete(call)


@pytest.mark.parametrize("call", [call for call in CALLS if call.run], ids=lambda call: call.name)
def test_the_good_arguments_work(call: Call, tmp_path: Path) -> None:
    call.function(**call.good(tmp_path))
