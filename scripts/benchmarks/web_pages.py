"""A web archive of which everything is known: pages in the patterns of real sites, around given paragraphs.

Pages are articles, exact and slightly changed copies, pages that a corpus should lose (stubs, repeated lines, tables of
numbers, two languages, a language that is not wanted), and records that are no pages. A number of six digits in the
text of a page identifies it.
"""

import dataclasses
import gzip
import html
import itertools
from collections.abc import Iterator, Mapping, Sequence

import brotli
import numpy as np

KINDS = {
    "article": 0.69,
    "copy": 0.05,
    "print version": 0.05,
    "stub": 0.04,
    "repeated lines": 0.04,
    "numbers": 0.03,
    "two languages": 0.03,
    "other language": 0.04,
    "lorem ipsum": 0.03,
}
"""Share of the pages of a language."""
NO_PAGES = 0.1
"""Records that are no pages, per page."""
CHARSETS = {
    "de": "windows-1252",
    "fr": "iso-8859-15",
    "es": "iso-8859-1",
    "ru": "koi8-r",
    "zh": "gb18030",
    "ja": "shift_jis",
    "th": "tis-620",
    "ar": "windows-1256",
}
"""Of every fourth page of these languages, if they have its characters; others are UTF-8."""
MENU = ("Home", "Products", "About us", "Contact", "Sitemap", "Log in")
AROUND = (
    "We use cookies to improve this site.",
    "Copyright 2026. All rights reserved.",
    "Share this page with your friends",
    "First! Great post, thanks for sharing this.",
)
"""Text around the main text, which a corpus should not have."""
LOREM = (
    "lorem ipsum dolor sit amet consectetur adipiscing elit sed do eiusmod tempor incididunt ut labore et dolore magna"
    " aliqua enim ad minim veniam quis nostrud exercitation ullamco laboris nisi aliquip ex ea commodo consequat"
)
EVERY_PERSONAL = 7
"""Of the numbers of pages, those of articles that end with personal data."""


@dataclasses.dataclass(frozen=True)
class Page:
    """What a page is."""

    number: int
    kind: str
    language: str
    paragraphs: tuple[str, ...]
    """the main text"""
    original: int
    """number of the article of a copy or a print version; else its own"""


def make_pages(texts: Mapping[str, Sequence[str]], others: Sequence[str], count: int, seed: int) -> list[Page]:
    """Pages of all kinds, those of the languages in turn.

    Args:
      texts: paragraphs by ISO 639 code.
      others: paragraphs in languages that are none of these.
      count: pages.
      seed: of all choices.
    """
    rng, pages = np.random.default_rng(seed), []
    articles: dict[str, list[Page]] = {language: [] for language in texts}
    for number, language in zip(range(count), itertools.cycle(texts), strict=False):
        kind = str(rng.choice([*KINDS], p=[*KINDS.values()]))
        if kind in ("copy", "print version") and not articles[language]:
            kind = "article"
        page = _page(number, kind, language, texts, others, articles[language], rng)
        if kind == "article":
            articles[language].append(page)
        pages.append(page)
    return pages


def _page(
    number: int,
    kind: str,
    language: str,
    texts: Mapping[str, Sequence[str]],
    others: Sequence[str],
    articles: Sequence[Page],
    rng: np.random.Generator,
) -> Page:
    def some(paragraphs: Sequence[str], least: int, most: int) -> list[str]:
        return [paragraphs[i] for i in rng.choice(len(paragraphs), int(rng.integers(least, most)), replace=False)]

    own, original = texts[language], number
    match kind:
        case "copy" | "print version":
            article = articles[int(rng.integers(len(articles)))]
            original = article.number
            found = [_without_mark(article.paragraphs[0]), *article.paragraphs[1:]]
            if kind == "copy":
                return Page(number, kind, language, article.paragraphs, original)
            found = [*found[:-1], some(own, 1, 2)[0]]
        case "stub":
            found = [some(own, 1, 2)[0][:40]]
        case "repeated lines":
            found = [*some(own, 1, 2), *some(own, 1, 2) * 12]
        case "numbers":
            found = [" ".join(map(str, rng.integers(1, 10_000, 12))) for _ in range(12)]
        case "two languages":
            second = [code for code in texts if code != language]
            found = [*some(own, 4, 6), *some(texts[second[int(rng.integers(len(second)))]], 4, 6)]
        case "other language":
            found = some(others, 6, 12)
        case "lorem ipsum":
            found = [" ".join(rng.choice(LOREM.split(), 40)) + "." for _ in range(8)]
        case _:
            found = some(own, 6, 12)
            if number % EVERY_PERSONAL == 0:
                found.append(" / ".join(personal(number)))
    return Page(number, kind, language, (_mark(found[0], number), *found[1:]), original)


def personal(number: int) -> tuple[str, str, str]:
    """An e-mail address, an IP address and a telephone number."""
    return f"name{number}@mail.test", f"8.8.{number // 256 % 256}.{number % 256}", f"+49 30 {1_000_000 + number}"


def _mark(paragraph: str, number: int) -> str:
    return f"{paragraph} ({number:06d})"


def _without_mark(paragraph: str) -> str:
    return paragraph[:-9]


def render(page: Page, charset: str) -> str:
    """The page in one of five patterns."""
    title, *rest = ("Title", *map(html.escape, page.paragraphs))
    menu = "".join(f"<li><a href='/{number}'>{name}</a></li>" for number, name in enumerate(MENU))
    cookies, footer, share, comment = AROUND
    match page.number % 5:
        case 0:  # blog: article with comments
            text = "".join(f"<p>{one}</p>" for one in rest)
            comments = f"<section class='comments'><p>{comment}</p></section>"
            body = f"<main><article><h1>{title}</h1>{text}</article>{comments}</main>"
        case 1:  # nested containers without semantic tags
            text = "".join(f"<div class='row'><div><span>{one}</span></div></div>" for one in rest)
            content = f"<div id='content'><h2>{title}</h2>{text}</div>"
            body = f"<div class='wrapper'>{content}<div class='share'>{share}</div></div>"
        case 2:  # lines
            body = f"<div id='main'><h1>{title}</h1>{'<br>'.join(rest)}</div><div class='sidebar'>{share}</div>"
        case 3:  # documentation: lists and quotations
            items = "".join(f"<li>{one}</li>" for one in rest[1:])
            body = f"<main><h1>{title}</h1><blockquote>{rest[0]}</blockquote><ul>{items}</ul></main>"
        case _:  # forum
            text = "".join(f"<div class='post'><div class='post-body'><p>{one}</p></div></div>" for one in rest)
            body = f"<div role='main'><h1>{title}</h1>{text}</div><aside>{share}</aside>"
    return (
        f"<!DOCTYPE html><html lang='{page.language}'><head><meta charset='{charset}'><title>{title}</title>"
        f"<link rel='alternate' hreflang='en' href='/en/{page.number}'>"
        f"<style>p {{margin: 0}}</style><script>window.data = {{'a': '<p>{comment}</p>'}};</script>"
        '<script type=\'application/ld+json\'>{"@type": "WebPage"}</script></head><body>'
        f"<div id='cookie-banner' class='cookie-consent'>{cookies}<button>OK</button></div>"
        f"<header><nav class='menu'><ul>{menu}</ul></nav></header>{body}"
        f"<footer class='footer'>{footer}</footer><noscript>Enable JavaScript</noscript></body></html>"
    )


def archive(pages: Sequence[Page], seed: int) -> Iterator[bytes]:
    """Members of a .warc.gz: a request and a response for each page, and records that are no pages."""
    rng = np.random.default_rng(seed)
    for page in pages:
        yield _record("request", "application/http; msgtype=request", b"GET / HTTP/1.1\r\n\r\n", page.number)
        yield _response(page)
        if rng.random() < NO_PAGES:
            yield _no_page(int(rng.integers(6)), 1_000_000 + page.number)


def _response(page: Page) -> bytes:
    """Every fourth page in another charset, every eighth with a header of HTTP that names a wrong one."""
    charset = CHARSETS.get(page.language, "utf-8") if page.number % 4 == 1 else "utf-8"
    text = render(page, charset)
    try:
        body = text.encode(charset)
    except UnicodeEncodeError:
        charset = "utf-8"
        body = render(page, charset).encode()
    named = "iso-8859-1" if page.number % 8 == 0 else charset
    headers = [f"Content-Type: text/html; charset={named}"]
    if page.number % 7 == 2:
        body = brotli.compress(body, quality=5)
        headers.append("Content-Encoding: br")
    elif page.number % 3 == 0:
        body = gzip.compress(body, 6, mtime=0)
        headers.append("Content-Encoding: gzip")
    if page.number % 5 == 0:
        cut = len(body) // 2
        body = b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in (body[:cut], body[cut:], b""))
        headers.append("Transfer-Encoding: chunked")
    return _http("200 OK", headers, body, page.number)


def _no_page(kind: int, number: int) -> bytes:
    match kind:
        case 0:
            return _http("404 Not Found", ["Content-Type: text/html"], b"<p>Not found</p>", number)
        case 1:
            return _http("301 Moved Permanently", ["Location: /", "Content-Type: text/html"], b"", number)
        case 2:
            return _http("200 OK", ["Content-Type: image/png"], b"\x89PNG\r\n\x1a\n", number)
        case 3:
            return _http("200 OK", ["Content-Type: text/html"], b"%PDF-1.7 \xff", number)
        case 4:
            return _record("revisit", "application/http; msgtype=response", b"HTTP/1.1 200 OK\r\n\r\n", number)
    return _record("response", "text/dns", b"example.org. 1 IN A 192.0.2.1", number)


def _http(status: str, headers: Sequence[str], body: bytes, number: int) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", *headers, "", ""]).encode()
    return _record("response", "application/http; msgtype=response", head + body, number)


def _record(kind: str, content_type: str, body: bytes, number: int) -> bytes:
    """A record of WARC 1.0 (ISO 28500), a gzip member of its own."""
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{kind}-{number}>\r\n"
        "WARC-Date: 2026-11-29T00:00:00Z\r\n"
        f"WARC-Target-URI: http://site{number % 97}.example/{number}\r\nContent-Type: {content_type}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return gzip.compress(head.encode() + body + b"\r\n\r\n", 6, mtime=0)
