"""A corpus from a web archive: what each stage removes, how long it takes, and whether the bytes are always the same.

    python scripts/benchmarks/bench_web.py --texts DIR --others DIR [--pages 2000] --json web.json

DIR has a file CODE.txt for each language (ISO 639), a paragraph in each line; pages of `--others` are in languages that
are not wanted. The archive is made of them (`web_pages.py`). Stages are flags of `bert-data build`, each with those
before: `extract` keeps everything, `language` keeps the languages of the texts, `quality` has thresholds for languages
without spaces, `duplicates` removes equal and similar documents, `mask` replaces personal data. `english thresholds` is
`quality` with the published thresholds instead. CPU seconds are those of the command and its children.
"""

import argparse
import collections
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import web_pages

from bert_jax.bench import harness
from bert_jax.bench.harness import positive
from bert_jax.data.corpus import Corpus
from bert_jax.data.manifest import SPLITS
from bert_jax.errors import require
from bert_jax.tokenizers.tokenizer import Tokenizer
from data_prep import sources
from data_prep.sources.base import Document, InputRecord
from data_prep.word_hashes import ngram_hashes, word_hashes

ANY_SPACES = {
    "gopher_repetition": {},
    "gopher_quality": {
        "min_words": None,
        "min_mean_word_length": None,
        "max_mean_word_length": None,
        "min_words_with_letters": 0.5,
        "min_stop_words": None,
    },
}
"""Thresholds without those that count words between spaces."""
FEW = 60
"""Pages of a build that shows how long a build takes without text."""
PERSONAL = {"email": r"@mail\.test", "ip": r"/8\.8\.", "phone": r"\+4930"}
"""What `web_pages.personal` writes, without spaces."""
COMMAND = [sys.executable, "-m", "data_prep"]


def stages(codes: Sequence[str]) -> dict[str, list[str]]:
    """Flags of each stage; the last three do not build on each other."""
    extract = ["--keep-duplicates"]
    language = [word for code in codes for word in ("--keep-language", code)] + ["--language", "auto"]
    quality = [*language, "--filter", "thresholds.json", "--min-characters", "200"]
    english = [*language, "--filter", "gopher_repetition", "--filter", "gopher_quality", "--min-characters", "200"]
    duplicates = [*quality, "--drop-near-duplicates"]
    return {
        "extract": extract,
        "language": [*extract, *language],
        "quality": [*extract, *quality],
        "duplicates": duplicates,
        "mask": [*duplicates, "--mask", "email", "--mask", "ip", "--mask", "phone"],
        "english thresholds": [*extract, *english],
    }


def read_texts(directory: Path) -> dict[str, list[str]]:
    """Paragraphs by the names of the files."""
    files = sorted(directory.glob("*.txt"))
    require(bool(files), f"--texts {directory}: no *.txt in it")
    texts = {
        file.stem: [line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()] for file in files
    }
    for code, paragraphs in texts.items():
        require(len(paragraphs) >= 12, f"{directory / code}.txt: needs at least 12 paragraphs")
    return texts


def build(out: str, flags: Sequence[str], workers: int = 1, engine: str = "local") -> list[str]:
    """The command of a build."""
    fixed = ["--source", "warc:pages.warc.gz", "--tokenizer", "tokenizer.json", "--name", "web"]
    engines = ["--engine", engine] if engine != "local" else ["--workers", str(workers)]
    return [*COMMAND, "build", *fixed, "--out", out, *engines, *flags]


def run(command: Sequence[str]) -> dict[str, float]:
    """Runs a command; seconds by clock.

    Raises:
      UserError: it failed.
    """
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    require(done.returncode == 0, f"{' '.join(command)} failed: {done.stderr[-500:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": time.perf_counter() - start, "cpu": cpu}


def files(out: str) -> dict[str, bytes]:
    """All bytes of a corpus."""
    return {path.name: path.read_bytes() for path in Path(out).iterdir()}


def documents(out: str) -> Iterator[str]:
    """Decoded documents of a corpus."""
    tokenizer = Tokenizer.load(f"{out}/tokenizer.json")
    for split in SPLITS:
        corpus = Corpus.open(out, split)
        for first, last in zip(corpus.document_offsets, corpus.document_offsets[1:], strict=False):
            yield tokenizer.decode(corpus.read_sentences(first, last).tolist())


def numbers(out: str) -> collections.Counter[int]:
    """How many documents of a corpus have the number of each page."""
    found = collections.Counter[int]()
    for text in documents(out):
        found.update({int(number) for number in re.findall(r"\b\d{6}\b", text)})
    return found


def personal_data(out: str) -> dict[str, int]:
    """How many e-mail addresses, IP addresses and telephone numbers of `web_pages.personal` are in a corpus."""
    text = "".join("".join(text.split()) for text in documents(out))
    return {kind: len(re.findall(pattern, text)) for kind, pattern in PERSONAL.items()}


def kept(pages: Sequence[web_pages.Page], found: Mapping[int, int]) -> dict[str, int]:
    """Documents by kind; those with the number of an article are the article, the rest copies of it."""
    counts = dict.fromkeys(web_pages.KINDS, 0)
    for page in pages:
        if page.kind == "copy":
            continue
        counts[page.kind] += min(1, found.get(page.number, 0))
        counts["copy"] += max(0, found.get(page.number, 0) - 1)
    return counts


def extraction(pages: Sequence[web_pages.Page], texts: dict[int, str]) -> dict[str, Any]:
    """What reading the archive gives, without a build, and its speed: paragraphs of articles, text around them.

    The texts of the pages are added to `texts`.
    """
    source = sources.parse("warc:pages.warc.gz")

    def read() -> None:
        for part in source.inputs():
            for block in source.read_blocks(part, InputRecord()):
                for item in source.documents(block):
                    if isinstance(item, Document):
                        texts[int(item.origin.rpartition("/")[2])] = item.text

    _, timing = harness.timed(read)
    articles = [page for page in pages if page.kind == "article"]
    wanted = [(page.number, " ".join(one.split())) for page in articles for one in page.paragraphs]
    whole = sum(one in " ".join(texts.get(number, "").split()) for number, one in wanted)
    around = [one in texts.get(page.number, "") for page in articles for one in (*web_pages.AROUND, *web_pages.MENU)]
    size = sum(len(web_pages.render(page, "utf-8").encode()) for page in pages)
    return {
        "pages": len(texts),
        "paragraphs kept": whole / len(wanted),
        "around kept": sum(around) / len(around),
        "HTML MB": size / 1e6,
        "MB / CPU s": size / 1e6 / timing["cpu"],
    }


def near_duplicates(
    pages: Sequence[web_pages.Page], texts: Mapping[int, str], before: Mapping[int, int], after: Mapping[int, int]
) -> dict[str, Any]:
    """Of articles and print versions before the removal: those with a Jaccard similarity of 0.5 or more with an earlier
    one that is kept, counted over all pairs; how many of them, and of others, were removed, and the similarities of
    these others.
    """
    similarity, shingles = {}, collections.defaultdict(list)
    for page in pages:
        if page.kind not in ("article", "print version") or not before.get(page.number):
            continue
        own = {*ngram_hashes(word_hashes(texts[page.number]), 3).tolist()}
        similarity[page.number] = max((len(own & one) / len(own | one) for one in shingles[page.language]), default=0.0)
        if after.get(page.number):
            shingles[page.language].append(own)
    removed = {page.number for page in pages if before.get(page.number) and not after.get(page.number)}
    similar = {number for number, share in similarity.items() if share >= 0.5}
    others = [similarity[number] for number in similarity.keys() & removed - similar]
    counts = {"similar": len(similar), "removed": len(similar & removed), "others removed": len(others)}
    return counts | {"their similarity": harness.spread(others) if others else None}


def by_language(pages: Sequence[web_pages.Page], found: Mapping[str, Mapping[int, int]]) -> list[dict[str, Any]]:
    """The share of the articles of each language that each stage keeps."""
    rows = []
    for code in dict.fromkeys(page.language for page in pages):
        own = [page for page in pages if page.language == code and page.kind == "article"]
        shares = {stage: sum(page.number in one for page in own) / len(own) for stage, one in found.items()}
        rows.append({"code": code, "articles": len(own)} | shares)
    return rows


def rules(out: str) -> list[dict[str, Any]]:
    """Documents that each rule removed, by language."""
    manifest, counts = json.loads(Path(f"{out}/corpus.json").read_text()), collections.defaultdict(dict)
    for group in manifest["filters"]["groups"]:
        for rule, removed in group["removed"].items():
            counts[rule][group["language"]] = removed["documents"]
    return [{"rule": rule, "removed": sum(codes.values()), **codes} for rule, codes in counts.items()]


def killed(
    flags: Sequence[str], seconds: float, expected: Mapping[str, bytes], builds: int, seed: int
) -> dict[str, Any]:
    """Builds that are killed once at random moments and started again: how many were killed, and had the same bytes."""
    rng, counts = np.random.default_rng(seed), {"builds": builds, "killed": 0, "same bytes": 0, "other files": []}
    for index in range(builds):
        command = build(f"killed{index}", flags)
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        ) as one:
            try:
                one.wait(rng.uniform(0.02, 0.98) * seconds)
            except subprocess.TimeoutExpired:
                os.killpg(one.pid, signal.SIGKILL)
                counts["killed"] += 1
        if not Path(f"killed{index}/corpus.json").exists():
            run(command)
        found = files(f"killed{index}")
        counts["same bytes"] += found == expected
        counts["other files"] += [name for name in {*found, *expected} if found.get(name) != expected.get(name)]
    return counts


def pretrain(steps: int, corpus: str) -> dict[str, float]:
    """Held-out metrics after a short run on a corpus."""
    settings = {
        "objective.pair": "none",
        "data.format": "full_sentences",
        "phases.0.steps": steps,
        "phases.0.batch-size": 32,
        "phases.0.warmup-steps": steps // 10,
        "phases.0.learning-rate": 1e-3,
        "evaluation.every": steps,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    run([sys.executable, "-m", "bert_jax", "pretrain", "bert_tiny", "--corpus", corpus, "--workdir", "run", *words])
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["split"] == "validation"][-1]
    return {name: last[name] for name in ("step", "mlm_loss", "unigram_loss", "mlm_accuracy", "unigram_accuracy")}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All of it, in a temporary directory."""
    texts, others = read_texts(options.texts.resolve()), read_texts(options.others.resolve())
    pages = web_pages.make_pages(texts, [one for each in others.values() for one in each], options.pages, options.seed)
    os.environ["PYTHONPATH"] = str(harness.ROOT)
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        Path("pages.warc.gz").write_bytes(b"".join(web_pages.archive(pages, options.seed)))
        Path("thresholds.json").write_text(json.dumps(ANY_SPACES))
        run(
            [
                *COMMAND,
                "tokenizer",
                "--source",
                "warc:pages.warc.gz",
                "--vocab-size",
                "8192",
                "--no-lowercase",
                "--out",
                "tokenizer.json",
            ]
        )
        return _results(options, pages, stages([*texts]))


def _results(
    options: argparse.Namespace, pages: Sequence[web_pages.Page], flags: Mapping[str, Sequence[str]]
) -> dict[str, Any]:
    timings: dict[str, list[dict[str, float]]] = collections.defaultdict(list)
    for index in range(options.rounds):
        for stage, words in flags.items():
            harness.progress(f"round {index + 1}: {stage}")
            timings[stage].append(run(build(f"{stage} {index}", words)))
    Path("all.warc.gz").write_bytes(Path("pages.warc.gz").read_bytes())
    Path("pages.warc.gz").write_bytes(b"".join(web_pages.archive(pages[:FEW], options.seed)))
    start = run(build("few", flags["mask"]))["cpu"]
    Path("all.warc.gz").replace("pages.warc.gz")
    found = {stage: numbers(f"{stage} 0") for stage in flags}
    counts = {kind: sum(page.kind == kind for page in pages) for kind in web_pages.KINDS}
    rows = [{"stage": "archive", "documents": len(pages)} | counts]
    for stage in flags:
        manifest = json.loads(Path(f"{stage} 0/corpus.json").read_text())
        splits = manifest["splits"].values()
        cpu = harness.spread([timing["cpu"] for timing in timings[stage]])
        sizes = {
            "documents": sum(one["documents"] for one in splits),
            "text MB": sum(one["text_bytes"] for one in splits) / 1e6,
        }
        rows.append({"stage": stage, **sizes, **kept(pages, found[stage]), "CPU s": cpu})
    texts: dict[int, str] = {}
    read = extraction(pages, texts)
    for row in rows[1:]:
        added = row["CPU s"]["median"] - start
        row["MB / CPU s"] = read["HTML MB"] / added if added > 0 else None
    results = {
        "extraction": [read],
        "start of a build": [{"CPU s": start}],
        "stages": rows,
        "personal data": [{"stage": stage} | personal_data(f"{stage} 0") for stage in ("duplicates", "mask")],
        "articles": by_language(pages, found),
        "rules": rules("quality 0"),
        "english rules": rules("english thresholds 0"),
        "similar": [near_duplicates(pages, texts, found["quality"], found["duplicates"])],
    }
    options.save(results)
    final, expected = flags["mask"], files("mask 0")
    equal = {}
    for name, words in (("2 workers", {"workers": 2}), ("Beam", {"engine": "beam"})):
        harness.progress(name)
        run(build(name, final, **words))
        equal[name] = files(name) == expected
    harness.progress(f"{options.kills} builds that are killed")
    seconds = float(np.median([timing["seconds"] for timing in timings["mask"]]))
    results |= {"same bytes": [equal], "killed": [killed(final, seconds, expected, options.kills, options.seed)]}
    options.save(results)
    results["run"] = [pretrain(options.steps, "mask 0")]
    return results | {"samples": timings}


def flags(add: Callable[..., Any]) -> None:
    """The command line."""
    add("--texts", type=Path, required=True)
    add("--others", type=Path, required=True)
    add("--pages", type=positive, default=2000)
    add("--rounds", type=positive, default=3)
    add("--kills", type=positive, default=20)
    add("--steps", type=positive, default=300)
    add("--seed", type=int, default=0)


main = partial(harness.run, __doc__, flags, measure, harness.report_lines)


if __name__ == "__main__":
    raise SystemExit(main())
