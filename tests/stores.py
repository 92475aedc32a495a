"""An object store in memory, with nothing that real ones do not have, and a real protocol on this machine.

epath's `az://` stands for the one in memory, so that no test of it can reach a network; `s3://` is moto's server.
"""

import contextlib
import io
import logging
import os
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import fsspec
import pytest
from etils import epath


class MemoryStore(fsspec.AbstractFileSystem):
    """Names and whole objects. No directories, no appending, no renaming, no copying within the store."""

    protocol = "az"
    cachable = False
    buckets: set[str] = set()  # noqa: RUF012 (the store is one)
    objects: dict[str, bytes] = {}  # noqa: RUF012
    written: list[str] = []  # noqa: RUF012
    lock = threading.RLock()

    @classmethod
    def empty(cls) -> None:
        """Only the bucket is left."""
        cls.buckets, cls.objects, cls.written = {"bucket"}, {}, []

    def info(self, path, **_):
        path = self._strip_protocol(path)
        with self.lock:
            if path in self.objects:
                content = self.objects[path]
                return {"name": path, "size": len(content), "type": "file", "ETag": f'"{zlib.crc32(content)}"'}
            if path in self.buckets or any(name.startswith(f"{path}/") for name in self.objects):
                return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path, detail=True, **_):
        path = self._strip_protocol(path)
        if self.info(path)["type"] == "file":
            found = {path}
        else:
            with self.lock:
                inside = [name for name in self.objects if name.startswith(f"{path}/")]
            found = {"/".join(name.split("/")[: path.count("/") + 2]) for name in inside}
        return [self.info(name) for name in sorted(found)] if detail else sorted(found)

    def _open(self, path, mode="rb", **_):
        path = self._strip_protocol(path)
        if mode == "rb":
            self.info(path)
            return io.BytesIO(self.objects[path])
        assert mode == "wb", "objects cannot grow"
        if path.split("/")[0] not in self.buckets:
            raise FileNotFoundError(path)
        return _Upload(self, path)

    def put_whole(self, path: str, content: bytes) -> None:
        with self.lock:
            self.objects[path] = content
            self.written.append(path)

    def rm(self, path, recursive=False, **_):
        path = self._strip_protocol(path)
        with self.lock:
            self.info(path)
            gone = [n for n in self.objects if n == path or (recursive and n.startswith(f"{path}/"))]
            for name in gone:
                del self.objects[name]

    def mkdir(self, path, **_):
        raise AssertionError("a store may make a bucket of this")

    makedirs = mkdir

    def mv(self, path1, path2, **_):
        raise AssertionError("nothing may be renamed")

    rename = move = cp_file = copy = mv


class _Upload(io.BytesIO):
    def __init__(self, store: MemoryStore, path: str):
        super().__init__()
        self._store, self._path = store, path

    def close(self) -> None:
        try:
            if not self.closed:
                self._store.put_whole(self._path, self.getvalue())
        finally:  # or the garbage collector closes it again
            super().close()


def memory_store() -> epath.Path:
    """An empty bucket."""
    fsspec.register_implementation("az", MemoryStore, clobber=True)
    MemoryStore.empty()
    return epath.Path("az://bucket")


class Request(NamedTuple):
    """What a server was asked."""

    method: str
    path: str
    copies: bool
    """whether it was to copy an object of its own, which is what renaming is made of"""


@contextlib.contextmanager
def s3_server() -> Iterator[tuple[str, list[Request]]]:
    """moto's server in a thread: its address, and what it has been asked so far."""
    from moto.moto_server import threaded_moto_server

    requests: list[Request] = []

    class Watched(threaded_moto_server.DomainDispatcherApplication):
        def __call__(self, environ, start_response):
            copies = "HTTP_X_AMZ_COPY_SOURCE" in environ
            requests.append(Request(environ["REQUEST_METHOD"], environ["PATH_INFO"], copies))
            return super().__call__(environ, start_response)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threaded_moto_server, "DomainDispatcherApplication", Watched)
        patch.setattr(logging.getLogger("werkzeug"), "disabled", True)
        server = threaded_moto_server.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
        server.start()
        yield "http://{}:{}".format(*server.get_host_and_port()), requests
        server.stop()


def use_s3(monkeypatch: pytest.MonkeyPatch, address: str, bucket: str) -> epath.Path:
    """Make a bucket, which this process and those it starts will find."""
    import s3fs

    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings = {"ENDPOINT_URL": address, "ACCESS_KEY_ID": "key", "SECRET_ACCESS_KEY": "secret"}
    settings |= {"DEFAULT_REGION": "us-east-1", "EC2_METADATA_DISABLED": "true", "CONFIG_FILE": os.devnull}
    for name, value in settings.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    # A thread of an earlier test may have made a file system for an address that is gone; the cache ignores variables.
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir(bucket)
    return epath.Path(f"s3://{bucket}")


def tree(place: Path | epath.Path) -> dict[str, bytes]:
    """All files below a directory, by name."""
    found = {}
    for entry in place.iterdir():
        if entry.is_dir():
            found |= {f"{entry.name}/{name}": content for name, content in tree(entry).items()}
        else:
            found[entry.name] = entry.read_bytes()
    return found
