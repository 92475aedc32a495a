"""Masks of personal data: e-mail addresses, telephone numbers, IP addresses, each by one regular expression.

The placeholders are reserved for examples: `email@example.com` (RFC 2606), `192.0.2.1` (RFC 5737), `2001:db8::1` (RFC
3849) and the number 555-0100 of North America. A rule finds what has the form; it does not know whose it is. What is
written in words, split over lines or spelled otherwise stays. FineWeb masks e-mail addresses and public IP addresses.
"""

import ipaddress
import re
from collections.abc import Callable
from typing import Literal

Kind = Literal["email", "ip", "phone"]

_EMAIL = re.compile(r"(?<![\w.+%-])[\w+%-]+(?:\.[\w+%-]+)*@(?:[a-z\d](?:[a-z\d-]*[a-z\d])?\.)+[a-z]{2,63}\b", re.I)
_IP = re.compile(
    r"(?<![\w.:])(?:(?:\d{1,3}\.){3}\d{1,3}(?![\w.]*\w)|(?:[\da-f]{0,4}:){2,7}[\da-f]{0,4}(?![\w:]))", re.I | re.A
)
# International numbers of 8 to 15 digits with +, and ten-digit ones of North America in groups of 3, 3 and 4.
_PHONE = re.compile(
    r"(?<![\w+./-])(?:\+\d(?:[ .()/-]{0,2}\d){7,14}|(?:1[ .-])?(?:\([2-9]\d\d\) ?|[2-9]\d\d[ .-])[2-9]\d\d[ .-]\d{4})"
    r"(?![\w/-]*\d)",
    re.A,
)


def _mask_ip(match: re.Match) -> str:
    try:
        address = ipaddress.ip_address(match[0])
    except ValueError:
        return match[0]
    if not address.is_global:
        return match[0]  # of a private network, of the machine itself, or for examples
    return "192.0.2.1" if address.version == 4 else "2001:db8::1"


def _mask_phone(match: re.Match) -> str:
    return "+1 212 555 0100" if match[0].startswith("+") else "212-555-0100"


# Each begins with what most texts do not have: found several times faster than the rule. In this order, because an IP
# address looks like a number.
_MASKS: dict[str, tuple[re.Pattern[str], re.Pattern[str], Callable[[re.Match], str]]] = {
    "email": (re.compile("@"), _EMAIL, lambda _: "email@example.com"),
    "ip": (re.compile(r"\d\.\d{1,3}\.\d|:[\da-fA-F]{0,4}:", re.A), _IP, _mask_ip),
    "phone": (re.compile(r"\d(?:[ .()/-]*\d){6}", re.A), _PHONE, _mask_phone),
}


def mask(text: str, kinds: tuple[Kind, ...]) -> tuple[str, dict[str, int]]:
    """The text with the placeholders, and the number of masks of each of the kinds; masks are not masked again."""
    masked = {}
    for kind, (hint, pattern, replacement) in _MASKS.items():
        if kind in kinds:
            text, masked[kind] = _replace(text, pattern, replacement) if hint.search(text) else (text, 0)
    return text, masked


def _replace(text: str, pattern: re.Pattern[str], replacement: Callable[[re.Match], str]) -> tuple[str, int]:
    """The text with replacements, and the number of those that differ from what they replace."""
    pieces, end, count = [], 0, 0
    for match in pattern.finditer(text):
        new = replacement(match)
        pieces += text[end : match.start()], new
        end = match.end()
        count += new != match[0]
    return ("".join([*pieces, text[end:]]) if count else text), count
