"""GBNF expressions for JSON numbers within bounds."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

INTEGER_DIGITS = 16
FRACTION_DIGITS = 10
# More digits than a double holds could round an allowed text onto an excluded bound.
EXACT_DIGITS = 15


@dataclass(frozen=True)
class Bounds:
    """low <= x <= high, or < where exclusive; None is no bound."""

    low: Decimal | None = None
    high: Decimal | None = None
    above: bool = False  # low itself is excluded
    below: bool = False  # high itself is excluded


def integers(low: int | None, high: int | None) -> str | None:
    """The whole numbers low..high, of at most `INTEGER_DIGITS` digits where there is no bound.

    Returns:
        An expression; None when there are none.
    """
    parts = []
    if low is None or low < 0:
        most = None if low is None else -low
        least = 1 if high is None or high >= 0 else -high
        if most is None or least <= most:
            parts.append(f'"-" {_group(_naturals(least, most))}')
    if high is None or high >= 0:
        least = max(low or 0, 0)
        if high is None or least <= high:
            parts.append(_naturals(least, high))
    return " | ".join(parts) or None


def numbers(bounds: Bounds) -> str | None:
    """Decimal numbers within bounds, without exponents.

    Returns:
        An expression; None when there are none.
    """
    low, high = bounds.low, bounds.high
    parts = []
    if low is None or low < 0:
        least, strict = Decimal(0), False
        if high is not None and high <= 0:
            least, strict = -high, bounds.below
        text = _magnitudes(least, None if low is None else -low, strict, bounds.above)
        parts += [f'"-" {_group(text)}'] if text else []
    if high is None or high >= 0:
        least, strict = Decimal(0), False
        if low is not None and low >= 0:
            least, strict = low, bounds.above
        text = _magnitudes(least, high, strict, bounds.below)
        parts += [text] if text else []
    return " | ".join(parts) or None


def _group(text: str) -> str:
    return f"({text})" if " | " in text else text


def _digits(low: int, high: int) -> str:
    """Between `low` and `high` digits, any."""
    if high <= 0:
        return ""
    return "[0-9]" if low == high == 1 else f"[0-9]{{{low},{high}}}"


def _range(a: int, b: int) -> str:
    return f'"{a}"' if a == b else f"[{a}-{b}]"


def _naturals(low: int, high: int | None) -> str:
    """low..high without leading zeros; 0 <= low <= high."""
    if high is None:
        high = 10 ** max(INTEGER_DIGITS, len(str(low)) + 1) - 1
    parts = []
    if low == 0:
        parts.append('"0"')
        low = 1
    whole: list[int] = []  # lengths that are allowed whole
    for n in range(len(str(low)), len(str(high)) + 1):
        a, b = max(low, 10 ** (n - 1)), min(high, 10**n - 1)
        if a > b:
            continue
        if a == 10 ** (n - 1) and b == 10**n - 1:
            whole.append(n)
        else:
            parts.append(_same_length(str(a), str(b)))
    if whole:
        parts.append(f"[1-9] {_digits(whole[0] - 1, whole[-1] - 1)}".rstrip())
    return " | ".join(parts)


def _same_length(low: str, high: str) -> str:
    """Texts of digits between two of the same length."""
    if low == high:
        return f'"{low}"' if low else ""
    n = len(low) - 1
    if set(low) == {"0"} and set(high) == {"9"}:
        return _digits(n + 1, n + 1)
    a, b = int(low[0]), int(high[0])
    if a == b:
        return f'"{a}" {_group(_same_length(low[1:], high[1:]))}'
    parts = []
    if set(low[1:]) - {"0"}:
        parts.append(f'"{a}" {_group(_same_length(low[1:], "9" * n))}')
        a += 1
    last = ""
    if set(high[1:]) - {"9"}:
        last = f'"{b}" {_group(_same_length("0" * n, high[1:]))}'
        b -= 1
    if a <= b:
        parts.append(f"{_range(a, b)} {_digits(n, n)}".rstrip())
    return " | ".join([*parts, last] if last else parts)


def _magnitudes(low: Decimal, high: Decimal | None, above: bool, below: bool) -> str:
    """Unsigned decimals between two; "" when there are none."""
    if high is not None and (high < low or (high == low and (above or below))):
        return ""
    whole_low, fraction_low = _split(low)
    n = FRACTION_DIGITS
    if above or below:
        longest = len(str(whole_low if high is None else _split(high)[0]))
        n = max(1, min(n, EXACT_DIGITS - longest))
    if high is None:
        more = _naturals(whole_low + 1, None)
        return _join(_after(whole_low, _from(fraction_low, above, n)), f"{_group(more)} {_any(n)}")
    whole_high, fraction_high = _split(high)
    if whole_low == whole_high:
        return _join(_after(whole_low, _within(fraction_low, fraction_high, above, below, n)))
    between = ""
    if whole_low + 1 <= whole_high - 1:
        between = f"{_group(_naturals(whole_low + 1, whole_high - 1))} {_any(n)}"
    return _join(
        _after(whole_low, _from(fraction_low, above, n)),
        between,
        _after(whole_high, _to(fraction_high, below, n)),
    )


def _join(*parts: str) -> str:
    return " | ".join(p for p in parts if p)


def _split(x: Decimal) -> tuple[int, str]:
    """Whole part and the digits of the fraction, without zeros at the end."""
    whole, _, fraction = format(x, "f").partition(".")
    return int(whole), fraction.rstrip("0")


def _after(whole: int, fraction: list[str]) -> str:
    """A whole number and what may follow it: alternatives, "" for nothing."""
    if not fraction:
        return ""
    return f'"{whole}" {_optional(fraction)}'.rstrip()


def _optional(parts: list[str]) -> str:
    """Alternatives, optional when one of them is empty."""
    some = [p for p in parts if p]
    if not some:
        return ""
    text = " | ".join(some)
    if "" in parts:
        return f"({text})?"
    return f"({text})" if len(some) > 1 else text


def _any(n: int) -> str:
    return f'("." {_digits(1, n)})?'


def _from(f: str, strict: bool, n: int) -> list[str]:
    """Fractions, with their point, of at least (strict: more than) .f."""
    if f == "" and not strict:
        return ["", f'"." {_digits(1, n)}']
    return [f'"." {_optional(_digits_from(f, strict, n))}']


def _digits_from(f: str, strict: bool, n: int) -> list[str]:
    if f == "":
        if not strict:
            return ["", _digits(1, n)]
        return [f'"0"{{0,{n - 1}}} [1-9] {_digits(0, n - 1)}'.rstrip()]
    a = int(f[0])
    parts = []
    if a < 9:
        parts.append(f"{_range(a + 1, 9)} {_digits(0, n)}")
    parts.append(f'"{a}" {_optional(_digits_from(f[1:], strict, n))}'.rstrip())
    return parts


def _to(f: str, strict: bool, n: int) -> list[str]:
    """Nothing, or fractions with their point, of at most (strict: less than) .f."""
    if f == "":
        return [] if strict else ["", f'"." "0"{{1,{n}}}']
    return ["", f'"." {_optional(_digits_to(f, strict, n))}']


def _digits_to(f: str, strict: bool, n: int) -> list[str]:
    """One or more digits."""
    a = int(f[0])
    parts = []
    if a > 0:
        parts.append(f"{_range(0, a - 1)} {_digits(0, n)}")
    if f[1:]:
        parts.append(f'"{a}" {_optional(["", *_digits_to(f[1:], strict, n)])}')
    elif not strict:
        parts.append(f'"{a}" "0"{{0,{n}}}')
    return parts


def _within(low: str, high: str, above: bool, below: bool, n: int) -> list[str]:
    """Nothing or fractions with their point between .low and .high."""
    if low == "":
        parts = _to(high, below, n)
        if not above:
            return parts
        # The whole number itself is excluded: some digit has to differ from zero.
        inner = _digits_within("", high, above, below, n)
    else:
        inner = _digits_within(low, high, above, below, n)
    return [f'"." {_optional(inner)}'] if inner else []


def _digits_within(low: str, high: str, above: bool, below: bool, n: int) -> list[str]:
    """Digits (perhaps none) of fractions between .low and .high, where low <= high."""
    if low == high == "":
        return [] if above or below else ["", f'"0"{{1,{n}}}']
    if high == "":
        return []
    if low == "" and not above:
        return ["", *_digits_to(high, below, n)]
    a, b = int(low[0]) if low else 0, int(high[0])
    if a == b:
        inner = _digits_within(low[1:], high[1:], above, below, n)
        return [f'"{a}" {_optional(inner)}'.rstrip()] if inner else []
    parts = [f'"{a}" {_optional(_digits_from(low[1:], above, n))}'.rstrip()]
    if a + 1 <= b - 1:
        parts.append(f"{_range(a + 1, b - 1)} {_digits(0, n)}")
    if high[1:]:
        parts.append(f'"{b}" {_optional(["", *_digits_to(high[1:], below, n)])}')
    elif not below:
        parts.append(f'"{b}" "0"{{0,{n}}}')
    return parts
