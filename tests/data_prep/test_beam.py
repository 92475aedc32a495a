"""Apache Beam builds the same bytes as local processes: on the direct runner, and on Dask with two workers."""

import functools
import gzip
import json
import pathlib

import numpy as np
import pytest

pytest.importorskip("apache_beam", reason="needs the extra `beam`")

from bert_jax.errors import UserError
from data_prep.build_options import BuildOptions, NearDuplicateOptions
from data_prep.builder.engines.beam import BeamEngine
from data_prep.cli.main import main
from data_prep.filters.chain import Filters
from data_prep.filters.gopher import GopherQuality
from tests.building import files, make_documents, make_tokenizer, run
from tests.data_prep.grouped import clusters, decide, expected_of_clusters

# Beam 2.77 and Dask raise DeprecationWarnings.
pytestmark = [pytest.mark.slow, pytest.mark.beam, pytest.mark.filterwarnings("default")]

SPECS = ["text:text.txt", "jsonl:data.jsonl@text"]
OPTIONS = BuildOptions(
    validation_fraction=0.2,
    max_shard_bytes=8000,
    filters=Filters(gopher_quality=GopherQuality(min_words=8, min_mean_word_length=None, min_stop_words=None)),
    masks=("email",),
    drop_duplicate_paragraphs=20,
    near_duplicates=NearDuplicateOptions(),
)


@pytest.fixture
def expected(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    documents = make_documents(0, 300)
    pathlib.Path("text.txt").write_text("\n\n".join(documents))
    lines = [
        '{"text": "The river sings. A stone."}',
        "{broken",
        *(json.dumps({"text": text}) for text in documents[:5]),
    ]
    pathlib.Path("data.jsonl").write_text("\n".join(lines))
    manifest = run("local", SPECS, OPTIONS)
    assert manifest["filters"]["rules"]["gopher_quality.min_words"]["examples"]
    return files("local")


def test_direct_runner(expected):
    run("beam", SPECS, OPTIONS, BeamEngine(None, (), 100_000), range_bytes=5000)  # several ranges of one file
    assert files("beam") == expected


def test_languages_and_a_validation_split(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("hub").mkdir()
    for seed, split in enumerate(("train", "validation")):
        documents = enumerate(make_documents(seed, 60))
        lines = [json.dumps({"text": text, "lang": "de" if i % 3 else "is"}) for i, text in documents]
        pathlib.Path(f"hub/{split}.jsonl").write_text("\n".join(lines))
    make_tokenizer().save("tokenizer.json")
    command = ["build", "--source", "hub:hub@text", "--language", "@lang", "--tokenizer", "tokenizer.json"]
    assert main([*command, "--name", "c", "--out", "local", "--workers", "1"]) == 0
    assert main([*command, "--name", "c", "--out", "beam", "--engine", "beam", "--", "--direct_num_workers=1"]) == 0
    assert files("beam") == files("local")
    splits = json.loads(files("beam")["corpus.json"])["splits"]
    assert [*splits["train"]["languages"]] == ["de", "is"] and splits["validation"]["documents"] == 60


def check_order(engine):
    """Groups of several chunks, whose order matters: the signatures of clusters, in ranges of 300."""
    local = pathlib.Path.cwd()
    run_steps = functools.partial(engine.run_steps, scratch=str(local), local=local)
    removed = decide(clusters()[0], 0.5, engine.memory_bytes, clusters()[1], 300, run_steps)
    assert np.array_equal(removed, expected_of_clusters(0.5))
    assert not list(local.glob("found-*"))


def test_order_of_chunks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_order(BeamEngine(None, (), 100_000))


def message(capsys):
    return capsys.readouterr().err.splitlines()[-1]


def test_the_command(expected, capsys):
    """Flags after -- are passed to Beam, which refuses one that is not a number."""
    make_tokenizer().save("tokenizer.json")
    command = ["build", "--source", "text:text.txt", "--tokenizer", "tokenizer.json", "--validation-fraction", "0.2"]
    command += ["--out", "c", "--engine", "beam", "--runner", "DirectRunner", "--"]
    assert main([*command, "--direct_num_workers=two"]) == 2
    assert main([*command, "--direct_num_wokers=1"]) == 2
    assert "DirectRunner has no such option, and would ignore it; did you mean --direct_num_workers?" in message(capsys)
    assert main([*command, "--dask_client_address", "tcp://h:1"]) == 2
    assert "-- --dask_client_address: DirectRunner ignores this option, which is for DaskRunner" in message(capsys)
    assert not pathlib.Path("c").exists()
    assert main([*command, "--direct_num_workers=1"]) == 0


def test_dask_with_two_workers(expected):
    distributed = pytest.importorskip("distributed")
    with (
        distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        distributed.Client(cluster) as client,
        distributed.get_task_stream(client) as stream,
    ):
        # As many partitions as inputs: by default Dask uses one worker for so little data.
        flags = [f"--dask_client_address={cluster.scheduler_address}", "--dask_partition_size=1"]
        engine = BeamEngine("DaskRunner", flags, 100_000)
        check_order(engine)
        run(pathlib.Path("beam").resolve(), SPECS, OPTIONS, engine)
    assert len({task["worker"] for task in stream.data}) == 2
    assert files("beam") == expected


def test_errors_of_workers_reach_the_user(expected):
    with pytest.raises(UserError, match="did you mean 'text'"):
        run("c", ["jsonl:data.jsonl@txt"], OPTIONS, BeamEngine(None))
    pathlib.Path("cut.txt.gz").write_bytes(b"\x1f\x8b\x08\x00\x00\x00\x00\x00")
    with pytest.raises(UserError, match=r"cut\.txt\.gz"):
        run("d", ["text:cut.txt.gz"], OPTIONS, BeamEngine(None))
    # Failures of that run do not affect the next one.
    pathlib.Path("cut.txt.gz").write_bytes(gzip.compress(pathlib.Path("text.txt").read_bytes()))
    run("d", ["text:cut.txt.gz"], OPTIONS, BeamEngine(None))
    with pytest.raises(UserError, match=r"--runner NoSuchRunner: Beam cannot use it"):
        run("e", ["text:text.txt"], OPTIONS, BeamEngine("NoSuchRunner"))
