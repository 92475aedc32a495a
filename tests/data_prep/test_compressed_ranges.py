"""Blocks of bzip2 and frames of zstd are read from any byte of a file on; damage at every kind of place is found."""

import bz2
import itertools

import numpy as np
import pytest

from bert_jax.errors import UserError
from data_prep.sources import bzip2_blocks, zstd_frames
from tests.data_prep.test_file_ranges import DOCUMENTS, in_parts, padded_stream, zstd_compress
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


def frames_of(data, *bounds):
    """The text of each range, by the frames of zstd that begin in it."""

    def read_at(offset, size):
        return data[offset : offset + size]

    return [
        b"".join(text for text, belongs in zstd_frames.read_frames("a.zst", read_at, *part) if belongs)
        for part in itertools.pairwise([0, *bounds, len(data)])
    ]


def test_borders_anywhere_in_zstd(monkeypatch):
    """Also if a frame contains the magic number, and between frames that are skipped."""
    noise = np.random.default_rng(0).bytes(3000)
    contents = [noise[:2000] + zstd_frames._MAGIC + noise[2000:] + zstd_frames._MAGIC * 3, b"one" * 900, noise, b"end"]
    skippable = b"\x50\x2a\x4d\x18" + (7).to_bytes(4, "little") + zstd_frames._MAGIC + b"abc"
    data = b"".join(skippable + zstd_compress(content) for content in contents) + b"\0" * 5
    assert data.count(zstd_frames._MAGIC) == 12
    for border in range(1, len(data), 2):
        assert b"".join(frames_of(data, border)) == b"".join(contents), border
    monkeypatch.setattr(zstd_frames, "_RAW_BYTES", 64)
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
