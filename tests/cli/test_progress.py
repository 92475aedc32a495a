"""Progress bars."""

import threading

import pytest

from bert_jax.command.progress import progress_bar


def test_a_pipe_that_nobody_reads_stops_no_other_thread(monkeypatch):
    """A thread that could not draw the bar kept the lock of all bars, and the command waited for ever."""

    class Closed:
        def write(self, _text):
            raise BrokenPipeError

        def flush(self):
            pass

        def isatty(self):
            return False

    def draw():
        with pytest.raises(BrokenPipeError):
            bar.refresh()
        failed.append(True)

    failed = []
    with progress_bar("reading", 10, "B") as bar:
        monkeypatch.setattr(bar, "fp", Closed())
        monkeypatch.setattr(bar, "sp", lambda _text: Closed().write(""))
        thread = threading.Thread(target=draw)
        thread.start()
        thread.join()
        bar.disable = True  # closing it would need the lock
        assert failed
        for lock in bar.get_lock().locks:
            assert lock.acquire(False), "the thread has left it locked"
            lock.release()
