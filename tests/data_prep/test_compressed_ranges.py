"""Blocks of bzip2, frames of zstd and members of gzip are read from any byte on; damage at any place is found."""

import bz2
import gzip
import itertools

import numpy as np
import pytest

from bert_jax.errors import UserError
from data_prep.sources import bzip2_blocks, frame_ranges
from data_prep.sources.frame_ranges import read_frames
from data_prep.sources.gzip_members import GZIP, has_short_members
from data_prep.sources.zstd_frames import ZSTD
from tests.data_prep.test_file_ranges import DOCUMENTS, bgzf_block, in_parts, padded_stream, zstd_compress
from tests.data_prep.test_sources_reading import read


def blocks_of(data, *bounds):
    """The text of each range, by the blocks of bzip2 that begin in it."""

    def read_at(offset, size):
        return data[offset : offset + size]

    ranges = itertools.pairwise([0, *bounds, len(data)])
    return [
        b"".join(text for text, belongs in bzip2_blocks.decompress_range("a.bz2", read_at, *part) if belongs)
        for part in ranges
    ]


def text_with_magic():
    """Text that uses bytes of three rows of 16 such that the table of used bytes in each block is the magic number."""
    rows = {4: 0x3141, 5: 0x5926, 6: 0x5359}
    letters = [chr(16 * row + i) for row, bits in rows.items() for i in range(16) if bits >> (15 - i) & 1]
    rng = np.random.default_rng(0)
    return " ".join("".join(rng.choice(letters, 7)) for _ in range(30_000)).encode()


def test_the_magic_number_of_a_block_inside_a_block():
    text = text_with_magic()
    data = bz2.compress(text, 1)
    places = sorted(bzip2_blocks._find(data, bzip2_blocks._BLOCK, 0, True))
    assert len(places) == 6 and places[3] - places[2] == 153  # header, CRC, and the table of used bytes
    assert b"".join(blocks_of(data)) == text
    for border in (places[2] // 8 + offset for offset in (-1, 0, 1, 2, 10, 18, 19, 20, 21)):
        first, second = blocks_of(data, border)
        assert first + second == text
        assert round(len(first), -5) == (100_000 if 8 * border <= places[2] else 200_000)


@pytest.mark.parametrize("raw_bytes", [1 << 20, 1000])
def test_borders_anywhere_in_bzip2(monkeypatch, raw_bytes):
    """At each byte around the borders of streams and blocks, and for any size of reads."""
    monkeypatch.setattr(bzip2_blocks, "_RAW_BYTES", raw_bytes)
    text = "\n\n".join(DOCUMENTS).encode()
    for data in (bz2.compress(text, 1), in_parts(padded_stream, text, 9000)):
        places = [place // 8 for place in bzip2_blocks._find(data, bzip2_blocks._BLOCK, 0, True)]
        for place in sorted(places)[1:3]:
            for border in range(place - 20, place + 1, 2):
                first, second = blocks_of(data, border)
                assert first and second and first + second == text


def damaged_bzip2():
    text = "\n\n".join(DOCUMENTS).encode()
    one, several = bz2.compress(text, 1), in_parts(bz2.compress, text, 7000)
    end = sorted(bzip2_blocks._find(several, bzip2_blocks._END, 0, True))[3] // 8
    magic = sorted(bzip2_blocks._find(one, bzip2_blocks._BLOCK, 0, True))[2] // 8
    middle = len(one) // 2
    return {
        "a flipped bit": one[:middle] + bytes([one[middle] ^ 4]) + one[middle + 1 :],
        "a lost block": one[:magic] + bytes(8) + one[magic + 8 :],
        "a lost end of a stream": several[:end] + bytes(14) + several[end + 14 :],
        "missing bytes": one[:middle] + one[middle + 700 :],
        "cut in a block": one[:middle],
        "cut in the last end": one[:-1],
        "cut in the end of a stream": several[: end + 8],
        "cut in a header": one + b"BZh",
        "other data at the end": several + b"garbage",
        "other data in between": several[: end + 12] + b"garbage" + several[end + 12 :],
        "no header": b"x" + one,
    }


@pytest.mark.parametrize("damage", damaged_bzip2())
def test_damage_in_bzip2_is_found_with_and_without_ranges(tmp_path, damage):
    path = tmp_path / "a.bz2"
    path.write_bytes(damaged_bzip2()[damage])
    reason = "truncated" if "cut" in damage else "damaged"
    for range_bytes in (1 << 30, path.stat().st_size // 2, path.stat().st_size // 5):
        with pytest.raises(UserError, match=f"a.bz2: {reason}"):
            read(f"text:{path}", range_bytes=range_bytes)


def frames_of(data, *bounds, form=ZSTD):
    """The text of each range, by the frames that begin in it."""

    def read_at(offset, size):
        return data[offset : offset + size]

    return [
        b"".join(text for text, belongs in read_frames("a", form, read_at, *part) if belongs)
        for part in itertools.pairwise([0, *bounds, len(data)])
    ]


def test_borders_anywhere_in_zstd(monkeypatch):
    """Also if a frame contains the magic number, and between frames that are skipped."""
    noise = np.random.default_rng(0).bytes(3000)
    contents = [noise[:2000] + ZSTD.magic + noise[2000:] + ZSTD.magic * 3, b"one" * 900, noise, b"end"]
    skippable = b"\x50\x2a\x4d\x18" + (7).to_bytes(4, "little") + ZSTD.magic + b"abc"
    data = b"".join(skippable + zstd_compress(content) for content in contents) + b"\0" * 5
    assert data.count(ZSTD.magic) == 12
    for border in range(1, len(data), 2):
        assert b"".join(frames_of(data, border)) == b"".join(contents), border
    monkeypatch.setattr(frame_ranges, "_RAW_BYTES", 64)
    for border in range(1, len(data), 7):
        assert b"".join(frames_of(data, border)) == b"".join(contents), border


ZSTD_DAMAGE = [
    *("a lost magic number", "a wrong header of a block", "missing bytes"),
    *("cut in a frame", "cut in a header", "other data at the end"),
]


def damaged_zstd():
    frames = [zstd_compress("\n\n".join(DOCUMENTS[begin : begin + 300]).encode()) for begin in range(0, 1500, 300)]
    before, third, after = b"".join(frames[:2]), frames[2], b"".join(frames[3:])
    return {
        "a lost magic number": before + bytes([7]) + third[1:] + after,
        "a wrong header of a block": before + third[:6] + b"\xff\xff\xff" + third[9:] + after,
        "missing bytes": before + third[:100] + third[300:] + after,
        "cut in a frame": before + third[:-200],
        "cut in a header": before + third[:9],
        "other data at the end": before + third + after + b"garbage",
    }


@pytest.mark.parametrize("damage", ZSTD_DAMAGE)
def test_damage_in_zstd_is_found_with_and_without_ranges(tmp_path, damage):
    path = tmp_path / "a.zst"
    path.write_bytes(damaged_zstd()[damage])
    reason = "truncated" if "cut" in damage else "damaged"
    for parts in (1, 2, 3, 5, 9):
        with pytest.raises(UserError, match=f"a.zst: {reason}"):
            read(f"text:{path}", range_bytes=2 * path.stat().st_size // parts)


def test_borders_anywhere_in_gzip(monkeypatch):
    """Also if a member contains the magic number, has long fields in its header, or no content."""
    noise = np.random.default_rng(0).bytes(3000)
    contents = [noise[:2000] + GZIP.magic + noise[2000:] + (GZIP.magic + b"\0\0") * 3, b"one" * 900, b"", noise, b"end"]
    plain = [gzip.compress(content, 0 if b"\x1f" in content else 9) for content in contents]
    named = plain[1][:3] + b"\x1d" + plain[1][4:10] + b"\xff\0" + GZIP.magic * 85 + b"name\0\x1f\x8b\x08\0"
    data = b"".join([plain[0], named + plain[1][10:], *plain[2:], bgzf_block(contents[1])]) + b"\0" * 5
    whole = gzip.decompress(data[: data.index(named)] + plain[1] + b"".join([*plain[2:], plain[1]]))
    assert data.count(GZIP.magic) == 6 + 4 + 86
    for border in range(1, len(data), 2):
        assert b"".join(frames_of(data, border, form=GZIP)) == whole, border
    monkeypatch.setattr(frame_ranges, "_RAW_BYTES", 64)
    for border in range(1, len(data), 7):
        assert b"".join(frames_of(data, border, form=GZIP)) == whole, border


def test_a_member_inside_of_a_member(tmp_path):
    """Where no reader of a range can know which one it sees: right, or an error, and never other text."""
    inner = [gzip.compress(b"inner %d" % index) for index in range(3)]
    outer = gzip.compress(b"first " + b" text ".join(inner), 0)
    for data, last in ((outer + gzip.compress(b"next"), b"next"), (gzip.compress(b"") + outer, b"")):
        whole = b"first " + b" text ".join(inner) + last
        places = [data.index(one) for one in inner]
        found = "|".join(map(str, places))
        begin, right = data.index(outer), 0
        for border in range(1, len(data)):
            if begin < border <= places[-1]:
                with pytest.raises(UserError, match=f"a: cannot be read by several workers.* at byte ({found}),"):
                    frames_of(data, border, form=GZIP)
            else:
                assert b"".join(frames_of(data, border, form=GZIP)) == whole
                right += 1
        assert right > 20
    (tmp_path / "a.gz").write_bytes(outer + gzip.compress(b"next") + b"\0" * (1 << 21))
    assert has_short_members(f"{tmp_path}/a.gz")


GZIP_DAMAGE = [
    *("a flipped bit", "a lost magic number", "a wrong header", "missing bytes", "a wrong checksum"),
    *("cut in a member", "cut in a header", "cut in a checksum", "other data at the end", "other data in between"),
]


def damaged_gzip():
    members = [gzip.compress("\n\n".join(DOCUMENTS[begin : begin + 300]).encode()) for begin in range(0, 1500, 300)]
    before, third, after = b"".join(members[:2]), members[2], b"".join(members[3:])
    return {
        "a flipped bit": before + third[:400] + bytes([third[400] ^ 4]) + third[401:] + after,
        "a lost magic number": before + bytes([7]) + third[1:] + after,
        "a wrong header": before + third[:3] + b"\xe0" + third[4:] + after,
        "missing bytes": before + third[:100] + third[300:] + after,
        "a wrong checksum": before + third[:-8] + b"1234" + third[-4:] + after,
        "cut in a member": before + third[:-200],
        "cut in a header": before + third[:9],
        "cut in a checksum": before + third[:-3],
        "other data at the end": before + third + after + b"garbage",
        "other data in between": before + third + b"garbage" + after,
    }


@pytest.mark.parametrize("damage", GZIP_DAMAGE)
def test_damage_in_gzip_is_found_with_and_without_ranges(tmp_path, damage):
    path = tmp_path / "a.gz"
    path.write_bytes(damaged_gzip()[damage])
    reason = "truncated" if "cut" in damage else "damaged"
    size = path.stat().st_size
    for range_bytes in (1 << 30, size, size // 2, size // 5):
        with pytest.raises(UserError, match=f"a.gz: {reason}"):
            read(f"text:{path}", range_bytes=range_bytes)


@pytest.mark.parametrize("content", [b"", b"\x1f", b"\x1f\x8b\x08garbage", gzip.compress(b"one"), b"plain text"])
def test_files_that_are_not_split(tmp_path, content):
    path = tmp_path / "a.gz"
    for data in (content, content + b"\0" * (3 << 20)):
        path.write_bytes(data)
        assert not has_short_members(str(path))
    path.write_bytes(gzip.compress(np.random.default_rng(0).bytes(2 << 20)) * 2)
    assert not has_short_members(str(path))
    assert not has_short_members(str(tmp_path / "missing.gz"))
