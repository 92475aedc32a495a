"""`hub:` folders, as a download or a clone leaves them: configurations, splits, what is held out, bad folders."""

import dataclasses
import json
import pathlib

import pytest

from bert_jax.data.corpus import Corpus
from bert_jax.errors import UserError
from data_prep import sources
from data_prep.cli.main import main
from data_prep.sources import hub_layout
from tests.building import files, make_documents, make_tokenizer, normal, texts
from tests.stores import memory_store

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb\nsize 12345\n"
CONFIGS = """---
license: mit
configs:
- config_name: en
  data_files:
  - split: train
    path: "data/en/**/*.parquet"
  - split: dev
    path: [data/en/held.parquet, data/en/absent.parquet]
- config_name: de
  data_dir: data/de
  default: true
- config_name: all
  data_files: data/*/*.parquet
- config_name: absent
  data_files: other/*
---
# A dataset
"""
NAMED = ["data/de/train/0.parquet", "data/de/valid/0.parquet", "data/en/a.parquet", "data/en/held.parquet"]
LAYOUTS = [
    # Paths, README.md; paths by configuration and split, and the configuration that is read.
    (
        ["data/extra.parquet", "data/my.split-00000-of-00001-abc.parquet", "data/train-00000-of-00001.parquet"],
        None,
        {"default": {"my.split": ["data/my.split-00000-of-00001-abc.parquet"], "train": 2}},
        "default",
    ),
    (["test.jsonl.zst", "train.jsonl.zst", "validation.jsonl.zst"], None, {"default": {}}, "default"),
    (
        ["de/test/0000.parquet", "en/train/0000.parquet", "en/train/0001.parquet", "train.parquet"],
        "# no header",
        {"de": {"test": 0}, "en": {"train": [1, 2]}},
        None,
    ),
    (
        ["data/en/my-val_2.json.gz", "data/train.jsonl"],
        None,
        {"en": {"validation": 0}, "default": {"train": 1}},
        "default",
    ),
    (["old/dev/train/a.jsonl", "retrain.jsonl", "trainers.jsonl"], None, {"default": {"train": 0}}, "default"),
    (
        ["a.jsonl", "retrain.jsonl", "trainers.jsonl"],
        "---\nlicense: mit\n---\n",
        {"default": {"train": [0, 1, 2]}},
        "default",
    ),
    (
        NAMED,
        CONFIGS,
        {"en": {"train": [2, 3], "dev": 3}, "de": {"train": 0, "validation": 1}, "all": {"train": [2, 3]}},
        "de",
    ),
    (NAMED, "---\nconfigs:\n- data_files: {x: ./data/de/*/0.parquet}\n---", {"default": {"x": [0, 1]}}, "default"),
    (NAMED, "---\nconfigs: []\n---\n", {}, None),
]


HOSTILE = (
    ("bool", "a: !!bool x"),
    ("int", "a: !!int ''"),
    ("time", "a: !!timestamp x"),
    ("bomb", "a0: &a0 {k: 1}\n" + "".join(f"a{i}: &a{i} {{<<: [{f'*a{i - 1}, ' * 10}]}}\n" for i in range(1, 12))),
    ("stars", "configs: [{data_files: 'a**/b'}]"),
    ("twice", "configs: [{data_files: [{split: train, path: a.jsonl}, {split: train, path: train.jsonl}]}]"),
)
"""Headers that are refused, by folder; PyYAML has other exceptions for some, and one has 10^11 entries."""


@pytest.mark.parametrize(("paths", "readme", "expected", "chosen"), LAYOUTS)
def test_layouts(paths, readme, expected, chosen):
    """The rules of `datasets`; on 1,285 random folders, its own code found the same splits (docs/log/corpora.md)."""
    every = [".cache/huggingface/train.jsonl", ".git/train.json", "__MACOSX/train.json", "README.md", "train.md"]
    found = hub_layout.data_files([*paths, *every, "dataset_infos.json", "en/dataset_info.json"])
    assert found == paths

    def of(value):
        indices = [value] if isinstance(value, int) else value
        return [paths[one] if isinstance(one, int) else one for one in indices]

    if expected == {"default": {}}:
        expected = {"default": {path.partition(".")[0]: [path] for path in paths}}
    expected = {config: {split: of(value) for split, value in splits.items()} for config, splits in expected.items()}
    assert hub_layout.configurations(paths, readme) == (expected, chosen)


@pytest.mark.parametrize("glob", ["**/" * 25 + "x", "*a" * 20 + "x", "**/" * 25 + "*a" * 20 + "x"])
def test_globs_need_no_exponential_time(glob):
    path = "a/" * 25 + "a" * 60 + ".jsonl"
    entries = f"---\nconfigs:\n- data_files: '{glob}'\n- {{config_name: b, data_files: '**/*a*l'}}\n---\n"
    assert hub_layout.configurations([path], entries) == ({"b": {"train": [path]}}, "b")


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_tokenizer().save("tokenizer.json")


def write(path, documents):
    """A file of Parquet or JSON lines, by its name."""
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.table({"text": documents}), path)
        return
    content = "".join(json.dumps({"text": text}) + "\n" for text in documents).encode()
    if path.suffix == ".zst":
        zstd = pytest.importorskip("backports.zstd")
        cut = content.index(b"\n", len(content) // 2) - 7
        # Two frames, of which the first needs a window above the 128 MiB that decompressors grant unless told.
        wide = {zstd.CompressionParameter.window_log: 28, zstd.CompressionParameter.hash_log: 10}
        compressor = zstd.ZstdCompressor(options=wide)
        content = compressor.compress(content[:cut]) + compressor.flush() + zstd.compress(content[cut:])
    path.write_bytes(content)


def build(out, *arguments, held_out=()):
    fixed = ["--tokenizer", "tokenizer.json", "--workers", "1", "--name", "c", *held_out]
    return main(["build", "--out", out, *arguments, *fixed])


def test_a_validation_split_is_held_out(workspace, capsys):
    train, held, test = make_documents(1, 40), make_documents(2, 5), make_documents(3, 5)
    write("h/train.jsonl.zst", [*train, held[1]])
    write("h/validation.jsonl.zst", held)
    write("h/test.jsonl.zst", test)
    assert build("c", "--source", "hub:h@text") == 0
    assert (
        "note: hub:h: reads train (1 file), validation (1 file); leaves out test (1 file)\n" in capsys.readouterr().err
    )
    assert texts("c") == sorted(normal(text) for text in {*train, *held})
    assert Corpus.open("c", "validation").num_documents == 5
    manifest = json.loads(pathlib.Path("c/corpus.json").read_text())
    assert [one["spec"] for one in manifest["sources"]] == ["hub:h:default:validation@text", "hub:h@text"]
    assert manifest["dropped"]["duplicate_documents"]["documents"] == 1, "of the text to train on"
    # The same as by hand, and in other files.
    write("p/data/train-00000-of-00001.parquet", [*train, held[1]])
    write("p/data/dev-00000-of-00001.parquet", held)
    by_hand = ["--source", "jsonl:h/train*@text", "--validation-source", "jsonl:h/val*@text"]
    for index, words in enumerate((["--source", "hub:p@text"], by_hand)):
        assert build(f"other{index}", *words) == 0
        assert Corpus.open(f"other{index}").identity == Corpus.open("c").identity
    # A flag decides otherwise, and a second source has no such split.
    capsys.readouterr()
    assert build("d", "--source", "hub:h@text", held_out=["--validation-documents", "3"]) == 0
    assert "reads train (1 file); leaves out test (1 file), validation (1 file)" in capsys.readouterr().err
    assert texts("d") == sorted(normal(text) for text in {*train, held[1]})
    assert Corpus.open("d", "validation").num_documents == 3
    write("own.jsonl", test)
    both = ["--source", "jsonl:own.jsonl@text", "--source", "hub:h@text", "--language", "de", "--language", "is"]
    both += ["--license", "mit", "--license", "cc0-1.0"]
    assert build("e", *both) == 0
    manifest = json.loads(pathlib.Path("e/corpus.json").read_text())
    assert [*manifest["splits"]["validation"]["languages"]] == ["is"]
    assert [one["license"] for one in manifest["sources"]] == ["cc0-1.0", "mit", "cc0-1.0"]
    assert manifest["splits"]["validation"]["documents"] == 5
    words = ["--source", "hub:h@text", "--validation-source", "hub:h:default:test@text"]
    assert build("f", *words) == 0
    assert "reads test (1 file), train (1 file); leaves out validation (1 file)" in capsys.readouterr().err


@pytest.mark.slow
def test_two_workers_write_the_same_bytes(workspace):
    for shard in range(3):
        write(f"h/en/train-0000{shard}-of-00003.parquet", make_documents(shard, 300))
    write("h/en/validation-00000-of-00001.parquet", make_documents(7, 50))
    assert build("one", "--source", "hub:h@text") == 0
    assert (
        main(
            [
                "build",
                "--source",
                "hub:h@text",
                "--out",
                "two",
                "--tokenizer",
                "tokenizer.json",
                "--workers",
                "2",
                "--name",
                "c",
            ]
        )
        == 0
    )
    assert files("one") == files("two")


def test_what_is_not_here_is_said(workspace, capsys):
    write("h/en/train-00000-of-00003.jsonl", make_documents(1, 9))
    write("h/de/train-00000-of-00001.jsonl", make_documents(2, 9))
    write("h/extra.jsonl", [])
    pathlib.Path("h/.cache/huggingface/download").mkdir(parents=True)
    pathlib.Path("h/.cache/huggingface/download/x.incomplete").touch()
    assert build("c", "--source", "hub:h:en@text") == 0
    assert (
        "note: hub:h (of 2 configurations, en): reads train (1 file); 1 data files belong to no split; 2 shards of"
        " train are not here; the download was interrupted (1 .incomplete in .cache)\n"
    ) in capsys.readouterr().err


def test_bad_folders_are_one_line(workspace, capsys):
    write("two/a/train.jsonl", ["One."])
    write("two/b/train.jsonl", ["Two."])
    write("eval/test.jsonl", ["One."])
    write("lfs/train-1.jsonl", make_documents(1, 90))
    write("cut/train.jsonl.zst", make_documents(1, 90))
    for place in (
        "csv/train.csv",
        "both/train.csv",
        "cache/snapshots/ab12/train.jsonl",
        "none/a.py",
        "data/dev-test.json",
    ):
        pathlib.Path(place).parent.mkdir(parents=True)
        pathlib.Path(place).write_text("x")
    write("both/train.jsonl", ["One."])
    pathlib.Path("lfs/train-2.jsonl").write_bytes(POINTER)
    cut = pathlib.Path("cut/train.jsonl.zst").read_bytes()
    pathlib.Path("cut/train.jsonl.zst").write_bytes(cut[:-9])
    for name, header in (
        ("yaml", "configs: ["),
        ("form", "configs: 3"),
        ("glob", "configs: [{data_files: [1]}]"),
        *HOSTILE,
    ):
        write(f"{name}/train.jsonl", ["One."])
        pathlib.Path(f"{name}/README.md").write_text(f"---\n{header}\n---\n")
    for spec, message in (
        ("hub:two", "write hub:FOLDER[:CONFIG[:SPLIT]]@FIELD"),
        ("hub:two@text", "has several configurations, a, b; name one, as in hub:FOLDER:a@FIELD"),
        ("hub:two:c@text", "no configuration 'c' with files; there are: a, b"),
        ("hub:eval@text", "no split 'train'; there are: test; name one as in hub:FOLDER:CONFIG:SPLIT@FIELD"),
        ("hub:eval:default:dev@text", "no split 'dev'; there are: test"),
        ("hub:absent/set@text", "no folder absent/set; `hf download REPOSITORY --repo-type dataset --local-dir"),
        (
            "hub:lfs@text",
            "1 of 2 files are pointers of Git LFS without their content, e.g. train-2.jsonl; run `git lfs",
        ),
        ("hub:cut@text", "cut/train.jsonl.zst: truncated, its .zst data has no end"),
        ("hub:csv@text", "its files are .csv, e.g. train.csv, not .parquet or .jsonl alone"),
        ("hub:both@text", "its files are .csv and .jsonl, e.g. train.csv, not"),
        ("hub:cache@text", "cache is a cache of the Hub; write hub:cache/snapshots/REVISION, with the REVISION ab12"),
        ("hub:none@text", "none has no data files; there is .py (1)"),
        ("hub:data@text", "data/README.md: dev-test.json names the splits validation and test, and its header has"),
        ("hub:yaml@text", "yaml/README.md: its header is not YAML"),
        ("hub:form@text", "form/README.md: configs in its header must be a list"),
        ("hub:glob@text", "glob/README.md: data_files in its header must be globs"),
        ("hub:bool@text", "bool/README.md: its header is not YAML"),
        ("hub:int@text", "int/README.md: its header is not YAML"),
        ("hub:time@text", "time/README.md: its header is not YAML"),
        ("hub:bomb@text", "bomb/README.md: its header is not YAML (a mapping has more than 10,000 entries)"),
        ("hub:stars@text", "stars/README.md: data_files in its header has a glob that is none ('**' is not alone"),
        ("hub:twice@text", "twice/README.md: data_files in its header has the split train twice"),
        ("hub:eval:default:test@txt", "no field 'txt', did you mean 'text'"),
        (
            "text:lfs/train-2.jsonl",
            "lfs/train-2.jsonl: is a pointer of Git LFS without the content; run `git lfs pull`",
        ),
        ("hub:zz://two@text", "zz:// is not supported"),
    ):
        capsys.readouterr()
        assert build("c", "--source", spec) == 2, spec
        captured = capsys.readouterr()
        assert captured.err.count("error:") == 1 and message in captured.err and not captured.out, captured.err


def test_a_folder_may_have_a_name_like_a_glob(workspace):
    write("[a]/train.jsonl", make_documents(1, 3))
    source = dataclasses.replace(sources.parse("hub:[a]@text"), block_bytes=1000)
    assert [part.paths for part in source.inputs()] == [("[a]/train.jsonl",)]


def test_a_folder_in_a_store(workspace):
    bucket = memory_store()
    for name, content in (("README.md", b"---\nconfigs:\n- data_files: data/t*\n---\n"), ("data/train-1.json", b"{}")):
        (bucket / "h" / name).write_bytes(content)
    source = sources.parse(f"hub:{bucket}/h:default:train@text")
    assert [part.paths for part in source.inputs()] == [(f"{bucket}/h/data/train-1.json",)]
    with pytest.raises(UserError, match=r"there is no folder .*/absent"):
        sources.parse(f"hub:{bucket}/absent@text")
