"""Minimal cleaning of text: what looks the same becomes the same, nothing that can be read is lost."""

import re
import unicodedata

# Control, format and surrogate characters that carry no text: C0 and C1 controls but tab, line feed and
# carriage return; soft hyphen; zero-width space; directional marks; byte order mark; U+FFFD, the scar of
# a decoding error. Zero-width joiners stay: Persian, Indic scripts and emoji are spelled with them.
_INVISIBLE = re.compile(
    "[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff\ufffd\ud800-\udfff]"
)
_LINE_ENDS = re.compile("\r\n?|[\x0b\x0c\x85\u2028\u2029]")
_SPACES = re.compile(r"[^\S\n]+")
_AROUND_LINE_ENDS = re.compile(r" ?\n ?")
_BLANK_LINES = re.compile(r"\n{3,}")


def clean(text: str) -> str:
    """NFC, "\\n" as the only line end, single spaces, at most one blank line, no invisible characters.

    NFC and not NFKC: the latter rewrites what an author wrote (x² becomes x2). Applying it twice
    changes nothing.
    """
    text = _LINE_ENDS.sub("\n", text)
    text = unicodedata.normalize("NFC", _INVISIBLE.sub("", text))
    text = _AROUND_LINE_ENDS.sub("\n", _SPACES.sub(" ", text))
    return _BLANK_LINES.sub("\n\n", text).strip()
