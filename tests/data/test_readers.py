"""Reader threads and processes: what they read, how their errors are raised, and that they exit."""

import gc
import itertools
import multiprocessing
import re
import shutil
import threading
import time
from pathlib import Path

import pytest

from bert_jax import config as config_lib
from bert_jax.data.batches import TrainingStream
from bert_jax.data.corpus import Corpus
from bert_jax.data.cursor import Cursor
from bert_jax.errors import UserError
from tests.data.test_batches import assert_same_batches


@pytest.fixture
def make(tiny_corpus, special_ids, two_phases):
    def make_stream(processes):
        config = config_lib.replace(two_phases, data={"reader_processes": processes})
        return TrainingStream([Corpus.open(tiny_corpus)], [1.0], config, special_ids)

    return make_stream


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_damaged_record_names_its_document(tmp_path, tiny_corpus, special_ids, two_phases, processes):
    """Raised by readers, threads or processes, where the loop asks for the batch."""
    shutil.copytree(tiny_corpus, tmp_path / "corpus")
    (shard,) = tmp_path.glob("corpus/*train*array_record*")
    raw = bytearray(shard.read_bytes())
    raw[5000:5024] = bytes(24)  # in the middle of one record
    shard.write_bytes(raw)
    config = config_lib.replace(two_phases, data={"reader_processes": processes})
    stream = TrainingStream([Corpus.open(tmp_path / "corpus")], [1.0], config, special_ids)
    with pytest.raises(UserError) as caught:
        list(stream.batches(Cursor()))
    message = str(caught.value)
    assert re.search(r"damaged at record \d+, document \d+ of split 'train' .*; copy the corpus", message)
    assert "\n" not in message
    assert not multiprocessing.active_children()


def test_threads_end_with_their_iterator(make):
    """Neither a finished, nor a dropped, nor a never started iterator leaves a thread."""
    list(make(0).batches(Cursor()))
    gc.collect()
    time.sleep(0.3)
    before = set(threading.enumerate())
    half_read = make(0).batches(Cursor())
    next(half_read)
    assert set(threading.enumerate()) - before  # there are threads to leak
    finished = make(0).batches(Cursor())
    list(finished)
    untouched = make(0).batches(Cursor())
    del half_read, finished, untouched
    gc.collect()
    deadline = time.monotonic() + 60
    while set(threading.enumerate()) - before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not set(threading.enumerate()) - before


def shared_memory(process: int | str) -> set[Path]:
    """Files of shared memory that a process has mapped; other tests run beside and before this one, with their own."""
    words = [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{process}/maps").read_text().splitlines()]
    return {Path(word) for word in words if word.startswith("/dev/shm/") and "(deleted)" not in word}


@pytest.mark.slow
def test_processes_change_nothing_and_end(make):
    whole, before = list(make(0).batches(Cursor())), shared_memory("self")
    resumed = make(2).batches(whole[3].next_cursor)
    assert_same_batches(whole[4:10], itertools.islice(resumed, 6))
    readers = multiprocessing.active_children()
    assert len(readers) == 2  # there are processes to leak
    shared = set().union(*(shared_memory(process) for process in ("self", *(reader.pid for reader in readers))))
    resumed.close()
    assert not multiprocessing.active_children()
    gc.collect()  # semaphores are removed with the last reference to them
    assert not [path for path in shared - before if path.exists()]
