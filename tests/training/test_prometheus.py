"""The metrics of a run over HTTP, as OpenMetrics; what is in the way costs one line, and no run changes."""

import dataclasses
import json
import re
import socket
import types
import urllib.request

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from bert_jax.config import LogConfig
from bert_jax.training.monitoring import prometheus
from bert_jax.training.monitoring.prometheus import OWN, PREFIX, PrometheusServer
from bert_jax.training.run_directory.checkpoint import Checkpoints
from bert_jax.training.run_directory.goodput import GoodputRecorder
from bert_jax.training.run_directory.ledger import Ledger
from bert_jax.training.run_directory.metrics import read_metrics
from tests.distributed.peers import free_port
from tests.pages import ROOT
from tests.runs import assert_same_run

DASHBOARD = ROOT / "docs" / "monitoring" / "grafana.json"


def read(port: int) -> dict[str, dict[tuple, float]]:
    """The samples of a page by name and labels, read by the parser of the library."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert "openmetrics-text" in answer.headers["Content-Type"]
        text = answer.read().decode()
    found: dict[str, dict[tuple, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


@pytest.fixture
def serve(plain_config, tmp_path, monkeypatch):
    """A server with a recorder of time, on a port; its devices report their memory."""
    memory = {"bytes_in_use": 3.0, "peak_bytes_in_use": 4.0, "bytes_limit": 5.0, "num_allocs": 6.0}
    device = types.SimpleNamespace(id=0, memory_stats=lambda: memory)
    monkeypatch.setattr(prometheus.jax, "local_devices", lambda: [device])

    saves = Checkpoints(tmp_path / "checkpoints", keep=1)
    saves.newest = 4, 1e9

    def make(port: int | None) -> PrometheusServer:
        config = dataclasses.replace(plain_config, log=LogConfig(prometheus_port=port))
        made = PrometheusServer(config, tmp_path, Ledger(tmp_path / "ledger.jsonl"))
        made.begin_attempt(GoodputRecorder(tmp_path, 0.0), saves)
        return made

    with saves:
        yield make


LINE = {"loss": 2.5, "gradient_norm": 1.0, "gradient_norm/layer_00": 0.5, "skipped_steps": 1, "tokens_per_second": 99.0}


def test_the_page_has_every_value(serve):
    port = free_port()
    with serve(port) as server:
        server.show("train", {"loss": 9.0, "gone": 1.0})
        server.show("train", LINE)
        server.host_share = 0.25
        server.show("validation", {"mlm_loss": float("nan"), "mlm_loss/web text": 3.0})
        found = read(port)
    of_train, of_validation = (("split", "train"),), (("split", "validation"),)
    assert found["bert_jax_host_share"] == {(): 0.25}
    assert found["bert_jax_loss"] == {of_train: 2.5}
    assert found["bert_jax_gradient_norm"] == {of_train: 1.0, (("part", "layer_00"), *of_train): 0.5}
    assert found["bert_jax_mlm_loss"][("part", "web text"), *of_validation] == 3.0
    assert found["bert_jax_mlm_loss"][of_validation] != found["bert_jax_mlm_loss"][of_validation], "NaN"
    assert "bert_jax_gone" not in found
    assert found["bert_jax_checkpoint_step"] == {(): 4.0} and found["bert_jax_total_steps"] == {(): 8.0}
    assert found["bert_jax_checkpoint_timestamp_seconds"] == {(): 1e9}
    memory = {dict(labels)["kind"]: value for labels, value in found["bert_jax_device_memory_bytes"].items()}
    assert memory == {"in_use": 3.0, "peak": 4.0, "limit": 5.0}
    assert {dict(labels)["kind"] for labels in found["bert_jax_seconds_total"]} >= {"step", "data_wait", "checkpoint"}
    assert found["process_resident_memory_bytes"][()] > 1e6
    ((labels, one),) = found["bert_jax_run_info"].items()
    assert one == 1 and dict(labels)["config"] == "tiny"
    suffixes = {"seconds": "_total", "run": "_info"}
    assert {PREFIX + name + suffixes.get(name, "") for name in OWN} <= found.keys()
    with pytest.raises(OSError):
        read(port)


def test_names_that_clash_are_left_out_with_one_line(serve, capfd):
    port, line = free_port(), {"f1-score": 1.0, "f1_score": 2.0, "f1_score/a": 2.0, "step": 3.0, "seconds_total": 4.0}
    with serve(port) as server:
        for _ in range(2):
            server.show("train", line)
        found = read(port)
    assert found["bert_jax_f1_score"] == {(("split", "train"),): 1.0} and found["bert_jax_step"] == {(): 0.0}
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("warning: ") for line in lines)
    assert "does not get the metric f1_score: bert_jax_f1_score is the name of the metric f1-score" in lines[0]


@pytest.mark.parametrize("port", ["taken", 65536])
def test_a_port_that_cannot_be_had(serve, capfd, port, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1] if port == "taken" else port - 1
        monkeypatch.setattr(prometheus.jax, "process_index", lambda: int(port == 65535))
        with serve(port) as server:
            server.show("train", LINE)
    (line,) = capfd.readouterr().err.splitlines()
    assert re.match(r"warning: process \d cannot serve metrics on port \d+ \(.+\): set another log.prometheus", line)


def test_other_processes_show_what_is_theirs(serve, monkeypatch):
    port = free_port()
    monkeypatch.setattr(prometheus.jax, "process_index", lambda: 2)
    monkeypatch.setattr(prometheus, "is_first", lambda: False)
    with serve(port) as server:
        server.show("train", LINE)
        found = read(port + 2)
    own = {name for name in found if name.startswith(PREFIX)}
    assert own == {
        PREFIX + name for name in ["run_info", "total_steps", "device_memory_bytes", "step", "seconds_total"]
    }


def test_a_run_that_is_read_is_the_same_run(plain_config, train, tmp_path, capfd):
    """Also by a client that sends nothing: nobody waits for it."""
    port, pages = free_port(), []
    log = dataclasses.replace(plain_config.log, prometheus_port=port)
    silent = socket.socket()

    def look(count: int, inputs) -> None:
        if count == 2:
            silent.connect(("127.0.0.1", port))
        page = read(port)
        while count == 8 and "bert_jax_checkpoint_step" not in page:  # it is committed in the background
            page = read(port)
        pages.append(page)

    train(plain_config, tmp_path / "plain")
    with silent:
        train(dataclasses.replace(plain_config, log=log), tmp_path / "read", before_step=look)
    assert_same_run(tmp_path / "read", tmp_path / "plain", plain_config)
    assert [page["bert_jax_step"][()] for page in pages] == [*range(8)]
    values = [line for line in read_metrics(tmp_path / "read" / "metrics.jsonl") if line["split"] == "train"]
    shown = pages[-1]["bert_jax_loss"][("split", "train"),]
    assert shown == values[5]["loss"], "a line is one step late, as in the file"
    assert pages[-1]["bert_jax_checkpoint_step"] == {(): 4.0} and pages[-1]["bert_jax_rollbacks"] == {(): 0.0}
    assert "Traceback" not in capfd.readouterr().err


def test_the_dashboard_asks_for_what_there_is(serve):
    """Every name in its queries is on a page, or a value of a line of metrics of this project's runs."""
    port = free_port()
    with serve(port) as server:
        timing, server.host_share = {"step_seconds": 1.0, "mfu": 0.1, "data_wait": 0.1}, 0.25
        server.show("train", LINE | timing | {"learning_rate": 0.1, "mlm_loss": 2.0, "tokens_seen": 8})
        found = read(port)
    board = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    names = {name for query in queries for name in re.findall(r"\b(?:bert_jax|process)_\w+", query)}
    assert len(queries) >= 10 and names <= found.keys(), names - found.keys()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
