"""Training prompts for a small chat model, made from lists and templates.

``python prompts.py COUNT [--seed N]`` writes JSON lines ``{"turns": ["..."]}``; the same count and
seed always give the same prompts, all of them different, and a smaller count gives a prefix.

The text files beside this module hold the lists and templates. In a template ``<a=3..9>`` draws a
number and names it, ``<b=10..90:5>`` draws one of 10, 15, ..., ``<c=half|all>`` draws a choice,
``<d=a*b+2>`` is computed, ``<a>`` repeats a value, ``<item>`` draws from the list ``item`` of
``words.txt`` (``<item2>`` is another item), and a name that begins with ``_`` prints nothing.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import operator
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
FIELD = re.compile(r"<(_?[A-Za-z]\w*)(?:=([^<>]+))?>")
ARTICLE = re.compile(r"\b([Aa]) (?=[aeiouAEIOU]|8|11\b|18\b)(?!one|uni|use|Euro|URL)")
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
Maker = Callable[[Any], Any]
PRONOUNS = {"she": ("she", "her", "her"), "he": ("he", "his", "him")}
BLOCK = ["story"] * 4 + ["maths"] * 3 + ["complete"] * 3 + ["write"] * 3 + ["open"] * 7


@cache
def lines(name: str) -> list[str]:
    """Return the non-empty lines of a text file beside this module."""
    text = (HERE / f"{name}.txt").read_text(encoding="utf-8")
    return [line.strip() for line in text.splitlines() if line.strip()]


@cache
def words() -> dict[str, list[str]]:
    """Return the word lists by name."""
    pairs = (line.split(": ", 1) for line in lines("words"))
    return {key: value.split("; ") for key, value in pairs}


@cache
def open_templates() -> dict[str, list[str]]:
    """Return the open requests' templates by category."""
    found: dict[str, list[str]] = {}
    for line in lines("open"):
        key, template = line.split(": ", 1)
        found.setdefault(key, []).append(template.replace("\\n", "\n"))
    return found


def compute(text: str, values: dict[str, str]) -> int:
    """Evaluate a small whole-number expression over values drawn before."""

    def visit(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp):
            return OPERATORS[type(node.op)](visit(node.left), visit(node.right))
        if isinstance(node, ast.Name):
            return int(values[node.id])
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        raise ValueError(f"cannot compute {text!r}")

    return visit(ast.parse(text, mode="eval").body)


def draw(spec: str, values: dict[str, str], rng: random.Random) -> str:
    """Draw or compute the value that a field's specification asks for."""
    if ".." in spec:
        span, _, step = spec.partition(":")
        low, high = (compute(end, values) for end in span.split(".."))
        return str(rng.randrange(low, max(low, high) + 1, int(step or 1)))
    if re.fullmatch(r"[\w+*/-]*[+*/-][\w+*/-]*", spec):
        return str(compute(spec, values))
    return rng.choice(spec.split("|"))


def draw_word(key: str, values: dict[str, str], rng: random.Random) -> str:
    """Draw an item of a word list that is not in use yet under the same list's name."""
    base = key.rstrip("0123456789")
    if base == "passage":
        return fill(rng.choice(lines("passages")), rng)
    if base == "name":
        gender = rng.choice(("she", "he"))
        pool = words()[gender]
        if key == "name":
            values.update(zip(("he", "his", "him"), PRONOUNS[gender], strict=True))
    else:
        pool = words()[base]
    used = {value for name, value in values.items() if name.rstrip("0123456789") == base}
    return rng.choice([item for item in pool if item not in used] or pool)


def fill(template: str, rng: random.Random) -> str:
    """Fill the fields of a template."""
    values: dict[str, str] = {}

    def replace(match: re.Match[str]) -> str:
        name, spec = match.groups()
        key = name.lower() if name in ("He", "His", "Him") else name
        if spec is not None:
            values[key.lstrip("_")] = draw(spec, values, rng)
        elif key not in values:
            if key in ("he", "his", "him"):
                values["name"] = draw_word("name", values, rng)
            else:
                values[key] = draw_word(key, values, rng)
                values[key] = FIELD.sub(replace, values[key])
        value = values[key.lstrip("_")]
        if name.startswith("_"):
            return ""
        return value.capitalize() if name != key else value

    return FIELD.sub(replace, template)


def articles(text: str) -> str:
    """Write ``an`` before a vowel."""
    return ARTICLE.sub(r"\1n ", text)


class Task(NamedTuple):
    """A small function to be written: its name, parameters, type, wording and meaning."""

    name: str
    params: str
    returns: str
    phrase: str
    meaning: Callable[..., Any]
    inputs: str


TEXT = (
    "amber river stone lantern window copper maple cloud garden silver engine pepper level noon "
    "radar violin market bridge planet cotton forest ladder mirror orange ticket summer winter "
    "Apple Tiger Berlin kayak zebra echo piano ocean index unit area"
).split()


def make(kind: str, rng: random.Random) -> Any:
    """Make a random argument of a kind: n, k, f, l, L, w, s, c, d or m."""
    if kind == "n":
        return rng.choice((rng.randint(1, 30), rng.randint(10, 999), rng.randint(100, 99999)))
    if kind == "k":
        return rng.randint(2, 6)
    if kind == "f":
        return rng.randint(4, 80) / 2
    if kind == "l":
        return [rng.randint(-9, 30) for _ in range(rng.randint(3, 7))]
    if kind == "L":
        return sorted(rng.sample(range(60), rng.randint(3, 7)))
    if kind == "w":
        return [rng.choice(TEXT) for _ in range(rng.randint(2, 5))]
    if kind == "s":
        return " ".join(rng.choice(TEXT) for _ in range(rng.randint(1, 3)))
    if kind == "c":
        return rng.choice("aeionrtl")
    if kind == "d":
        return {word: rng.randint(1, 20) for word in rng.sample(TEXT, rng.randint(2, 4))}
    size = rng.randint(2, 3)
    return [[rng.randint(0, 12) for _ in range(size)] for _ in range(rng.randint(2, 3))]


def is_prime(n: int) -> bool:
    """Return whether n is prime."""
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


N, S, LI, LS, D = "n: int", "text: str", "List[int]", "List[str]", "Dict[str, int]"
X, W = "numbers: List[int]", "words: List[str]"
M, K = "matrix: List[List[int]]", ", k: int"
TASKS = [
    Task("digit_total", N, "int", "add up the digits of n", lambda n: sum(map(int, str(n))), "n"),
    Task("flip_digits", N, "int", "reverse the digits of n", lambda n: int(str(n)[::-1]), "n"),
    Task("largest_digit", N, "int", "find the largest digit of n", lambda n: int(max(str(n))), "n"),
    Task(
        "digits_desc",
        N,
        "int",
        "sort the digits of n from large to small",
        lambda n: int("".join(sorted(str(n), reverse=True))),
        "n",
    ),
    Task(
        "divisors_of",
        N,
        LI,
        "list all positive divisors of n in increasing order",
        lambda n: [d for d in range(1, n + 1) if n % d == 0],
        "n",
    ),
    Task(
        "smallest_factor",
        N,
        "int",
        "find the smallest divisor of n above 1, or 1 if n is 1",
        lambda n: next((d for d in range(2, n + 1) if n % d == 0), 1),
        "n",
    ),
    Task(
        "next_prime",
        N,
        "int",
        "find the smallest prime greater than n",
        lambda n: next(m for m in range(n + 1, 2 * n + 2) if is_prime(m)),
        "n",
    ),
    Task(
        "ones_in_binary",
        N,
        "int",
        "count the ones in the binary form of n",
        lambda n: bin(n).count("1"),
        "n",
    ),
    Task(
        "binary_gapless",
        N,
        "bool",
        "check whether the binary form of n has no zeros",
        lambda n: "0" not in bin(n)[2:],
        "n",
    ),
    Task(
        "steps_to_one",
        N,
        "int",
        "count how often n can be halved, rounding down, before it reaches 1",
        lambda n: n.bit_length() - 1,
        "n",
    ),
    Task(
        "clock_text",
        "minutes: int",
        "str",
        "format a number of minutes after midnight as HH:MM on a 24-hour clock",
        lambda n: f"{n // 60 % 24:02d}:{n % 60:02d}",
        "n",
    ),
    Task(
        "nearest_square",
        N,
        "int",
        "find the largest perfect square that is not above n",
        lambda n: math.isqrt(n) ** 2,
        "n",
    ),
    Task(
        "alternating_digits",
        N,
        "int",
        "add and subtract the digits of n in turn, starting with plus on the left",
        lambda n: sum((-1) ** i * int(c) for i, c in enumerate(str(n))),
        "n",
    ),
    Task(
        "to_base",
        "n: int" + K,
        "str",
        "write n in base k as a string, where k is at most 9",
        lambda n, k: (lambda f: f(f, n))(
            lambda f, m: str(m) if m < k else f(f, m // k) + str(m % k)
        ),
        "nk",
    ),
    Task(
        "round_to",
        "n: int" + K,
        "int",
        "round n up to the nearest multiple of k",
        lambda n, k: -(-n // k) * k,
        "nk",
    ),
    Task(
        "coprime_pair",
        "a: int, b: int",
        "bool",
        "check whether a and b share no factor above 1",
        lambda a, b: math.gcd(a, b) == 1,
        "nn",
    ),
    Task(
        "shared_digits",
        "a: int, b: int",
        LI,
        "list the digits that occur in both a and b in increasing order",
        lambda a, b: sorted(set(map(int, str(a))) & set(map(int, str(b)))),
        "nn",
    ),
    Task(
        "trip_cost",
        "distance: float, liters: float, price: int",
        "float",
        "compute the fuel cost of a trip from the distance, the liters per 100 km and the price",
        lambda a, b, c: round(a * b / 100 * c, 2),
        "ffk",
    ),
    Task(
        "box_surface",
        "a: int, b: int, c: int",
        "int",
        "compute the surface area of a box with sides a, b and c",
        lambda a, b, c: 2 * (a * b + b * c + a * c),
        "kkk",
    ),
    Task(
        "to_fahrenheit",
        "celsius: float",
        "float",
        "convert a temperature to Fahrenheit",
        lambda c: round(c * 9 / 5 + 32, 1),
        "f",
    ),
    Task(
        "spread",
        X,
        "int",
        "find the difference between the largest and smallest number",
        lambda x: max(x) - min(x),
        "l",
    ),
    Task(
        "steps_between",
        X,
        LI,
        "list the differences between neighboring numbers",
        lambda x: [b - a for a, b in pairwise(x)],
        "l",
    ),
    Task(
        "running_max",
        X,
        LI,
        "replace every number by the largest seen up to that position",
        lambda x: [max(x[: i + 1]) for i in range(len(x))],
        "l",
    ),
    Task(
        "running_sums",
        X,
        LI,
        "list the sums of all prefixes of the list",
        lambda x: [sum(x[: i + 1]) for i in range(len(x))],
        "l",
    ),
    Task(
        "peaks",
        X,
        LI,
        "list the numbers that are larger than both of their neighbors",
        lambda x: [x[i] for i in range(1, len(x) - 1) if x[i - 1] < x[i] > x[i + 1]],
        "l",
    ),
    Task(
        "rotate_left",
        X + K,
        LI,
        "rotate the list to the left by k places",
        lambda x, k: x[k % len(x) :] + x[: k % len(x)],
        "lk",
    ),
    Task(
        "in_chunks",
        X + K,
        "List[List[int]]",
        "split the list into chunks of k numbers, the last of which may be shorter",
        lambda x, k: [x[i : i + k] for i in range(0, len(x), k)],
        "lk",
    ),
    Task(
        "every_kth",
        X + K,
        LI,
        "keep every k-th number of the list, starting with the first",
        lambda x, k: x[::k],
        "lk",
    ),
    Task(
        "best_window",
        X + ", k: int = 2",
        "int",
        "find the largest sum of k consecutive numbers, or of all if there are fewer",
        lambda x, k: max(sum(x[i : i + k]) for i in range(max(1, len(x) - k + 1))),
        "lk",
    ),
    Task(
        "top_k",
        X + K,
        LI,
        "return the k largest numbers in decreasing order",
        lambda x, k: sorted(x, reverse=True)[:k],
        "lk",
    ),
    Task(
        "is_rising",
        X,
        "bool",
        "check whether every number is larger than the one before it",
        lambda x: all(a < b for a, b in pairwise(x)),
        "L",
    ),
    Task(
        "missing_between",
        X,
        LI,
        "list the whole numbers between the smallest and the largest that are not in the list",
        lambda x: [n for n in range(min(x), max(x)) if n not in x],
        "L",
    ),
    Task(
        "merge_ranked",
        "first: List[int], second: List[int]",
        LI,
        "merge two sorted lists into one sorted list",
        lambda x, y: sorted(x + y),
        "LL",
    ),
    Task(
        "only_in_first",
        "first: List[int], second: List[int]",
        LI,
        "list the numbers of the first list that are not in the second, in order",
        lambda x, y: [n for n in x if n not in y],
        "LL",
    ),
    Task(
        "dot",
        "first: List[int], second: List[int]",
        "int",
        "add up the products of numbers at equal positions, ignoring extra numbers",
        lambda x, y: sum(a * b for a, b in zip(x, y, strict=False)),
        "ll",
    ),
    Task(
        "interleave",
        "first: List[int], second: List[int]",
        LI,
        "take numbers from the two lists in turn until the shorter one is used up",
        lambda x, y: [n for p in zip(x, y, strict=False) for n in p],
        "ll",
    ),
    Task(
        "pair_exists",
        X + ", target: int",
        "bool",
        "check whether two numbers at different positions have the given sum",
        lambda x, t: any(a + b == t for i, a in enumerate(x) for b in x[i + 1 :]),
        "ln",
    ),
    Task(
        "middle_value",
        X,
        "int",
        "find the lower median of the list",
        lambda x: sorted(x)[(len(x) - 1) // 2],
        "l",
    ),
    Task(
        "sign_changes",
        X,
        "int",
        "count how often neighbors have opposite signs, ignoring zeros",
        lambda x: sum(a * b < 0 for z in [[n for n in x if n]] for a, b in pairwise(z)),
        "l",
    ),
    Task(
        "clamp_all",
        "numbers: List[int], low: int",
        LI,
        "replace all numbers below the limit by the limit",
        lambda x, k: [max(n, k) for n in x],
        "lk",
    ),
    Task(
        "vowel_total",
        S,
        "int",
        "count the vowels in a text, upper and lower case",
        lambda s: sum(c in "aeiouAEIOU" for c in s),
        "s",
    ),
    Task(
        "initials",
        S,
        "str",
        "join the first letters of all words in upper case",
        lambda s: "".join(w[0].upper() for w in s.split()),
        "s",
    ),
    Task(
        "swap_ends",
        S,
        "str",
        "swap the first and the last character of a text",
        lambda s: s[-1] + s[1:-1] + s[0],
        "s",
    ),
    Task(
        "mirror_words",
        S,
        "str",
        "reverse every word of a text but keep the order of the words",
        lambda s: " ".join(w[::-1] for w in s.split()),
        "s",
    ),
    Task(
        "word_order_back",
        S,
        "str",
        "put the words of a text in the opposite order",
        lambda s: " ".join(s.split()[::-1]),
        "s",
    ),
    Task(
        "letter_table",
        S,
        D,
        "count how often each letter occurs, ignoring spaces",
        lambda s: {c: s.count(c) for c in s if c != " "},
        "s",
    ),
    Task(
        "first_repeat",
        S,
        "str",
        "find the first character that occurs again later, or ''",
        lambda s: next((c for i, c in enumerate(s) if c in s[i + 1 :]), ""),
        "s",
    ),
    Task(
        "squeeze",
        S,
        "str",
        "replace runs of the same character by a single one",
        lambda s: "".join(c for i, c in enumerate(s) if i == 0 or c != s[i - 1]),
        "s",
    ),
    Task(
        "drop_vowels",
        S,
        "str",
        "remove all lower-case vowels from a text",
        lambda s: "".join(c for c in s if c not in "aeiou"),
        "s",
    ),
    Task(
        "shift_letters",
        "text: str" + K,
        "str",
        "shift lower-case letters k places in the alphabet, wrapping around, and keep the rest",
        lambda s, k: "".join(chr((ord(c) - 97 + k) % 26 + 97) if c.islower() else c for c in s),
        "sk",
    ),
    Task(
        "positions_of",
        "text: str, char: str",
        LI,
        "list the positions of a character in a text",
        lambda s, c: [i for i, d in enumerate(s) if d == c],
        "sc",
    ),
    Task(
        "mask_char",
        "text: str, char: str",
        "str",
        "replace every occurrence of char by a star",
        lambda s, c: s.replace(c, "*"),
        "sc",
    ),
    Task(
        "snake",
        S,
        "str",
        "join the words of a text with underscores in lower case",
        lambda s: "_".join(s.lower().split()),
        "s",
    ),
    Task(
        "camel",
        S,
        "str",
        "join the words of a text in camel case, starting in lower case",
        lambda s: "".join(w.capitalize() if i else w.lower() for i, w in enumerate(s.split())),
        "s",
    ),
    Task(
        "same_letters",
        "first: str, second: str",
        "bool",
        "check whether two texts use the same set of letters, ignoring spaces",
        lambda a, b: set(a) - {" "} == set(b) - {" "},
        "ss",
    ),
    Task(
        "longest_word",
        W,
        "str",
        "find the longest word, and the first of them if several tie",
        lambda w: max(w, key=len),
        "w",
    ),
    Task(
        "by_length",
        W,
        LS,
        "sort the words by length and then alphabetically",
        lambda w: sorted(w, key=lambda v: (len(v), v)),
        "w",
    ),
    Task(
        "without_copies",
        W,
        LS,
        "remove repeated words and keep the order of the others",
        lambda w: list(dict.fromkeys(w)),
        "w",
    ),
    Task(
        "group_initial",
        W,
        "Dict[str, List[str]]",
        "group the words by their first letter",
        lambda w: {c: [v for v in w if v[0] == c] for c in dict.fromkeys(v[0] for v in w)},
        "w",
    ),
    Task(
        "length_table", W, D, "map each word to its length", lambda w: {v: len(v) for v in w}, "w"
    ),
    Task(
        "mirror_count",
        W,
        "int",
        "count the words that read the same backward",
        lambda w: sum(v == v[::-1] for v in w),
        "w",
    ),
    Task(
        "chain_ok",
        W,
        "bool",
        "check whether each word begins with the last letter of the word before it",
        lambda w: all(a[-1] == b[0] for a, b in pairwise(w)),
        "w",
    ),
    Task(
        "best_key",
        "scores: Dict[str, int]",
        "str",
        "find the key with the highest score, the first on a tie",
        lambda d: max(d, key=d.__getitem__),
        "d",
    ),
    Task(
        "keys_above",
        "stock: Dict[str, int]" + K,
        LS,
        "list the keys whose value is above k in alphabetical order",
        lambda d, k: sorted(v for v in d if d[v] > k),
        "dk",
    ),
    Task(
        "total_value",
        "stock: Dict[str, int], price: int",
        "int",
        "compute the value of all stock at a fixed price per piece",
        lambda d, k: sum(d.values()) * k,
        "dk",
    ),
    Task(
        "ranked_names",
        "scores: Dict[str, int]",
        LS,
        "list the names from the highest to the lowest score, ties in alphabetical order",
        lambda d: sorted(d, key=lambda v: (-d[v], v)),
        "d",
    ),
    Task("row_totals", M, LI, "add up each row of a matrix", lambda m: [sum(r) for r in m], "m"),
    Task(
        "column_max",
        M,
        LI,
        "find the largest number in each column of a matrix",
        lambda m: [max(c) for c in zip(*m, strict=True)],
        "m",
    ),
    Task(
        "turn_right",
        M,
        "List[List[int]]",
        "rotate a matrix by 90 degrees clockwise",
        lambda m: [list(c) for c in zip(*m[::-1], strict=True)],
        "m",
    ),
    Task(
        "border_sum",
        M,
        "int",
        "add up the first and the last row of a matrix",
        lambda m: sum(m[0]) + sum(m[-1]),
        "m",
    ),
    Task(
        "flatten_sorted",
        M,
        LI,
        "list all numbers of a matrix in increasing order",
        lambda m: sorted(n for r in m for n in r),
        "m",
    ),
]


def numbers_task(rng: random.Random) -> Task:
    """Compose a task on a list of numbers from a condition and a result."""
    k = rng.randint(2, 12)
    conditions: list[tuple[str, str, Maker]] = [
        ("even", "even numbers", lambda n: n % 2 == 0),
        ("odd", "odd numbers", lambda n: n % 2 == 1),
        (f"mult{k}", f"multiples of {k}", lambda n: n % k == 0),
        (f"over{k}", f"numbers greater than {k}", lambda n: n > k),
        (f"below{k}", f"numbers less than {k}", lambda n: n < k),
        ("negative", "negative numbers", lambda n: n < 0),
        ("prime", "prime numbers", is_prime),
        ("square", "perfect squares", lambda n: n >= 0 and math.isqrt(n) ** 2 == n),
        (f"ends{k % 10}", f"numbers whose last digit is {k % 10}", lambda n: abs(n) % 10 == k % 10),
    ]
    results: list[tuple[str, str, str, Maker]] = [
        ("sum_{}", "int", "add up the {} in a list", lambda x: sum(x)),
        ("count_{}", "int", "count the {} in a list", lambda x: len(x)),
        ("pick_{}", LI, "collect the {} of a list in their original order", lambda x: x),
        (
            "sorted_{}",
            LI,
            "sort the {} of a list in decreasing order",
            lambda x: sorted(x, reverse=True),
        ),
        (
            "largest_{}",
            "Optional[int]",
            "find the largest of the {} in a list, or None",
            lambda x: max(x, default=None),
        ),
        ("squares_{}", LI, "list the squares of the {} in a list", lambda x: [n * n for n in x]),
        ("product_{}", "int", "multiply the {} in a list, giving 1 if there are none", math.prod),
        (
            "last_{}",
            "Optional[int]",
            "find the last of the {} in a list, or None",
            lambda x: x[-1] if x else None,
        ),
        ("distinct_{}", "int", "count the different {} in a list", lambda x: len(set(x))),
    ]
    key, label, test = rng.choice(conditions)
    name, kind, phrase, result = rng.choice(results)
    return Task(
        name.format(key),
        X,
        kind,
        phrase.format(label),
        lambda x: result([n for n in x if test(n)]),
        "l",
    )


def words_task(rng: random.Random) -> Task:
    """Compose a task on a list of words from a condition and a result."""
    k, c = rng.randint(3, 7), rng.choice("aeionrtlmp")
    conditions: list[tuple[str, str, Maker]] = [
        (f"long{k}", f"words longer than {k} letters", lambda w: len(w) > k),
        (f"short{k}", f"words with at most {k} letters", lambda w: len(w) <= k),
        (f"with_{c}", f"words that contain '{c}'", lambda w: c in w),
        (f"ending_{c}", f"words that end in '{c}'", lambda w: w[-1] == c),
        ("vowel_first", "words that begin with a vowel", lambda w: w[0].lower() in "aeiou"),
        ("doubled", "words with a doubled letter", lambda w: any(a == b for a, b in pairwise(w))),
    ]
    results: list[tuple[str, str, str, Maker]] = [
        ("count_{}", "int", "count the {} in a list", lambda w: len(w)),
        ("keep_{}", LS, "collect the {} of a list", lambda w: w),
        ("upper_{}", LS, "list the {} in upper case", lambda w: [v.upper() for v in w]),
        ("joined_{}", "str", "join the {} with dashes", "-".join),
        ("sorted_{}", LS, "sort the {} alphabetically", sorted),
        ("letters_{}", "int", "add up the lengths of the {}", lambda w: sum(map(len, w))),
    ]
    key, label, test = rng.choice(conditions)
    name, kind, phrase, result = rng.choice(results)
    return Task(
        name.format(key),
        W,
        kind,
        phrase.format(label),
        lambda w: result([v for v in w if test(v)]),
        "w",
    )


def pick_task(rng: random.Random) -> Task:
    """Draw a task, mostly one of the hand-written ones."""
    share = rng.random()
    if share < 0.65:
        return rng.choice(TASKS)
    return numbers_task(rng) if share < 0.85 else words_task(rng)


def calls(task: Task, count: int, rng: random.Random) -> list[tuple[str, str]]:
    """Return different calls of the task's function with what they give, both as source."""
    found: dict[str, str] = {}
    while len(found) < count:
        arguments = [make(kind, rng) for kind in task.inputs]
        call = f"{task.name}({', '.join(map(repr, arguments))})"
        found[call] = repr(task.meaning(*arguments))
    return list(found.items())


def complete(rng: random.Random) -> str:
    """Return a request to complete a Python function."""
    task = pick_task(rng)
    head = f"def {task.name}({task.params}) -> {task.returns}:"
    names = [name for name in ("Dict", "List", "Optional") if name + "[" in head]
    start = f"from typing import {', '.join(names)}\n\n\n" if names else ""
    if start and rng.random() < 0.4:
        start = ""
        head = head.replace("List[", "list[").replace("Dict[", "dict[")
        head = head.replace("Optional[int]", "int | None")
    phrase = task.phrase[0].upper() + task.phrase[1:]
    examples = calls(task, rng.choice((1, 2, 2)), rng)
    shown = "\n".join(
        f"    >>> {call}" + ("" if value == "None" else f"\n    {value}")
        for call, value in examples
    )
    gap = rng.choice(("\n\n", "\n"))
    code = f'{start}{head}\n    """{phrase}.{gap}{shown}\n    """\n'
    lead = rng.choice(
        (
            "Complete this Python function:",
            "Complete the following Python function.",
            "Please finish this function so that the examples in its docstring hold.",
            "Fill in the body of this Python function:",
            "Implement the function below.",
            "Write the missing body. Return the whole function.",
            "",
        )
    )
    if rng.random() < 0.4:
        code = f"```python\n{code}```"
    return f"{lead}\n\n{code}" if lead else code


def write(rng: random.Random) -> str:
    """Return a request to write a Python function that passes some assertions."""
    task = pick_task(rng)
    tests = []
    for call, value in calls(task, rng.randint(1, 3), rng):
        sign = "is" if value in ("True", "False", "None") and rng.random() < 0.3 else "=="
        tests.append(f"assert {call} {sign} {value}")
    lead = rng.choice(
        (
            "Write a python function to {}.",
            "Write a function to {}.",
            "Write a Python function that can {}.",
            "Write a python function to {}.",
        )
    ).format(task.phrase)
    return f"{lead} Your code should pass these tests:\n\n" + "\n".join(tests)


def story(rng: random.Random) -> str:
    """Return an arithmetic word problem."""
    return articles(fill(rng.choice(lines("stories")), rng))


def maths(rng: random.Random) -> str:
    """Return a competition-style problem."""
    return fill(rng.choice(lines("maths")), rng)


def request(rng: random.Random) -> str:
    """Return an open request."""
    templates = open_templates()
    sizes = [min(len(group), 12) for group in templates.values()]
    group = rng.choices(list(templates.values()), sizes)[0]
    return articles(fill(rng.choice(group), rng))


FAMILIES: dict[str, Callable[[random.Random], str]] = {
    "story": story,
    "maths": maths,
    "complete": complete,
    "write": write,
    "open": request,
}


def prompts(count: int, seed: int = 0) -> Iterator[str]:
    """Yield different prompts, in blocks of twenty that keep the families' shares."""
    rng = random.Random(seed)
    seen: set[str] = set()
    block: list[str] = []
    for _ in range(count):
        if not block:
            block = rng.sample(BLOCK, len(BLOCK))
        family = FAMILIES[block.pop()]
        for _attempt in range(10_000):
            prompt = family(rng)
            if prompt not in seen:
                break
        else:
            raise ValueError(f"no more than {len(seen)} different prompts")
        seen.add(prompt)
        yield prompt


def main() -> None:
    """Write prompts as JSON lines."""
    parser = argparse.ArgumentParser(description="Write training prompts as JSON lines.")
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for prompt in prompts(options.count, options.seed):
        print(json.dumps({"turns": [prompt]}, ensure_ascii=False))


if __name__ == "__main__":
    main()
