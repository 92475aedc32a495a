"""What differs between disks and object stores, and what a user hears when a store does not answer."""

import concurrent.futures
import hashlib
import os
from pathlib import Path

import pytest
from etils import epath

from bert_jax import storage
from bert_jax.cli import main as cli
from bert_jax.errors import UserError, install_command
from tests.stores import MemoryStore, memory_store, tree


@pytest.fixture
def bucket():
    return memory_store()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BERT_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_paths_keep_their_slashes():
    assert storage.path("a//b") == Path("a/b") and isinstance(storage.path(Path("a")), Path)
    for text in ("gs://b/c", "s3://b/c"):
        place = storage.path(text)
        assert str(place) == text and str(place / "d") == f"{text}/d" and storage.path(place) == place
        assert storage.is_remote(place) and not storage.is_remote(Path("a"))
    with pytest.raises(UserError, match="http:// is no store that can be used: write gs://BUCKET"):
        storage.path("http://a/b")


def test_a_file_is_whole_with_many_writers(tmp_path):
    path = epath.Path(tmp_path / "file")
    contents = [bytes([letter]) * 20_000 for letter in b"abcd"]

    def write_often(content):
        for _ in range(50):
            storage.write_whole(path, content)
            assert path.read_bytes() in contents

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(write_often, contents))
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_store_gets_a_whole_file_by_one_write(bucket):
    storage.write_whole(bucket / "a" / "file", b"1")
    storage.write_whole(bucket / "a" / "file", b"23")
    assert (bucket / "a" / "file").read_bytes() == b"23"
    assert MemoryStore.written == ["bucket/a/file"] * 2


def test_nothing_is_made_where_names_are_all_there_is(bucket, tmp_path):
    storage.make_directory(bucket / "a" / "b")
    assert tree(bucket) == {}
    storage.make_directory(tmp_path / "a" / "b")
    storage.make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_trees_go_there_and_back(bucket, tmp_path):
    (tmp_path / "from" / "deep" / "er").mkdir(parents=True)
    for name in ("one", "deep/two", "deep/er/three", "deep/er/none"):
        (tmp_path / "from" / name).write_bytes(b"" if name.endswith("none") else os.urandom(3_000_000))
    storage.copy_tree(tmp_path / "from", bucket / "x")
    storage.copy_tree(bucket / "x", tmp_path / "to")
    assert tree(bucket / "x") == tree(tmp_path / "from") == tree(tmp_path / "to") and len(tree(tmp_path / "to")) == 4


def test_staged(bucket, tmp_path):
    """On disk the place itself, in a store a directory of this host, unless the library knows the store."""
    for target, known in ((tmp_path / "x", ()), (bucket / "x", ("az",))):
        staged = storage.Staged(target, known)
        assert str(staged.directory) == str(target)
        staged.send()
        staged.close()
    assert tree(bucket) == {} and not (tmp_path / "x").exists()
    staged = storage.Staged(bucket / "x")
    (staged.directory / "file").write_text("1")
    assert tree(bucket) == {}
    staged.send()
    assert tree(bucket) == {"x/file": b"1"}
    staged.close()
    assert not staged.directory.exists()


def test_fetched(bucket, tmp_path):
    (bucket / "x" / "file").write_text("1")
    with storage.fetched(bucket / "x") as local:
        assert not storage.is_remote(local) and tree(local) == {"file": b"1"}
    assert not local.exists()
    for source, known in ((tmp_path, ()), (bucket / "x", ("az",))):
        with storage.fetched(source, known) as same:
            assert str(same) == str(source)


def test_a_file_is_copied_once_per_host(bucket, cache):
    content = os.urandom(10_000_000)
    sha256 = hashlib.sha256(content).hexdigest()
    (bucket / "shard").write_bytes(content)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        (local,) = set(pool.map(lambda _: storage.on_this_host(bucket / "shard", sha256), range(8)))
    assert Path(local).read_bytes() == content and Path(local).parent == cache
    (bucket / "shard").unlink()
    assert storage.on_this_host(bucket / "elsewhere", sha256) == local
    assert storage.on_this_host(Path("here"), sha256) == "here"


def test_what_is_damaged_is_not_kept(bucket, cache):
    sha256 = hashlib.sha256(b"good").hexdigest()
    (bucket / "shard").write_bytes(b"bad")
    with pytest.raises(UserError, match="az://bucket/shard: damaged, its SHA-256 is not the recorded one"):
        storage.on_this_host(bucket / "shard", sha256)
    (bucket / "shard").write_bytes(b"good")
    assert Path(storage.on_this_host(bucket / "shard", sha256)).read_bytes() == b"good"
    with pytest.raises(FileNotFoundError):
        storage.on_this_host(bucket / "nothing", "0" * 64)


def said(capfd, *arguments: str) -> str:
    assert cli.main(list(arguments)) == 2
    captured = capfd.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ") and captured.out == "" and len(line) < 400
    return line


COMMANDS = {
    "pretrain": ["pretrain", "bert_tiny", "--corpus", "{}", "--workdir", "run"],
    "workdir": ["pretrain", "bert_tiny", "--corpus", "corpus", "--workdir", "{}"],
    "weight": ["pretrain", "bert_tiny", "--corpus", "{}=2", "--workdir", "run"],
    "evaluate": ["evaluate", "{}", "--corpus", "corpus"],
    "fill-mask": ["fill-mask", "{}", "a [MASK]"],
    "convert": ["convert", "{}", "export"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bucket_that_is_not_there(bucket, tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    words = [word.format("az://bucked/run") for word in COMMANDS[name]]
    line = said(capfd, *words)
    assert line.startswith("error: az://bucked/run")
    assert ": there is no bucket 'bucked', or you may not see it: make it first" in line
    assert not list(tmp_path.iterdir()) and not MemoryStore.written


@pytest.mark.parametrize("package", [("gcsfs", "gcs", "gs"), ("s3fs", "s3", "s3")])
def test_a_package_that_is_missing(monkeypatch, package, tmp_path, capfd):
    module, extra, scheme = package
    monkeypatch.chdir(tmp_path)

    def missing(name, **_):
        raise ImportError(f"install {name}")

    monkeypatch.setattr("fsspec.filesystem", missing)
    if scheme == "s3":
        monkeypatch.setattr("etils.epath.backend.fsspec_backend._get_filesystem", missing)
    line = said(capfd, "evaluate", f"{scheme}://bucket/run", "--corpus", "corpus")
    assert f"{scheme}://bucket/run needs the package {module}, which is missing: {install_command(extra)}" in line


def test_trouble_is_told_from_bugs(monkeypatch, capfd):
    class LostError(Exception):
        """As a store's library would raise it."""

    LostError.__module__ = "botocore.exceptions"
    error = OSError("translated")
    error.__cause__ = LostError("connection closed")
    for one in (LostError("connection closed"), error):
        assert "the object store cannot be reached (" in storage.trouble(one)
        monkeypatch.setitem(cli.COMMANDS, "evaluate", (None, lambda _, one=one: (_ for _ in ()).throw(one)))
        assert "the same command goes on where this one stopped" in said(capfd, "evaluate")
    assert storage.trouble(OSError("a disk")) is None and storage.trouble(ValueError()) is None
