"""How a real number becomes an integer code."""

from __future__ import annotations

from enum import Enum


class Rounding(Enum):
    """A rule that turns a float32 `v` into an integer; each member says its own.

    A mode's rounding serves its codes and its zero-point alike.
    """

    #: `trunc(RN(v + copysign(0.5, v)))`, literally: ties go away from zero, and so do the two
    #: neighbors +-0.49999997 of a tie, because the sum rounds up to 1.
    HALF_AWAY = "half_away"
    #: The nearest integer, ties to the even one (IEEE 754 roundTiesToEven).
    HALF_EVEN = "half_even"
    #: `trunc(v)`: the magnitude never grows. It is here to study the drift that it causes.
    TOWARD_ZERO = "toward_zero"
    #: `floor(v + u)` with `u` uniform on [0, 1): unbiased, and twice the squared error. Offered by
    #: the reference tier and the analysis only, with the caller's generator.
    STOCHASTIC = "stochastic"

    def __str__(self) -> str:
        return self.value
