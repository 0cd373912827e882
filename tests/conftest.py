"""What every test shares: devices, threads, the budget of the property tests."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Triton reads it when it is imported: without a device the kernels run interpreted.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Rows are small and machines are shared: a second thread would mostly wait for the first.
torch.set_num_threads(1)

# The same number of examples everywhere. CI draws the same ones every time, so that a red run is
# the fault of the change; elsewhere each run draws new ones.
settings.register_profile(
    "kvq",
    max_examples=50,
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    print_blob=True,
)
# `make fuzz`: five times as many examples, and new ones every time.
settings.register_profile("long", settings.get_profile("kvq"), max_examples=250, derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "kvq"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and under the marker `gpu` a CUDA device."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return torch.device(request.param)
