"""Differences between disks and object stores, and the errors for a store that cannot be reached."""

import concurrent.futures
import os
from pathlib import Path

import pytest
from etils import epath

from bert_jax.cli import main as cli
from bert_jax.errors import TRY_AGAIN, UserError, install_command
from bert_jax.storage.failures import describe_error
from bert_jax.storage.files import StagedDirectory, copy_tree, download_if_needed, make_directory_if_local, write_atomic
from bert_jax.storage.paths import is_remote, to_path
from tests.stores import MemoryStore, memory_store, tree


@pytest.fixture
def bucket():
    return memory_store()


def test_paths_keep_their_slashes():
    assert to_path("a//b") == Path("a/b") and isinstance(to_path(Path("a")), Path)
    for text in ("gs://b/c", "s3://b/c"):
        path = to_path(text)
        assert str(path) == text and str(path / "d") == f"{text}/d" and to_path(path) == path
        assert is_remote(path) and not is_remote(Path("a"))
    with pytest.raises(UserError, match="http:// is not supported: write gs://BUCKET"):
        to_path("http://a/b")


def test_writes_are_atomic_with_many_writers(tmp_path):
    path = epath.Path(tmp_path / "file")
    contents = [bytes([letter]) * 20_000 for letter in b"abcd"]

    def write_often(content):
        for _ in range(50):
            write_atomic(path, content)
            assert path.read_bytes() in contents

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(write_often, contents))
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_a_store_gets_one_write_per_file_and_no_directories(bucket, tmp_path):
    make_directory_if_local(bucket / "a" / "b")
    assert tree(bucket) == {}
    for content in (b"1", b"23"):
        write_atomic(bucket / "a" / "file", content)
    assert (bucket / "a" / "file").read_bytes() == b"23"
    assert MemoryStore.written == ["bucket/a/file"] * 2
    for _ in range(2):
        make_directory_if_local(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_copy_tree_to_a_store_and_back(bucket, tmp_path):
    (tmp_path / "from" / "deep" / "er").mkdir(parents=True)
    for name in ("one", "deep/two", "deep/er/three", "deep/er/none"):
        (tmp_path / "from" / name).write_bytes(b"" if name.endswith("none") else os.urandom(3_000_000))
    copy_tree(tmp_path / "from", bucket / "x")
    copy_tree(bucket / "x", tmp_path / "to")
    assert tree(bucket / "x") == tree(tmp_path / "from") == tree(tmp_path / "to") and len(tree(tmp_path / "to")) == 4


@pytest.mark.parametrize("native", [("az",), ()])
def test_directories_for_libraries_that_need_a_disk(bucket, tmp_path, native):
    """On disk, and in a store that is native to the library, the directory itself; otherwise a temporary copy."""
    (bucket / "x" / "file").write_text("1")
    for place in (bucket / "x", tmp_path):
        staged, is_itself = StagedDirectory(place, native), place == tmp_path or bool(native)
        assert (str(staged.directory) == str(place)) == is_itself
        with download_if_needed(place, native) as local:
            assert (str(local) == str(place)) == is_itself
            assert is_itself or (not is_remote(local) and tree(local) == {"file": b"1"})
        assert local.exists() == is_itself
        (staged.directory / "new").write_text("2")
        assert (place / "new").exists() == is_itself
        staged.upload()
        assert (place / "new").read_text() == "2"
        staged.close()
        assert staged.directory.exists() == is_itself
        (place / "new").unlink()


def error_of(capfd, *arguments: str) -> str:
    assert cli.main(list(arguments)) == 2
    captured = capfd.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ") and captured.out == "" and len(line) < 400
    return line


COMMANDS = {
    "pretrain": ["pretrain", "bert_tiny", "--corpus", "{}", "--workdir", "run"],
    "workdir": ["pretrain", "bert_tiny", "--corpus", "corpus", "--workdir", "{}"],
    "convert": ["convert", "{}", "export"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_missing_bucket(bucket, tmp_path, monkeypatch, capfd, name):
    monkeypatch.chdir(tmp_path)
    words = [word.format("az://bucked/run") for word in COMMANDS[name]]
    line = error_of(capfd, *words)
    assert line.startswith("error: az://bucked/run")
    assert ": there is no bucket 'bucked', or you have no permission to list it: create it first" in line
    assert not list(tmp_path.iterdir()) and not MemoryStore.written


@pytest.mark.parametrize("package", [("gcsfs", "gcs", "gs"), ("s3fs", "s3", "s3")])
def test_a_missing_package(monkeypatch, package, tmp_path, capfd):
    module, extra, scheme = package
    monkeypatch.chdir(tmp_path)

    def missing(name, **_):
        raise ImportError(f"install {name}")

    monkeypatch.setattr("fsspec.core.url_to_fs", missing)
    line = error_of(capfd, "evaluate", f"{scheme}://bucket/run", "--corpus", "corpus")
    assert f"{scheme}://bucket/run needs the package {module}, which is missing: {install_command(extra)}" in line


def library(name: str):
    """A module of the extra `s3`, which the quick tests do not install."""
    return pytest.importorskip(name)


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (lambda: library("botocore.exceptions").EndpointConnectionError(endpoint_url="http://store"), TRY_AGAIN),
        (lambda: library("aiohttp").ServerTimeoutError("slow"), TRY_AGAIN),
        (lambda: library("botocore.exceptions").NoCredentialsError(), 2),
        (lambda: PermissionError("forbidden"), 2),
    ],
)
def test_a_store_that_is_away_may_come_back(bucket, tmp_path, monkeypatch, capfd, raised, code):
    """At the start of a run, too; credentials and permissions are the user's."""

    cause = raised()

    def fail(*_, **__):
        raise OSError("translated") from cause

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MemoryStore, "ls", fail)
    monkeypatch.setattr(MemoryStore, "info", fail)
    assert cli.main([word.format("az://bucket/run") for word in COMMANDS["workdir"]]) == code
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("error: az://bucket/run cannot be reached (")


def test_storage_errors_are_told_from_bugs(monkeypatch, capfd):
    class LostError(Exception):
        """As a store's library would raise it."""

    LostError.__module__ = "botocore.exceptions"
    error = OSError("translated")
    error.__cause__ = LostError("connection closed")
    for one in (LostError("connection closed"), error):
        assert "the object store cannot be reached (" in describe_error(one)
        monkeypatch.setitem(cli.PARSED, "evaluate", lambda _, one=one: (_ for _ in ()).throw(one))
        assert cli.main(["evaluate"]) == TRY_AGAIN
        assert "the same command continues where this one stopped" in capfd.readouterr().err
    assert describe_error(OSError("a disk")) is None and describe_error(ValueError()) is None
