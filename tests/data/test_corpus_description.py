"""What a run keeps of its corpora."""

import json
import shutil

import pytest

from bert_jax.data.corpus_description import describe_corpora, frequent_languages
from bert_jax.data.manifest import identity_of, read_manifest
from tests.corpus_writer import write_sample


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    directory = tmp_path_factory.mktemp("described") / "c"
    write_sample(directory)
    return directory


def test_what_corpus_json_says(sample, tmp_path):
    corpus = shutil.copytree(sample, tmp_path / "c")
    manifest = read_manifest(corpus)
    train, identity = manifest["splits"]["train"], identity_of(corpus, manifest)
    plain = {
        "name": manifest["name"],
        "documents": train["documents"],
        "tokens": train["tokens"],
        "languages": {"en": train["tokens"]},
        "groups": [{"source": "a test", "language": "en", "score": None, "tokens": train["tokens"]}],
        "licenses": [],
        "filters": [],
        "masks": [],
        "removed": {},
    }
    (tmp_path / "empty").mkdir()
    others = [str(tmp_path / "empty"), str(tmp_path / "absent"), str(corpus / "corpus.json"), "zz://nowhere"]
    assert describe_corpora([str(corpus), *others]) == {identity: plain}
    manifest["sources"] = [{"license": "mit"}, {}, {"license": None}, {"license": "mit"}]
    manifest["settings"] = {"filters": {"c4": {}}, "filter_functions": {"f.py:keep": "ab"}, "masks": ["ip"], "x": 1}
    manifest["dropped"] = {
        "empty_documents": {"documents": 0},
        "short_documents": {"documents": 3},
        "lines": {"lines": 1},
    }
    (corpus / "corpus.json").write_text(json.dumps(manifest))
    (found,) = describe_corpora([str(corpus)]).values()
    assert found == plain | {
        "licenses": ["mit", None],
        "filters": ["c4", "f.py:keep"],
        "masks": ["ip"],
        "removed": {"short_documents": 3},
    }
    manifest["sources"] = [{"license": 3}]
    (corpus / "corpus.json").write_text(json.dumps(manifest))
    assert describe_corpora([str(corpus)]) == {}


@pytest.mark.parametrize(
    ("tokens", "codes"),
    [({}, []), ({"und": 5}, []), ({"de": 1, "en": 99, "fr": 0}, ["de", "en"]), ({"zh-Hant": 4, "zh": 5}, ["zh"])],
)
def test_languages_of_a_card(tokens, codes):
    assert frequent_languages(tokens) == codes
