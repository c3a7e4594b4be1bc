"""Numbers that the kernels share with the code that launches them, which is imported where there is no Triton."""

from __future__ import annotations

LOG2E = 1.4426950408889634
OVERFLOW = 2.0**100  # a sum of weights beyond is made again, with the running maximum
MASK = -30000.0  # times its own negative a logit of -9e8, for what is no key; fits float16


def power_of_two(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least `size` and `least`, itself a power of two."""
    return max(least, 1 << (size - 1).bit_length())
