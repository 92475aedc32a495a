"""Encodings of text files: identification, conversion to UTF-8 while a file is read, and bytes that are not text.

`auto` identifies one encoding per file, from samples that depend on the file alone, so it is the same in every process
and range. charset-normalizer decides between the encodings that are neither UTF-8 nor marked. Of 31 texts in
19 legacy encodings it identified 28, chardet 7.7 all, but chardet was not among the packages of this project, and
charset-normalizer is, by way of tensorflow-datasets (docs/log/corpora.md, 2026-11-26).
"""

import codecs
import re
from collections.abc import Callable, Sequence

import charset_normalizer

from bert_jax.errors import UserError

UTF_8 = "utf-8"
AUTO = "auto"

PIECE_BYTES = 1 << 16
"""Bytes of a sample; a file is sampled at this many places."""
PIECES = 16

_MAX_LOST_SHARE = 0.01
"""Texts with a higher share of bytes that are not in their encoding are skipped, because it is probably another one."""
_IDENTIFIED_BYTES = 1 << 16
"""Bytes of lines with non-ASCII characters that charset-normalizer gets, of the samples of a file."""
# Of the WHATWG Encoding Standard, without those that differ only in rare characters. If several give the same text, the
# first one is meant.
_CANDIDATES = (
    *("cp1252", "cp1251", "cp1250", "cp1253", "cp1254", "cp1255", "cp1256", "cp1257", "cp1258", "cp866", "cp874"),
    *("iso8859_2", "iso8859_5", "koi8_r", "koi8_u", "big5", "cp932", "cp949", "euc_jp", "gb18030"),
)
_BOMS = (
    (codecs.BOM_UTF8, UTF_8),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_ISO_2022 = ((re.compile(rb"\x1b\$[@B]"), "iso2022_jp_ext"), (re.compile(rb"\x1b\$\)C"), "iso2022_kr"))
"""Escape sequences of encodings whose bytes are all ASCII."""
_CUT = re.compile(rb"\A[\x80-\xbf]{1,3}|[\xc0-\xff][\x80-\xbf]{0,2}\Z")
"""At the ends of a piece, what may be a part of a character in UTF-8."""
_ASCII = bytes(range(128))
_LOST = re.compile("[\udc80-\udcff]")
_CHARACTERS = re.compile("[^\x00-\x7f\udc80-\udcff]")
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f]")


def _mark_lost(error: UnicodeError) -> tuple[str, int]:
    """For each byte a character that `surrogateescape` encodes as the byte 0xff, which does not occur in UTF-8."""
    return "\udcff" * (error.end - error.start), error.end


codecs.register_error("bert_data.mark_lost", _mark_lost)


def check_setting(encoding: str) -> str:
    """The canonical name of an encoding, or `auto`.

    Raises:
      UserError: Python has no such encoding of text.
    """
    if encoding == AUTO:
        return AUTO
    try:
        b"a".decode(encoding, "ignore")
        codecs.getincrementaldecoder(encoding)("bert_data.mark_lost").decode(b"", True)
        return codecs.lookup(encoding).name
    except (LookupError, ValueError, UnicodeError) as error:
        raise UserError(
            f"--encoding {encoding}: not an encoding of text; give a name such as utf-8, windows-1252, gb18030 or"
            " utf-16, or auto"
        ) from error


def keeps_ascii(encoding: str) -> bool:
    """Whether ASCII is unchanged, so that ends of lines can be found before the text is decoded."""
    try:
        return _ASCII.decode(encoding) == _ASCII.decode()
    except UnicodeError:
        return False


def whole_lines(data: bytes) -> bytes:
    """The whole lines of a piece of a file, or the piece if there are none."""
    return data[data.find(b"\n") + 1 : data.rfind(b"\n") + 1] or data


def identify(samples: Sequence[bytes]) -> str | None:
    """The encoding of a file; UTF-8 if there is no evidence for another one; None if it is not text.

    Args:
      samples: of the file; the first one is its start.
    """
    head = samples[0]
    marked = next((name for mark, name in _BOMS if head.startswith(mark)), None)
    if marked and (marked != UTF_8 or b"\0" not in head):
        return marked
    if b"\0" in head:
        return next((name for name, low in (("utf-16-le", 0), ("utf-16-be", 1)) if _is_utf_16(head, name, low)), None)
    sample = b"\n".join(samples)
    if sample.isascii():
        return next((name for escape, name in _ISO_2022 if escape.search(sample)), UTF_8)
    cut = (PIECE_BYTES, PIECE_BYTES * PIECES)  # sizes of pieces that are not whole lines or the whole file
    whole = b"\n".join(_CUT.sub(b"", one) if len(one) in cut else one for one in samples)
    lost, characters = counts(whole.decode(UTF_8, "surrogateescape"))
    if lost < max(1, characters):
        return UTF_8
    lines = [line for line in sample.split(b"\n") if not line.isascii()]
    text = b"\n".join(lines)
    if len(text) > _IDENTIFIED_BYTES:  # whole lines, so that no character is cut
        text = text[:_IDENTIFIED_BYTES].rpartition(b"\n")[0] or lines[0]
    best = charset_normalizer.from_bytes(
        text,
        cp_isolation=list(_CANDIDATES),
        enable_fallback=False,
    ).best()
    if best is None:
        return UTF_8
    return min(best.could_be_from_charset, key=lambda name: _CANDIDATES.index(name))


def _is_utf_16(head: bytes, name: str, low: int) -> bool:
    """Whether a text without byte order mark is UTF-16.

    Of alphabetic scripts: there are few different high bytes, many of them 0, those of spaces and punctuation.

    Args:
      head: start of the file.
      name: of the byte order.
      low: 0 if the low byte comes first, else 1.
    """
    lows, highs = head[low::2], head[1 - low :: 2]
    if len(highs) < 16 or highs.count(0) * 10 < len(highs) or lows.count(0) or len(set(highs)) > 6:
        return False
    try:
        text = codecs.getincrementaldecoder(name)().decode(head)
    except UnicodeError:
        return False
    return not _CONTROLS.search(text)


def counts(text: str) -> tuple[int, int]:
    """Of a text decoded with `surrogateescape`: bytes that are not in the encoding, and other non-ASCII characters."""
    lost = sum(1 for _ in _LOST.finditer(text))
    return lost, sum(1 for _ in _CHARACTERS.finditer(text)) if lost else 0


def to_utf_8(read: Callable[[int], bytes], encoding: str) -> Callable[[int], bytes]:
    """A function that reads text in UTF-8; a byte that is not in the encoding becomes the byte 0xff.

    Args:
      read: gives about as many bytes as its argument; none at the end.
      encoding: of the bytes; UTF-8 is not changed.
    """
    if encoding == UTF_8:
        return read
    decoder = codecs.getincrementaldecoder(encoding)("bert_data.mark_lost")

    def read_converted(size: int) -> bytes:
        while True:
            data = read(size)
            text = decoder.decode(data, final=not data).encode(UTF_8, "surrogateescape")
            if text or not data:
                return text

    return read_converted


def decode(data: bytes) -> tuple[str | None, int]:
    """Text of bytes that should be UTF-8, with U+FFFD for each byte that is not.

    Returns:
      the text, or None if more than 1% of its bytes are not UTF-8 and as few of its characters that the encoding is
      probably another one, and
      the number of bytes that are not UTF-8.
    """
    try:
        return data.decode(), 0
    except UnicodeDecodeError:
        text = data.decode(UTF_8, "surrogateescape")
        lost, characters = counts(text)
        is_text = lost < characters or lost <= _MAX_LOST_SHARE * len(data)
        return _LOST.sub("\ufffd", text) if is_text else None, lost


def first_lost(data: bytes) -> int:
    """Place of the first byte that is not UTF-8; the length if there is none."""
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start
    return len(data)
