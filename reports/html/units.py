"""Format times, sizes and rates with units."""

from collections.abc import Sequence

_TIMES = ((1e9, "s"), (1e6, "ms"), (1e3, "\u00b5s"), (1.0, "ns"))


def digits(value: float) -> str:
    """Return at most three significant digits, or all digits of a larger whole number."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def time(ns: float) -> str:
    """Return a time with a suitable unit: ``12 µs``."""
    return _scaled(ns, _TIMES)


def measured_time(ns: float) -> str:
    """Return the same with three digits, trailing zeros included: ``12.0 µs``."""
    number, unit = time(ns).split()
    return f"{number if ',' in number else f'{float(number):#.3g}'.removesuffix('.')} {unit}"


def bytes_(count: float) -> str:
    """Return a number of bytes with a unit: ``4 MB``."""
    return _scaled(count, ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")))


def rate(flops_per_s: float) -> str:
    """Return operations a second with a unit: ``3.1 TFLOP/s``."""
    units = ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s"), (1e6, "MFLOP/s"), (1, "FLOP/s"))
    return _scaled(flops_per_s, units)


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> str:
    size, unit = next((each for each in units if value >= each[0] * 0.9995), units[-1])
    return f"{digits(value / size)} {unit}"
