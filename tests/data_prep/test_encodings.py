"""Text in other encodings than UTF-8, and bytes that are in none: what is read, and what is counted as lost."""

import json
import pathlib

import pytest

from bert_jax.errors import UserError
from data_prep.cli.main import main
from data_prep.sources import encodings, parse
from tests.data_prep.test_sources_reading import read

TEXTS = {
    "de": "Über die Größe der Häuser läßt sich schön streiten, wenn die Tür geöffnet bleibt. Früher fuhr man öfter.\n",
    "ru": "Все люди рождаются свободными и равными в своём достоинстве и правах. Они наделены разумом и совестью.\n",
    "zh": "人人生而自由,在尊严和权利上一律平等。他们赋有理性和良心,并应以兄弟关系的精神相对待。\n",
    "ja": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。\n",
}
CASES = "de cp1252, ru cp1251, ru koi8_r, ru utf-16, de utf-16-le, zh gb18030, ja cp932, ja euc_jp, de utf-8"
CASES = [tuple(case.split()) for case in CASES.split(", ")]


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    """Files in several encodings, and one in UTF-8 with a byte that is not."""
    monkeypatch.chdir(tmp_path)
    for language, encoding in CASES:
        pathlib.Path(f"{language}-{encoding}.txt").write_bytes((TEXTS[language] * 3).encode(encoding))
    pathlib.Path("ru-bad.txt").write_bytes(f"\xff{TEXTS['ru']}".encode().replace(b"\xc3\xbf", b"\xff"))
    return tmp_path


def test_every_file_is_identified(folder):
    reading = read("text-files:*.txt", encoding="auto")
    assert sorted(reading.texts) == sorted([TEXTS[language] * 3 for language, _ in CASES] + [f"\ufffd{TEXTS['ru']}"])
    assert reading.places == [("undecodable_bytes", "ru-bad.txt")] and reading.skipped[0].size == 1


def test_a_bad_byte_does_not_make_utf_8_another_encoding():
    """Which the library that identifies encodings takes for cp1250."""
    assert encodings.identify([(TEXTS["de"] * 10).encode() + b"\xe9\n"]) == "utf-8"


@pytest.mark.parametrize(("language", "encoding"), [*CASES, ("ja", "iso2022_jp_ext")])
@pytest.mark.parametrize("setting", ["auto", None])
def test_ranges_and_blocks_have_no_effect(tmp_path, language, encoding, setting):
    text = "".join(f"{number} {TEXTS[language]}\n" for number in range(40))
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode(encoding))
    whole = read(f"text:{path}", encoding=setting or encoding)
    assert "\n".join(whole.texts) == text.removesuffix("\n") and not whole.skipped
    for sizes in ({"range_bytes": 300}, {"block_bytes": 200}, {"range_bytes": 900, "block_bytes": 64}):
        assert read(f"text:{path}", encoding=setting or encoding, **sizes).texts == whole.texts


def test_a_file_is_sampled_at_its_end_too(tmp_path, monkeypatch):
    monkeypatch.setattr(encodings, "PIECE_BYTES", 512)
    path = tmp_path / "a.txt"
    path.write_bytes(b"plain ascii\n" * 800 + TEXTS["ru"].encode("cp1251") * 10)
    assert TEXTS["ru"] in read(f"text-files:{path}", encoding="auto").texts[0]


@pytest.mark.parametrize("line", [10_000, 1500, 100])
@pytest.mark.parametrize("place", [1023, 4999, 5063])
def test_a_sample_that_ends_inside_a_character(tmp_path, monkeypatch, line, place):
    """Of the start, and a piece of 64 bytes at half of the file; otherwise the text is ASCII."""
    monkeypatch.setattr(encodings, "PIECE_BYTES", 64)
    text = bytearray(b"x" * 10_000)
    text[line - 1 :: line] = b"\n" * (10_000 // line)
    text[place : place + 2] = "é".encode()
    (tmp_path / "a.txt").write_bytes(text)
    assert "é" in read(f"text-files:{tmp_path}/a.txt", encoding="auto").texts[0]


@pytest.mark.parametrize(("name", "codec"), [("iso2022_jp", "iso2022_jp_ext"), ("iso2022_kr", "iso2022_kr")])
def test_encodings_whose_bytes_are_all_ascii(tmp_path, name, codec):
    text = TEXTS["ja"] if codec == "iso2022_jp_ext" else "모든 인간은 태어날 때부터 자유롭다.\n"
    (tmp_path / "a.txt").write_bytes((text * 3).encode(name))
    (tmp_path / "b.txt").write_bytes(b"\x1b[31mred\x1b[0m $B costs (B)\n")
    reading = read(f"text-files:{tmp_path}/*.txt", encoding="auto")
    assert reading.texts == [text * 3, "\x1b[31mred\x1b[0m $B costs (B)\n"] and not reading.skipped


@pytest.mark.parametrize(
    ("content", "setting", "reason", "size", "words"),
    [
        (b"caf\xe9 " * 10, "utf-8", "undecodable", 50, "10 of 50 bytes are not UTF-8, the first at byte 3; set --enc"),
        (
            b"x" * 99 + b"\xe9",
            "utf-8",
            "undecodable_bytes",
            1,
            "1 of 100 bytes are not UTF-8, the first at byte 99; th",
        ),
        ("ж".encode() * 2 + b"\xff", "utf-8", "undecodable_bytes", 1, "1 of 5 bytes are not UTF-8"),
        (b"a\x81" * 10, "windows-1252", "undecodable", 20, "10 of 20 bytes are not cp1252"),
    ],
)
def test_what_is_lost(tmp_path, content, setting, reason, size, words):
    (tmp_path / "a.txt").write_bytes(content)
    (tmp_path / "b.txt").write_bytes(b"fine")
    reading = read(f"text-files:{tmp_path}/*.txt", encoding=encodings.check_setting(setting))
    (skipped,) = reading.skipped
    assert (skipped.reason, skipped.size) == (reason, size) and skipped.detail.startswith(words)
    assert len(reading.texts) == 1 + (reason == "undecodable_bytes") and reading.texts[-1] == "fine"


def test_a_json_line_loses_its_bad_byte_only(tmp_path):
    pytest.importorskip("orjson")
    (tmp_path / "a.jsonl").write_bytes(
        b'{"text": "%s \xff"}\n{"text": "\xff\xff"}\n{"text": "%s \xff"\n' % ((b"x" * 200,) * 2)
    )
    reading = read(f"jsonl:{tmp_path}/a.jsonl@text")
    assert reading.texts == ["x" * 200 + " \ufffd"]
    assert [(skipped.reason, skipped.size) for skipped in reading.skipped] == [
        ("undecodable_bytes", 1),
        ("undecodable", 14),
        ("malformed_json", 213),  # with its bad byte, which is not counted a second time
    ]


@pytest.mark.parametrize(
    ("spec", "encoding", "message"),
    [
        ("text:a", "latin-x", "--encoding latin-x: not an encoding of text"),
        ("text:a", "base64", "--encoding base64: not an encoding of text"),
        ("text:a", "punycode", "--encoding punycode: not an encoding of text"),
        ("reference", "cp1252", "source reference has no files of text"),
    ],
)
def test_settings_that_are_refused(spec, encoding, message):
    with pytest.raises(UserError, match=message):
        parse(spec, encoding=encoding)
    assert parse("text:a", encoding="Windows-1252").encoding == "cp1252"


def test_the_commands_say_what_is_lost(folder, capsys):
    flags = ["--source", "text-files:*.txt", "--skip-damaged", "--workers", "1"]
    tokenizer = ["tokenizer", *flags, "--kind", "byte-bpe", "--vocab-size", "300"]
    assert main([*tokenizer, "--out", "a.json"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    total = sum(path.stat().st_size for path in folder.glob("*.txt")) - len((TEXTS["de"] * 3 + TEXTS["ru"]).encode())
    assert f"of the text ({total:,} bytes could not be read)" in last
    assert main([*tokenizer, "--encoding", "auto", "--out", "b.json"]) == 0
    captured = capsys.readouterr()
    assert "without under 0.1% of the text (1 bytes" in captured.out.splitlines()[-1]
    assert "files by encoding: utf-8 (2), cp1252 (1), utf-16-le (1), cp932 (1)" in captured.err

    build = ["build", *flags, "--tokenizer", "b.json", "--validation-fraction", "0.3623"]
    assert main([*build, "--out", "strict"]) == 0
    assert f"of the text ({total:,} bytes could not be read); look at it" in capsys.readouterr().out.splitlines()[-1]
    assert main([*build, "--encoding", "auto", "--out", "auto"]) == 0
    manifest = json.loads(pathlib.Path("auto/corpus.json").read_text())
    assert manifest["sources"][0]["encodings"] == dict.fromkeys((e for _, e in CASES), 1) | {"utf-8": 2}
    assert manifest["skipped"]["undecodable_bytes"]["bytes"] == 1
    assert main(["inspect", "auto"]) == 0
    assert "undecodable bytes" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("title", "encoding"), [("Глава 1", "cp1251"), ("Глава", "koi8_r"), ("Αθήνα", "cp1253"), ("北京", "gb18030")]
)
def test_a_title_does_not_decide_alone(title, encoding):
    """A file of two lines: both are looked at."""
    russian = "Привет, это длинный русский текст, который должен быть определён правильно, в нём много слов."
    body = {
        "cp1251": russian,
        "koi8_r": russian,
        "cp1253": "Η πόλη βρίσκεται κοντά στη θάλασσα και οι κάτοικοι της αγαπούν τα πλοία και τα ταξίδια.",
        "gb18030": "这座城市在河边,人们每天早上去市场买菜,然后回家做饭,孩子们在学校学习写字和读书。",
    }[encoding]
    data = f"{title}\n\n{body}\n".encode(encoding)
    assert data.decode(encodings.identify([data])) == data.decode(encoding)
