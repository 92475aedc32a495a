"""`warc:` and `html:`: records, encodings, what is no page, damage; the same bytes after an interruption."""

import dataclasses
import gzip
import json
import pathlib
import sys
import zlib

import pytest

pytest.importorskip("resiliparse", reason="needs the extra `web`")

from bert_jax.errors import UserError
from data_prep import sources
from data_prep.build_options import BuildOptions
from data_prep.builder.engines.local import LocalEngine
from data_prep.cli.main import main
from data_prep.sources.base import Document, InputRecord, Skipped
from data_prep.sources.html import page_documents
from tests.building import files, interrupted, make_documents, make_tokenizer, run

LAYOUT = (
    "<!DOCTYPE html><html><head><title>t</title><style>p {{x: y}}</style><script>var a = '<div>';</script></head><body>"
    "<div id='cookie-banner' class='cookie-consent'>We use cookies.<button>OK</button></div>"
    "<header><nav class=menu><ul><li><a href=a>Home</a></li></ul></nav></header>"
    "<main><article>{}</article><section class=comments id=comments><p>First!</p></section></main>"
    "<footer>Copyright.</footer></body></html>"
)
TEXT = "<h1>A title</h1><p>One  sentence.\nAnd &eacute; <em>more</em>.</p><ul><li>An item.</li></ul>Line<br>break."
EXPECTED = "A title\n\nOne sentence. And é more.\n\nAn item.\n\nLine\n\nbreak."


def record(kind, content_type, body, **fields):
    """A record of WARC/1.0."""
    names = {"WARC-Type": kind, "Content-Type": content_type, **{k.replace("_", "-"): v for k, v in fields.items()}}
    lines = ["WARC/1.0", *(f"{name}: {value}" for name, value in names.items()), f"Content-Length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body + b"\r\n\r\n"


def response(number, body, content_type="text/html", status="200 OK", **fields):
    lines = [f"HTTP/1.1 {status}", f"Content-Type: {content_type}"] * bool(content_type) or [f"HTTP/1.1 {status}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in fields.items()]
    http = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    uri = {"WARC_Target_URI": f"http://x.org/{number}", "WARC_Record_ID": f"<urn:uuid:{number}>"}
    return record("response", "application/http; msgtype=response", http, **uri)


def request(number):
    return record("request", "application/http; msgtype=request", b"GET / HTTP/1.1\r\n\r\n", WARC_Record_ID=str(number))


def page(text):
    return LAYOUT.format(f"<h1>A title</h1><p>{text}</p>").encode()


def read(spec, **settings):
    """Documents as (origin, text), skipped items as (reason, origin), and what is recorded."""
    source = dataclasses.replace(sources.parse(spec), **settings)
    record, found = InputRecord(), []
    for part in source.inputs():
        blocks = list(source.read_blocks(part, record))
        assert sum(block.size for block in blocks) == part.size
        for item in (item for block in blocks for item in source.documents(block)):
            is_document = isinstance(item, Document)
            found.append((item.origin, item.text) if is_document else (item.reason, item.origin))
    return found, record


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_a_page_without_what_is_around_its_text(workspace):
    pathlib.Path("site/sub").mkdir(parents=True)
    pathlib.Path("site/a.html").write_text(LAYOUT.format(TEXT))
    pathlib.Path("site/sub/b.html").write_bytes(b"\x89PNG\0")
    pathlib.Path("site/sub/c.html").write_text(" ")
    pathlib.Path("site/sub/d.html").write_text("<script>var text;</script>")
    found, record = read("html:site/**/*.html")
    assert found == [
        ("site/a.html", EXPECTED),
        ("not_html", "site/sub/b.html"),
        ("empty_document", "site/sub/c.html"),
        ("empty_document", "site/sub/d.html"),
    ]
    assert [one["path"] for one in record.files] == sorted(str(path) for path in pathlib.Path("site").rglob("*.html"))
    assert read("html:site/a.html", max_record_bytes=9)[0] == [("record_too_long", "site/a.html")]


RUSSIAN = "Все люди рождаются свободными и равными в своём достоинстве и правах. " * 3
JAPANESE = "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。" * 3
FRENCH = "Les êtres humains naissent libres et égaux en dignité et en droits à l’été. " * 3


@pytest.mark.parametrize(
    ("text", "encoding", "http", "meta"),
    [
        (FRENCH, "cp1252", "iso-8859-1", None),
        (FRENCH, "utf-8", "iso-8859-1", "windows-1252"),  # both lie
        (FRENCH, "cp1252", "utf-8", "utf-8"),
        (FRENCH, "utf-8-sig", "koi8-r", None),
        (FRENCH, "utf-16", "utf-8", None),
        (RUSSIAN, "cp1251", None, "windows-1251"),
        (RUSSIAN, "koi8-r", None, None),
        (RUSSIAN, "cp1251", "no-such-charset", "utf-7"),
        (RUSSIAN, "cp1251", "utf-16", "utf-16"),
        (RUSSIAN + " ", "cp1251", "utf-16", "utf-16"),  # an even number of bytes in one of the two
        (JAPANESE, "shift_jis", "utf-8", "Shift_JIS"),
        (JAPANESE, "iso2022_jp", "iso-2022-jp", None),
        (JAPANESE, "euc_jp", None, None),
    ],
)
def test_encodings(text, encoding, http, meta):
    head = f'<meta http-equiv=x content="text/html; charset={meta}">' if meta else ""
    content = LAYOUT.replace("<head>", f"<head>{head}").format(f"<p>{text}</p>").encode(encoding)
    (document,) = page_documents(content, "a", http)
    assert document.text == text.strip()


def test_bytes_that_are_no_text():
    content = page("été " * 40 + "x" * 400).replace(b"x", b"\xff", 1)
    skipped, document = page_documents(content, "a", "iso-8859-1")
    assert skipped.reason == "undecodable_bytes" and skipped.size == 1 and "été" in document.text
    (skipped,) = page_documents(page("é" * 30).replace("é".encode(), b"\xff\xfe\x81"), "a", "shift_jis")
    assert skipped.reason == "undecodable"


@pytest.mark.parametrize(
    "content",
    [
        "<div>" * 10**5,
        "<div/><P>x" * 10**5,
        "<ul><li>a" * 10**5,
        f"<p {' '.join(f'a{i}=b' for i in range(10**5))}>",
        f"<p {'/'.join(f'a{i}' for i in range(10**5))}>",
        f"""<p =" {"".join(f"a{i}='>'" for i in range(10**5))}>""",
    ],
)
def test_pages_that_would_take_minutes(content):
    """Without the check, the first takes more than two minutes."""
    (skipped,) = page_documents(f"<html><body>text {content} text".encode(), "a")
    assert isinstance(skipped, Skipped) and skipped.reason == "unreasonable_html"
    image = f"<img src='{'a/b >' * 10**5}'>"
    (document,) = page_documents(
        (image + "<p>x<br><td>" * 10**4 + "<div>" * 500 + "end" + "</div>" * 500).encode(), "a"
    )
    assert document.text.endswith("end")


CODED = page("Coded.")
RECORDS = {
    "warcinfo": record("warcinfo", "application/warc-fields", b"software: x\r\n"),
    "request": request(0),
    "page": response(1, page("One.")),
    "xhtml": response(2, page("Two."), "application/xhtml+xml; charset=utf-8"),
    "resource": record("resource", "text/html; charset=utf-8", page("Three é."), WARC_Target_URI="<http://x.org/3>"),
    "no uri": record("resource", "text/html", page("Four."), WARC_Record_ID="<urn:uuid:4>"),
    "image": response(5, b"\x89PNG\0\r\n\r\nWARC/1.0\r\n", "image/png"),
    "lying": response(6, b"%PDF-1.5 text"),
    "untyped": response(7, page("None."), ""),
    "moved": response(8, page("Moved."), status="301 Moved Permanently"),
    "chunked": response(9, b"3;x=y\r\n<p>\r\n6\r\nPieces\r\n0\r\n\r\n", Transfer_Encoding="chunked"),
    "gzip": response(10, gzip.compress(CODED), Content_Encoding="gzip"),
    "gzip is gone": response(11, CODED, Content_Encoding="gzip", Transfer_Encoding="chunked"),
    "gzip is cut": response(12, gzip.compress(page("Cut. " * 99), 0)[:-99], Content_Encoding="gzip"),
    "gzip is damaged": response(13, b"\x1f\x8b" + CODED, Content_Encoding="gzip"),
    "brotli is damaged": response(14, b"\xff\xff" + CODED, Content_Encoding="br"),
    "no http": record("response", "application/http", b"nothing", WARC_Target_URI="http://x.org/15"),
    "dns": record("response", "text/dns", b"x.org. 1 IN A 192.0.2.1", WARC_Target_URI="dns:x.org"),
    "wet": record("conversion", "text/plain", "Été.\n\nTwo.  \nThree.".encode(), WARC_Target_URI="http://x.org/16"),
    "empty": response(17, b""),
    "gzip of two members": response(18, gzip.compress(CODED[:9]) + gzip.compress(CODED[9:]), Content_Encoding="gzip"),
    "chunk without a size": response(19, b"3\r\n<p>text" + b"x" * 99, Transfer_Encoding="chunked"),
    "last chunk is cut": response(20, b"3\r\n<p>\r\n6\r\nPieces\r\n12", Transfer_Encoding="chunked"),
    "zstd": response(21, b"\x28\xb5\x2f\xfdtext", Content_Encoding="zstd"),
}
FOUND = [
    ("a#http://x.org/1", "A title\n\nOne."),
    ("a#http://x.org/2", "A title\n\nTwo."),
    ("a#http://x.org/3", "A title\n\nThree é."),
    ("a#<urn:uuid:4>", "A title\n\nFour."),
    ("not_html", "a#http://x.org/5"),
    ("not_html", "a#http://x.org/6"),
    ("not_html", "a#http://x.org/7"),
    ("http_status", "a#http://x.org/8"),
    ("a#http://x.org/9", "Pieces"),
    ("a#http://x.org/10", "A title\n\nCoded."),
    ("a#http://x.org/11", "A title\n\nCoded."),
    ("a#http://x.org/12", "A title\n\n" + ("Cut. " * 99).strip()),
    ("malformed_http", "a#http://x.org/13"),
    ("malformed_http", "a#http://x.org/14"),
    ("malformed_http", "a#http://x.org/15"),
    ("not_html", "a#dns:x.org"),
    ("a#http://x.org/16", "Été.\n\nTwo.\n\nThree."),
    ("empty_document", "a#http://x.org/17"),
    ("a#http://x.org/18", "A title\n\nCoded."),
    ("malformed_http", "a#http://x.org/19"),
    ("a#http://x.org/20", "Pieces"),
    ("malformed_http", "a#http://x.org/21"),
]


@pytest.mark.parametrize("name", ["a.warc", "a.warc.gz", "a.warc.zst"])
def test_records(workspace, name):
    """In any compression: a member or frame for each record."""
    if name.endswith(".zst"):
        compress = pytest.importorskip("backports.zstd").compress
    else:
        compress = gzip.compress if name.endswith(".gz") else bytes
    pathlib.Path(name).write_bytes(b"".join(map(compress, RECORDS.values())))
    expected = [tuple(text.replace("a#", f"{name}#") for text in one) for one in FOUND]
    for block_bytes in (500, 1 << 20):
        found, record = read(f"warc:{name}", block_bytes=block_bytes)
        # How much is read of what was cut off is zlib's choice.
        assert [one if "Cut." not in one[1] else one[0] for one in found] == [
            one if "Cut." not in one[1] else one[0] for one in expected
        ]
        assert record.files[0]["bytes"] == pathlib.Path(name).stat().st_size and not record.encodings
    small = read(f"warc:{name}", max_record_bytes=100)[0]
    assert {one for one in small if one[0] == "record_too_long"} == {("record_too_long", name)}


def test_the_library_may_be_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "resiliparse.parse.encoding", None)
    with pytest.raises(UserError, match="reading web pages needs resiliparse, which is missing: pip install "):
        list(page_documents(page("Text."), "a"))


@pytest.mark.parametrize("coding", ["br", "gzip", "deflate"])
def test_compressed_pages_are_bounded(workspace, coding):
    compress = {"gzip": gzip.compress, "deflate": zlib.compress}.get(coding)
    body = (compress or pytest.importorskip("brotli").compress)(page("Compressed. " * 1000))
    pathlib.Path("a.warc").write_bytes(response(1, body, Content_Encoding=coding))
    assert len(read("warc:a.warc")[0][0][1]) > 10_000
    assert read("warc:a.warc", max_record_bytes=5000)[0] == [("malformed_http", "a.warc#http://x.org/1")]


@pytest.mark.parametrize("size", [300, 1 << 15])
def test_all_members_of_a_compressed_page_are_read(workspace, size):
    html = page("".join(f"Word {i} of it. " for i in range(4000)))
    members = [gzip.compress(html[i : i + size], 0) for i in range(0, len(html), size)]
    expected = next(iter(page_documents(html, ""))).text
    for cut in (0, len(members[-1])):
        body = b"".join(members)
        body = body[: len(body) - cut] + b"\0" * 9
        pathlib.Path("a.warc").write_bytes(response(1, body, Content_Encoding="gzip"))
        ((_, text),) = read("warc:a.warc")[0]
        assert text == expected if not cut else expected.startswith(text[:-9]) and len(text) > 100


def test_a_header_may_name_the_language(workspace):
    wet = record("conversion", "text/plain", b"Text.", WARC_Identified_Content_Language="fra,eng")
    html = response(1, page("Text."), Content_Language="de")
    pathlib.Path("a.warc").write_bytes(wet + html)
    for field, expected in (("WARC-Identified-Content-Language", ["fra", None]), ("content-language", [None, "de"])):
        source = sources.parse("warc:a.warc", language=f"@{field}")
        (part,) = source.inputs()
        (block,) = source.read_blocks(part, InputRecord())
        assert [document.fields.get(field) for document in source.documents(block)] == expected


PLAIN = b"".join(RECORDS[name] for name in ("page", "xhtml", "request", "wet"))
MEMBERS = b"".join(gzip.compress(RECORDS[name]) for name in ("page", "xhtml", "request", "wet"))
DAMAGED = {
    "cut.warc": (PLAIN[:-20], "truncated, the record at byte {} of its content has no end; download it again", 2),
    "head.warc": (PLAIN[: len(RECORDS["page"]) + 30], "truncated, the record at byte {} of its content has no end", 1),
    "request.warc": (RECORDS["page"] + RECORDS["request"][:-9], "truncated, the record at byte {} of", 1),
    "cut.warc.gz": (MEMBERS[:-20], "truncated, its .gz data has no end", 2),
    "flip.warc.gz": (gzip.compress(RECORDS["page"]) + b"\x1f\x8b\x08\0junk" * 9, "damaged .gz data", 1),
    "between.warc": (RECORDS["page"] + b"junk\r\n" + RECORDS["wet"], "no WARC record begins at byte {} of its", 1),
    "length.warc": (
        RECORDS["page"] + RECORDS["wet"].replace(b"Length", b"Size"),
        "the record at byte {} of its content has no Content-Length",
        1,
    ),
    "page.warc": (page("No archive."), "is not a WARC file; leave it out of the source", 0),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damage_is_an_error_or_left_out(workspace, name):
    content, message, documents = DAMAGED[name]
    pathlib.Path(name).write_bytes(content)
    read_before = ["page", "xhtml", "request"] if documents == 2 else ["page"][:documents]
    message = message.format(sum(len(RECORDS[one]) for one in read_before))
    with pytest.raises(UserError) as error:
        read(f"warc:{name}")
    assert str(error.value).startswith(f"{name}: ") and message in str(error.value)
    found, record = read(f"warc:{name}", skip_damaged=True)
    assert [origin for origin, _ in found] == [f"{name}#http://x.org/{number + 1}" for number in range(documents)]
    assert record.damaged == [str(error.value)] and [one["path"] for one in record.files] == [name]


def write_archives():
    documents = iter(make_documents(1, 240))
    for number in range(4):
        pages = [response(f"{number}-{i}", page(next(documents))) + request(i) for i in range(60)]
        pathlib.Path(f"{number}.warc.gz").write_bytes(b"".join(map(gzip.compress, pages)))


def test_a_build_that_is_interrupted_writes_the_same_bytes(workspace):
    write_archives()
    specs, options = ["warc:*.warc.gz"], BuildOptions(validation_fraction=0.1)
    run("one", specs, options)
    with interrupted("pipeline.decide"):
        run("two", specs, options)
    run("two", specs, options)
    assert files("one") == files("two")


@pytest.mark.slow
def test_two_workers_write_the_same_bytes(workspace):
    write_archives()
    options = BuildOptions(validation_fraction=0.1)
    run("one", ["warc:*.warc.gz"], options)
    run("two", ["warc:*.warc.gz"], options, LocalEngine(2))
    assert files("one") == files("two")


def test_counts_and_errors_of_the_command(workspace, capsys):
    make_tokenizer().save("tokenizer.json")
    pathlib.Path("a.warc").write_bytes(b"".join(RECORDS.values()))
    pathlib.Path("cut.warc").write_bytes(PLAIN[:-20])
    pathlib.Path("none.warc").write_bytes(RECORDS["image"] + RECORDS["moved"] + RECORDS["request"])
    command = ["build", "--tokenizer", "tokenizer.json", "--out", "c", "--workers", "1", "--source"]
    for spec, message in (
        ("warc:cut.warc", "has no end; download it again; or add --skip-damaged"),
        (
            "warc:none.warc",
            "everything was skipped (1 x not_html, 1 x http_status); the first: none.warc#http://x.org/5",
        ),
        ("warc:absent", "no file matches absent"),
    ):
        assert main([*command, spec]) == 2
        errors = capsys.readouterr().err
        assert errors.count("error:") == 1 and message in errors, errors
    assert main([*command, "warc:a.warc", "--skip-damaged"]) == 0
    skipped = json.loads(pathlib.Path("c/corpus.json").read_text())["skipped"]
    assert {reason: entry["count"] for reason, entry in skipped.items()} == {
        "not_html": 4,
        "http_status": 1,
        "malformed_http": 5,
        "empty_document": 1,
    }
