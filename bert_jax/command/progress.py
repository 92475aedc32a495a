"""Progress bars with an ETA, for everything that takes longer than a second."""

import sys

import tqdm


class _ProgressBar(tqdm.tqdm):
    def refresh(self, nolock: bool = False, lock_args: tuple | None = None) -> bool | None:
        """Draw the bar. tqdm 4.70 keeps its lock if writing fails, as to a file on a full disk: other threads would
        wait for ever."""
        del lock_args
        if nolock:
            return super().refresh(nolock=True)
        with self.get_lock():
            return super().refresh(nolock=True)


def progress_bar(description: str, total: float | None, unit: str, *, done: int = 0, shown: bool = True) -> tqdm.tqdm:
    """Return a progress bar on stderr; call ``update(n)`` on it and close it, or use it in a ``with``.

    On a terminal the bar redraws itself; in a log file it writes one line about every 10 seconds instead.

    Args:
      description: of the work, in two or three words.
      total: number of units; None if it is unknown, then there is no ETA.
      unit: name of one unit, e.g. ``step``; ``B`` scales to kB, MB and GB.
      done: units that are done already; they do not count for the rate and the ETA.
      shown: False turns the output off; of several processes only one shows a bar.
    """
    live = sys.stderr.isatty()
    layout = (
        "{desc}: {percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} [{elapsed}, ETA {remaining}, {rate_fmt}{postfix}]"
    )
    return _ProgressBar(
        desc=description,
        disable=not shown,
        total=total,
        initial=done,
        unit=unit,
        unit_scale=unit == "B",
        bar_format=(layout if live else layout + "\n") if total else None,
        mininterval=0.2 if live else 10.0,
        miniters=1,
        dynamic_ncols=live,
        file=sys.stderr,
    )


def print_line(text: str, bar: tqdm.tqdm) -> None:
    """Print one line on stderr; on a terminal it appears above the bar."""
    if sys.stderr.isatty():
        bar.write(text, file=sys.stderr)
    else:
        print(text, file=sys.stderr, flush=True)
