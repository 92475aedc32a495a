"""Notices with which a cloud announces that it takes a machine away: this process then gets SIGTERM, and saves.

A thread asks the metadata server of the machine every `INTERVAL` seconds. Google Cloud changes
``instance/preempted`` when it preempts a Spot VM, and ``instance/maintenance-event`` 60 seconds before it ends a VM
with accelerators (cloud.google.com/compute/docs/metadata/getting-live-migration-notice); AWS has
``spot/instance-action`` two minutes before it takes a Spot instance. Slurm and Kubernetes send SIGTERM themselves.
"""

import contextlib
import http.client
import json
import os
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable

INTERVAL = 5.0
"""Seconds between two questions."""
TIMEOUT = 2.0
"""Seconds to wait for an answer."""
_LONGEST_ANSWER = 4096


class NoticeServerError(Exception):
    """The metadata server does not answer, or not as a metadata server."""


def watch_for_notice(cloud: str) -> None:
    """Start the thread, which sends SIGTERM to this process once; for "none" there is no thread.

    A notice that is there at the start is reported and ignored, as it is old or wrong: the run would never train. So is
    a server that does not answer; the thread continues to ask it. "The start" is the first answer.

    Args:
      cloud: `ClusterConfig.notices`.
    """
    if cloud != "none":
        threading.Thread(target=_watch, args=[cloud, time.sleep], daemon=True).start()


def _watch(cloud: str, wait: Callable[[float], object]) -> None:
    ask, ignored, first, complained = CLOUDS[cloud], "", True, False
    while True:
        try:
            notice = ask()
        except NoticeServerError as error:
            if not complained:
                _print(f"warning: --cluster.notices {cloud}: {error}; the run goes on, and asks again")
            complained = True
        else:
            is_old, first = first and bool(notice), False
            if is_old:
                _print(f"warning: --cluster.notices {cloud}: {notice} was there at the start, and is ignored")
                ignored = notice
            elif notice != ignored:
                ignored = ""
                if notice:
                    os.kill(os.getpid(), signal.SIGTERM)
                    _print(f"note: {notice}: this machine is taken away; saving and stopping")
                    return
        wait(INTERVAL)


def ask_google() -> str:
    """The notice of Google Cloud, as in "instance/preempted TRUE"; "" if there is none.

    The host is that of the environment variable GCE_METADATA_HOST, as for Google's libraries.

    Raises:
      NoticeServerError: no answer, or not one of these values.
    """
    host, failure = os.environ.get("GCE_METADATA_HOST") or "metadata.google.internal", None
    for name, silent, known in (
        ("preempted", ("FALSE",), ("TRUE",)),
        ("maintenance-event", ("NONE", "MIGRATE_ON_HOST_MAINTENANCE"), ("TERMINATE_ON_HOST_MAINTENANCE",)),
    ):
        url = f"http://{host}/computeMetadata/v1/instance/{name}"
        try:
            value = _get(url, {"Metadata-Flavor": "Google"})
        except NoticeServerError as error:
            failure = failure or error
            continue
        if value in known:
            return f"instance/{name} {value}"
        if value not in silent:
            expected = ", ".join((*silent, *known))
            failure = failure or NoticeServerError(f"{url} answers {value[:40]!r}, which is none of {expected}")
    if failure is not None:
        raise failure
    return ""


def ask_aws() -> str:
    """The notice of AWS, as in "spot/instance-action terminate"; "" if there is none.

    The endpoint is that of the environment variable AWS_EC2_METADATA_SERVICE_ENDPOINT, as for the AWS SDKs.

    Raises:
      NoticeServerError: no answer, or not one of an instance metadata service.
    """
    endpoint = (os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT") or "http://169.254.169.254").rstrip("/")
    token = _get(f"{endpoint}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": "60"}, "PUT")
    url = f"{endpoint}/latest/meta-data/spot/instance-action"
    value = _get(url, {"X-aws-ec2-metadata-token": token}, missing="{}")
    try:
        action = json.loads(value).get("action", "")
    except (ValueError, AttributeError, RecursionError):
        action = None
    if action not in ("", "hibernate", "stop", "terminate"):
        raise NoticeServerError(f"{url} answers {value[:40]!r}, which has no action that AWS names")
    return action and f"spot/instance-action {action}"


CLOUDS = {"gcp": ask_google, "aws": ask_aws}


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: object) -> None:
        """A metadata server does not redirect: the code of the answer is an error."""


def _get(url: str, headers: dict[str, str], method: str = "GET", missing: str | None = None) -> str:
    """The answer; `missing` if there is no such entry. Metadata servers are not reached through a proxy."""
    try:
        request = urllib.request.Request(url, headers=headers, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
        with opener.open(request, timeout=TIMEOUT) as answer:
            return answer.read(_LONGEST_ANSWER).decode("ascii", "replace").strip()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 404 and missing is not None:
            return missing
        raise NoticeServerError(f"{url} answers with code {error.code}") from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise NoticeServerError(f"{url} does not answer ({ascii(str(reason))[1:-1][:80]})") from error


def _print(line: str) -> None:
    with contextlib.suppress(OSError):  # the reader of the messages is gone
        print(line, file=sys.stderr, flush=True)
