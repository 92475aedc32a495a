"""Words at masks: agreement, the diagnostics of Ettinger, facts; models with known answers, and malformed files."""

import dataclasses
import json

import numpy as np
import pytest
from etils import epath
from scipy import stats

from bert_jax import report
from bert_jax.analysis.bootstrap import bootstrap_mean
from bert_jax.analysis.cloze import SUITE, cloze_scores, ettinger, lama, lama_files, minimal_pairs, verb_agreement
from bert_jax.analysis.cloze.cloze import ClozeSettings
from bert_jax.analysis.suite import ITEMS, SuiteInputs
from bert_jax.errors import UserError
from bert_jax.inference.loaded_model import LoadedModel
from bert_jax.model.heads import Heads
from tests.analysis import data_folder
from tests.analysis.test_cloze_pll import context_free
from tests.interventions.models import small_model

CPRAG = ["item", "context_s1", "context_s2", "expected", "within_category", "between_category", "constraint"]
ROLE = ["item", "context", "expected", "exp_cloze", "target", "tgt_cloze", "tgt_cloze(strict)"]
SIMP = ["item", "context_aff", "context_neg", "target_aff", "target_neg"]


def prefers(**logits: float) -> dict[str, LoadedModel]:
    """A model that predicts words by these logits in every context; others have 0."""
    tokenizer = small_model().tokenizer
    bias = np.zeros(tokenizer.vocab_size)
    for word, logit in logits.items():
        bias[tokenizer.token_to_id(word)] = logit
    return {"model": context_free(bias)}


def write(path, text) -> list[epath.Path]:
    path.write_text(text)
    return [epath.Path(path)]


def write_table(path, header, *rows) -> list[epath.Path]:
    return write(path, "".join("\t".join(map(str, row)) + "\n" for row in (header, *rows)))


def write_facts(path, *facts) -> list[epath.Path]:
    return write(path, "".join(json.dumps(fact) + "\n" for fact in facts))


def test_ranks_and_preferences_count_ties_half():
    scores = np.array([[3.0, 1, 1, 0], [1, 1, 1, 2], [0, 5, 4, 3]])
    rank, ties = cloze_scores.ranks_and_ties(scores, np.array([1, 0, 1]))
    assert (rank.tolist(), ties.tolist()) == ([2.5, 3, 1], [1, 2, 0])
    found = cloze_scores.preference(np.array([1.0, 2, 3]), np.array([1.0, 1, 4]))
    assert (found["accuracy"], found["items"], found["ties"]) == (0.5, 3, 1)
    nothing = cloze_scores.preference(np.zeros(0), np.zeros(0))
    assert nothing == {"accuracy": None, "accuracy_interval": [None, None], "items": 0, "ties": 0}


@pytest.mark.parametrize(("count", "total"), [(0, 8), (7, 8), (8, 8), (33, 50), (1, 1)])
def test_intervals_of_shares_are_those_of_scipy(count, total):
    found = cloze_scores.share_with_interval("top_1", count, total)
    expected = stats.binomtest(count, total).proportion_ci(0.95, method="wilson")
    assert found["top_1"] == count / total
    np.testing.assert_allclose(found["top_1_interval"], expected, atol=1e-12)


def test_agreement_of_models_with_known_answers(tmp_path):
    sentences = [("0", "sings", "falls"), ("0", "falls", "sings"), ("2", "sings", "stone"), ("2", "crab", "falls")]
    lines = [f"{group}\tx\tthe river ***mask*** .\t{right}\t{wrong}" for group, right, wrong in sentences]
    lines += ["0\tx\t***mask*** the river .\tsings\tSings", f"0\tx\t{'the ' * 70} ***mask***\tsings\tfalls", ""]
    files = write(tmp_path / "a.tsv", "\r\n".join(lines))
    found = verb_agreement.run(files, prefers(sings=2, falls=1), False)[0]
    assert (found["sentences"], found["sentences_in_files"]) == (3, 6)
    assert found["skipped"] == {"not_one_token": 1, "same_token": 1, "too_long": 1}
    assert [found["by_group"][group]["model"]["accuracy"] for group in ("0", "2")] == [0.5, 1]
    assert found["mean_of_groups"]["model"] == 0.75
    for name in ("model", "lone_mask"):
        np.testing.assert_allclose(found["all_sentences"][name]["accuracy"], 2 / 3)
    undecided = verb_agreement.run(files, prefers(), False)[0]["all_sentences"]["model"]
    assert (undecided["accuracy"], undecided["items"], undecided["ties"]) == (0.5, 3, 3)


def test_agreement_reads_the_context(tmp_path):
    files = write(tmp_path / "a.tsv", "1\tx\tthe river ***mask*** over stone .\tsings\tfalls\n")
    model = small_model()
    items = verb_agreement.read_items(files)
    _, rows, tokens, _ = verb_agreement.tokens_of_forms(items, model)
    found = verb_agreement.scores_of_tokens(model, rows, tokens, False)[0]
    (candidates,) = model.fill_mask("the river [MASK] over stone .", top=model.tokenizer.vocab_size)
    expected = {one.token: np.log(one.probability) for one in candidates}
    np.testing.assert_allclose(found, [expected["sings"], expected["falls"]], atol=1e-4)


def test_ettinger_cprag(tmp_path):
    rows = [
        (0, "the river .", "a", "sings", "falls", "stone", "H"),
        (1, "the wind .", "a", "falls", "sings", "stone", "L"),
        (2, "the wind .", "the", "crab", "sings", "stone", "L"),
    ]
    files = write_table(tmp_path / "c.tsv", CPRAG, *rows)
    found = ettinger.run(files, prefers(sings=5, falls=4))[0]["CPRAG-102"]
    accuracy, sensitivity = found["accuracy"]["model"], found["sensitivity"]["model"]
    assert [accuracy["groups"]["all"][key] for key in ("top_1", "top_5", "items")] == [0.5, 1, 2]
    assert accuracy["skipped"]["not_one_token"] == 1
    assert accuracy["groups"]["constraint H"]["top_1"] == 1 and accuracy["groups"]["constraint L"]["top_1"] == 0
    assert sensitivity["groups"]["all"]["accuracy"] == 0.5 and sensitivity["groups"]["all"]["items"] == 2
    assert sensitivity["groups"]["constraint L"]["accuracy"] == 0 and sensitivity["skipped"]["not_one_token"] == 1
    assert sensitivity["groups"]["within over between category, constraint L"]["items"] == 2
    dataset = ettinger.read_dataset(files[0])
    assert dataset.contexts[0].text == "the river . a [MASK] ."


def test_ettinger_role(tmp_path):
    rows = [
        ("6-b", "the stone which river the wind ", "light", 0.1, "sings", 0.2, 0),
        ("6-a", "the stone which wind the river ", "runs|sings over", 0.5, "sings", 0.5, 0.5),
    ]
    found = ettinger.run(write_table(tmp_path / "r.tsv", ROLE, *rows), prefers(sings=5))[0]["ROLE-88"]
    assert found["accuracy"]["model"]["groups"]["all"]["top_1"] == 0.5
    groups = found["sensitivity"]["model"]["groups"]
    # The correlation of two points is 1 or -1 in any case.
    assert found["sensitivity"]["model"]["correlation_with_cloze"] is None
    # Without context the target has one probability in both contexts: a tie, which is not above the threshold.
    assert (groups["all"]["accuracy"], groups["all"]["ties"], groups["all"]["accuracy_above_threshold"]) == (0.5, 1, 0)
    with pytest.raises(UserError, match=r"r.tsv: item 6 has only one of the conditions a and b"):
        ettinger.read_dataset(write_table(tmp_path / "r.tsv", ROLE, rows[0])[0])


def test_ettinger_negation(tmp_path):
    row = (0, "the river is (a|an)", "the river is not (a|an)", "stone", "over")
    files = write_table(tmp_path / "n.tsv", SIMP, row)
    contexts = [context.text for context in ettinger.read_dataset(files[0]).contexts]
    assert contexts[:2] == ["the river is a [MASK] .", "the river is an [MASK] ."]
    assert contexts[2:] == ["the river is not an [MASK] .", "the river is not a [MASK] ."]
    found = ettinger.run(files, prefers(stone=1))[0]["NEG-136-SIMP"]
    groups = found["sensitivity"]["model"]["groups"]
    assert [groups[name]["accuracy"] for name in ("affirmative", "negated", "all")] == [1, 0, 0.5]
    assert [found["accuracy"]["model"]["groups"]["all"][key] for key in ("top_1", "top_5", "items")] == [1, 1, 1]
    close = ettinger.run(files, prefers(stone=0.01))[0]["NEG-136-SIMP"]["sensitivity"]["model"]["groups"]["affirmative"]
    assert (close["accuracy"], close["accuracy_above_threshold"]) == (1, 0)
    licensed = write_table(tmp_path / "n.tsv", [*SIMP, "licensing"], [*row, "Y"])
    assert "negated, licensed" in ettinger.run(licensed, prefers())[0]["NEG-136-NAT"]["sensitivity"]["model"]["groups"]


def test_facts_of_models_with_known_answers(tmp_path):
    facts = [{"obj_label": word, "masked_sentences": ["the river is [MASK] ."]} for word in ("sings", "falls", "stone")]
    facts += [{"obj_label": "crab", "masked_sentences": ["a [MASK]"]}, {"obj_label": "dark", "masked_sentences": ["a"]}]
    facts += [{"obj_label": "quick", "masked_sentences": ["a [MASK]"]}, facts[0]]
    facts += [{"obj_label": "light", "masked_sentences": [f"{'a ' * 70}[MASK]"]}]
    files = write_facts(tmp_path / "P1.jsonl", *facts)
    (vocabulary,) = write(tmp_path / "words.txt", "sings\nfalls\nstone\nlight\nriver\ncrab\nwind\n")
    found, items = lama.run(files, vocabulary, prefers(sings=3, quick=9, falls=2), 0, 0, False)
    assert items.scores["model"].tolist() == [1, 0, 0, 1] and set(items.groups) == {"P1"}
    relation, means = found["by_relation"]["P1"], found["mean_of_relations"]["model"]
    low, high = means["mean_reciprocal_rank_interval"]
    assert 0.25 <= low < means["mean_reciprocal_rank"] < high <= 1
    np.testing.assert_allclose(relation["model"]["mean_reciprocal_rank_interval"], [low, high], atol=0.01)
    assert (found["facts"], found["facts_in_files"], found["candidates"]) == (4, 7, 5)
    reasons = {"not_one_token": 1, "not_in_vocabulary": 1, "too_long": 1, "mask_not_once": 1, "repeated": 0}
    assert {reason: found["skipped"][reason] for reason in reasons} == reasons
    # Ranks 1, 2 and (stone, light and river tie) 4, and 1 for the repeated fact.
    for name in ("model", "lone_mask"):
        assert relation[name]["precision_at_1"] == 0.5 and relation[name]["ties"] == 1
        np.testing.assert_allclose(relation[name]["mean_reciprocal_rank"], (1 + 1 / 2 + 1 / 4 + 1) / 4)
    assert relation["most_frequent_object"]["precision_at_1"] == 0.5
    negated, primed = relation["negated"], relation["misprimed"]
    assert (negated["facts"], negated["same_answer"]) == (4, 1)
    np.testing.assert_allclose(negated["rank_correlation"], 1, rtol=1e-6)
    assert primed["facts"] == 4 and primed["precision_at_1"] == primed["precision_at_1_original"] == 0.5
    every = lama.run(files, None, prefers(sings=3, quick=9, falls=2), 0, 0, False)[0]
    assert every["by_relation"]["P1"]["model"]["precision_at_1"] == 1 / 5
    assert lama.run(files, vocabulary, prefers(), 2, 0, False)[0]["skipped"]["not_drawn"] == 5


def test_prompts_of_facts(tmp_path):
    templates = {"relation": "P1", "template": "[X] is [Y] .", "template_negated": "[X] is never [Y] ."}
    fact = {"sub_label": "wind", "obj_label": "dark"}
    files = write_facts(tmp_path / "relations.jsonl", templates)
    files += write_facts(tmp_path / "P1.jsonl", fact, fact, {**fact, "obj_label": "light", "predicate_id": "P1"})
    published = {"masked_negations": ["a not [MASK]"], "masked_misprimed": ["Talk? a [MASK]"]}
    files += write_facts(
        tmp_path / "P2.jsonl",
        {"obj_label": "dark", "evidences": [{"masked_sentence": "the [MASK]"}]},
        {"obj_label": "light", "masked_sentences": ["a [MASK]"], **published},
        {"obj_label": "light", "masked_sentences": ["x"], "judgments": [{"judgment": "no"}]},
        {"obj_label": "light", "masked_sentences": ["[MASK]"], "judgments": [{"judgment": "no"}, {"judgment": "yes"}]},
        {"obj_label": "light", "masked_sentences": ["[MASK]" + " a" * 100]},
    )
    found = lama_files.read_relations(files, seed=0)
    Fact = lama_files.Fact
    assert found["P1"].facts == [
        Fact("wind is [MASK] .", "dark", "wind is never [MASK] .", "Light? wind is [MASK] .", "P1.jsonl, line 1"),
        Fact("wind is [MASK] .", "light", "wind is never [MASK] .", "Dark? wind is [MASK] .", "P1.jsonl, line 3"),
    ]
    assert found["P1"].skipped["repeated"] == 1
    assert found["P2"].facts[:2] == [
        Fact("the [MASK]", "dark", None, "Light? the [MASK]", "P2.jsonl, line 1"),
        Fact("a [MASK]", "light", "a not [MASK]", "Talk? a [MASK]", "P2.jsonl, line 2"),
    ]
    assert len(found["P2"].facts) == 3
    assert found["P2"].skipped == {"repeated": 0, "mask_not_once": 1, "rejected_by_judges": 0, "too_many_words": 1}
    assert lama_files.negate("Birds can [MASK] .") == "Birds can not [MASK] ." and lama_files.negate("a [MASK]") is None
    assert lama_files.misprime("a [MASK]", "dark", ["Dark"], np.random.default_rng(0)) is None


def test_a_model_that_answers_the_misprime(tmp_path):
    facts = [{"obj_label": word, "masked_sentences": ["is [MASK]"]} for word in ("sings", "falls")]
    found = lama.run(write_facts(tmp_path / "P.jsonl", *facts), None, prefers(sings=3), 0, 0, False)[0]
    primed = found["by_relation"]["P"]["misprimed"]
    assert (primed["answers_the_misprime"], primed["precision_at_1"], primed["facts"]) == (0.5, 0.5, 2)


def test_a_fact_whose_word_is_another_token_at_the_beginning(tmp_path, monkeypatch):
    """In a byte-level vocabulary; candidates are words that follow a space."""
    real = lama.token_of_word
    monkeypatch.setattr(lama, "token_of_word", lambda *of, begins_text=False: real(*of) + begins_text)
    facts = [{"obj_label": "sings", "masked_sentences": [text]} for text in ("is [MASK]", "[MASK] is", "so [MASK]")]
    found = lama.run(write_facts(tmp_path / "P.jsonl", *facts), None, prefers(sings=3), 0, 0, False)[0]
    assert (found["facts"], found["skipped"]["other_token_at_the_beginning"]) == (2, 1)


def read_agreement(files):
    return verb_agreement.read_items(files)


def read_ettinger(files):
    return ettinger.read_dataset(files[0])


def read_facts(files):
    return lama_files.read_relations(files, 0)


@pytest.mark.parametrize(
    ("read", "content", "message"),
    [
        (read_agreement, "", r"bad.txt: the file is empty"),
        (read_agreement, "0\ta\t***mask***\tb\tc\n\n0\ta b", r"line 3: 2 fields .* expected 5: group, sentence"),
        (read_agreement, "0\ta\tmask\tb\tc", r"line 1: the third field must have \*\*\*mask\*\*\* once"),
        (read_agreement, "0\ta\t***mask***\tb\t ", r"line 1: an empty field"),
        (read_ettinger, "item\tcontext", r"line 1: the header is that of no dataset of Ettinger"),
        (read_ettinger, "\t".join(SIMP), r"bad.txt: no line after the header"),
        (read_ettinger, "\t".join(SIMP) + "\n1\ta", r"line 2: 2 fields, the header has 5"),
        (read_ettinger, "\t".join(SIMP) + "\n1\ta\tb\t\tc", r"line 2: an empty field"),
        (read_ettinger, "\t".join(ROLE) + "\n1\ta\tb\tc\td\te\tf", r"line 2: item '1': expected a number, '-' and a"),
        (read_ettinger, "\t".join(ROLE) + "\n1-a\ta\tb\tc\td\te\tf", r"line 2: 'e' is not a number"),
        (read_facts, "\n", r"bad.txt: the file is empty"),
        (read_facts, '{"obj_label": "a", "masked_sentences": ["[MASK]"]}\n{', r"bad.txt, line 2 is not JSON"),
        (read_facts, '{"masked_sentences": ["[MASK]"]}', r"line 1: no key 'obj_label': there are masked_sentences"),
        (read_facts, '{"obj_label": "a"}', r"line 1: no prompt: give masked_sentences, evidences, or a template"),
        (read_facts, '{"obj_label": "a", "masked_sentences": [3]}', r"'masked_sentences' is \[3\]: it must be a text"),
    ],
)
def test_malformed_files(read, content, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read(write(tmp_path / "bad.txt", content))


def test_nothing_to_score(tmp_path):
    with pytest.raises(UserError, match=r"none of 1 sentences can be scored \(not_one_token 1, same_token 0"):
        verb_agreement.run(write(tmp_path / "a.tsv", "0\ta\ta ***mask***\tcrab\tfalls"), prefers(), False)
    facts = write_facts(tmp_path / "P.jsonl", {"obj_label": "crab", "masked_sentences": ["[MASK]"]})
    with pytest.raises(UserError, match=r"none of 1 facts can be scored \(not_one_token 1"):
        lama.run(facts, None, prefers(), 0, 0, False)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return epath.Path(data_folder.write(tmp_path_factory.mktemp("cloze") / "data"))


def _check_items(result, items):
    """The means of the items are the numbers of the tables."""
    expected = {"minimal_pairs": result["minimal_pairs"]["mean_of_uids"][minimal_pairs.HEADLINE]}
    expected["agreement"] = result["agreement"]["all_sentences"]["model"]["accuracy"]
    expected["lama"] = result["lama"]["mean_of_relations"]["model"]["precision_at_1"]
    expected |= {n: one["sensitivity"]["model"]["groups"]["all"]["accuracy"] for n, one in result["ettinger"].items()}
    for name, one in items.items():
        assert bootstrap_mean(one.scores["model"], one.groups).value == pytest.approx(expected[name]), name
        assert len(set(one.items)) == len(one.items) > 0
        assert {"model", "random_weights", "lone_mask"} <= set(one.scores)


def test_suite(data):
    inputs = SuiteInputs(small_model(), data, seed=0, progress=False)
    result, again = (dict(SUITE.run(inputs, ClozeSettings())) for _ in range(2))
    items = result.pop(ITEMS)
    assert list(items) == ["minimal_pairs", "agreement", *result["ettinger"], "lama"]
    _check_items(result, items)
    del again[ITEMS]
    assert json.loads(json.dumps(result, allow_nan=False)) == result and again == result
    assert list(result) == ["seed", "minimal_pairs", "agreement", "ettinger", "lama"]
    scalars = SUITE.scalars(result)
    assert len(scalars) == 5 and all(0 <= one.value <= 100 for one in scalars.values())
    assert all(0 <= one.baselines["random weights"] <= 100 for one in scalars.values())
    blocks = SUITE.blocks(result)
    top_5 = scalars["NEG-136-SIMP, expected word in top 5 (%)"]  # no test counts its items
    assert top_5.interval[0] <= top_5.value <= top_5.interval[1]
    tables = [block for block in blocks if isinstance(block, report.Table)]
    row = next(row for table in tables if table.header[0] == "group" for row in table.rows if row[0] == "all")
    low, high = stats.binomtest(int(2 * float(row[1].split()[0]) / 50), 4).proportion_ci(method="wilson")
    assert row[1].endswith(f" [{100 * low:.1f}, {100 * high:.1f}]") and row[-2] == "4"
    assert all(len(row) == len(table.header) for table in tables for row in table.rows) and len(tables) == 9
    assert SUITE.obstacle(inputs, ClozeSettings()) is None


def test_a_file_without_usable_items_is_named_on_the_page(tmp_path):
    row = (0, "the river is a", "the river is not a", "crab", "over")
    files = write_table(tmp_path / "n.tsv", ["item", "context_aff", "context_neg", "target_aff", "target_neg"], row)
    models = {**prefers(), "random_weights": prefers()["model"]}
    found = {"seed": 0, "ettinger": ettinger.run(files, models)[0]}
    assert len(SUITE.scalars(found)) == 0
    notes = [block.text for block in SUITE.blocks(found) if isinstance(block, report.Note)]
    assert any("NEG-136-SIMP: no item with completions can be used (left out: not one token 2" in one for one in notes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": Heads(mlm=False)}, "the model has no MLM head"),
        ({"config": {"direction": "causal"}}, "a causal model"),
    ],
)
def test_models_without_a_masked_lm(data, change, message):
    model = small_model()
    config = dataclasses.replace(model.config, **change.get("config", {}))
    other = LoadedModel(config, change.get("heads", model.heads), model.params, model.tokenizer)
    with pytest.raises(UserError, match=message):
        SUITE.run(SuiteInputs(other, data, 0, False), ClozeSettings())


def test_folders(data, tmp_path):
    inputs = SuiteInputs(small_model(), epath.Path(tmp_path), 0, False)
    with pytest.raises(UserError, match="has none of the folders minimal_pairs, agreement, ettinger, lama"):
        SUITE.run(inputs, ClozeSettings())
    (tmp_path / "lama").mkdir()
    for name in ("a.txt", "b.txt"):
        (tmp_path / "lama" / name).write_text("stone\n")
    (tmp_path / "lama" / "P.jsonl").write_text('{"obj_label": "stone", "masked_sentences": ["[MASK]"]}\n')
    with pytest.raises(UserError, match=r"a.txt, b.txt: keep one vocabulary"):
        SUITE.run(inputs, ClozeSettings())
