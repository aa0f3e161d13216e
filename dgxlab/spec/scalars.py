"""What one YAML scalar means: null, booleans, decimal numbers and text, and nothing that YAML 1.1 would make of it."""

from __future__ import annotations

import re

from dgxlab.spec.nodes import Scalar, printable

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What no string may hold once its escapes are read: an argument with a NUL cannot be passed to a program."""

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_MAX_INT = 2**63 - 1

_SURPRISES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?i:on|off|yes|no|y|n)"), "is a boolean to YAML 1.1: write true or false, or quote it"),
    (re.compile(r"(?!true|false)(?i:true|false)"), "must be written true or false, in lower case, or quoted"),
    (re.compile(r"(?!null)(?i:null)"), "must be written null, in lower case, or quoted"),
    (re.compile(r"[-+]?0([xX][0-9a-fA-F_]+|[oO][0-7_]+|[bB][01_]+)"), "is a number in another base: quote it"),
    (re.compile(r"[-+]?0[0-9_]+"), "is an octal number to YAML 1.1: drop the leading zero, or quote it"),
    (re.compile(r"[-+]?[0-9]+(:[0-5]?[0-9])+(\.[0-9_]*)?"), "is a base-60 number to YAML 1.1: quote it"),
    (re.compile(r"[-+]?\.?[0-9](?=[0-9.]*_)[0-9_.]*([eE][-+]?[0-9]+)?"), "has underscores: drop them, or quote it"),
    (re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?"), "is a timestamp to YAML 1.1: quote it"),
    (re.compile(r"[-+]?\.(?i:inf|nan)"), "is not a finite number: quote it if text is meant"),
    (re.compile(r"="), "is a special value to YAML 1.1: quote it"),
)


class SurpriseError(Exception):
    """A scalar that is refused; the sentence says how to write it."""


def bad_key(key: str, is_plain: bool) -> str:
    """Return what is wrong with a key, or ""; a plain one must be text without quotes."""
    if key == "<<":
        return "merge keys are refused: use extends, or write the entries out"
    # `n` is a column of MUL_MAT, and no parser in use turns that key into a boolean.
    if key in ("n", "y", "N", "Y"):
        return ""
    try:
        value = scalar(key) if is_plain else checked(key)
    except SurpriseError as surprise:
        return f"as a key, {surprise}"
    return "" if isinstance(value, str) else f'keys must be text: quote it: "{printable(key)}"'


def scalar(text: str) -> Scalar:
    """Return the value of a plain scalar.

    Raises:
        SurpriseError: if YAML 1.1 and a reader may differ about it.
    """
    if text in ("", "~", "null"):
        return None
    if text in ("true", "false"):
        return text == "true"
    for pattern, why in _SURPRISES:
        if pattern.fullmatch(text):
            raise SurpriseError(f"{printable(text)} {why}")
    if _INT.fullmatch(text):
        # Longer than 64 bits is an id that lost its quotes; int() itself refuses 4,300 digits.
        if len(text) > 20 or abs(int(text)) > _MAX_INT:
            raise SurpriseError(f"{printable(text)} is too large for a number: quote it if text is meant")
        return int(text)
    if _FLOAT.fullmatch(text):
        return _float(text)
    return checked(text)


def _float(text: str) -> float:
    value = float(text)
    if value in (float("inf"), float("-inf")):
        raise SurpriseError(f"{printable(text)} is too large for a number: quote it if text is meant")
    return value


def checked(text: str) -> str:
    """Return the text of a quoted scalar.

    Raises:
        SurpriseError: if it holds a control character other than tab and newline.
    """
    if bad := _CONTROL.search(text):
        raise SurpriseError(f"holds a control character, U+{ord(bad[0]):04X}")
    return text
