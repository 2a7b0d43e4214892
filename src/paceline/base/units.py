"""The one place that formats quantities and lists for people."""

from collections.abc import Sequence

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_BINARY = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def count(value: float) -> str:
    """1234567 -> '1.23M'. For tokens, parameters, FLOPs."""
    for scale, suffix in _SI:
        if abs(value) >= 0.9995 * scale:  # is shown as 1, not as 1e+03 of the suffix before
            return f"{value / scale:.3g}{suffix}" if abs(value) < 999.5 * scale else f"{value / scale:,.0f}{suffix}"
    return f"{value:.3g}" if isinstance(value, float) and not float(value).is_integer() else f"{int(value)}"


def size(num_bytes: float) -> str:
    """1536 -> '1.5 KiB'."""
    for scale, suffix in _BINARY:
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.1f} {suffix}"
    return f"{int(num_bytes)} B"


def duration(seconds: float) -> str:
    """75 -> '1m15s'; 3.2 -> '3.2s'; 7384 -> '2h03m'."""
    if seconds < 10:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def milliseconds(value: float) -> str:
    """1234.5 -> '1,234 ms'; 1.2345 -> '1.23 ms'."""
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def listed(items: Sequence[object], most: int = 3) -> str:
    """['a', 'b', 'c', 'd', 'e'] -> 'a, b, c and 2 more'."""
    shown = ", ".join(map(str, items[:most]))
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def plural(number: int, noun: str) -> str:
    """1, 'rank' -> '1 rank'; 2, 'rank' -> '2 ranks'."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def dtype_name(dtype: object) -> str:
    """torch.bfloat16 -> 'bfloat16'."""
    return str(dtype).removeprefix("torch.")
