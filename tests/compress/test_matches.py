"""Recipes give the layers of their papers; matches that cannot be are refused in one line."""

import dataclasses
import json

import pytest

from bert_jax.compress.compression_options import CompressOptions, read_matches
from bert_jax.compress.matches import RECIPES, Match, check_matches, choose_layers
from bert_jax.compress.students import check_teacher_heads
from bert_jax.config import MeshConfig, ModelConfig
from bert_jax.errors import UserError
from bert_jax.model import families
from bert_jax.training.sharding import abstract_mesh

BERT_BASE = ModelConfig()
SMALL = dataclasses.replace(BERT_BASE, num_layers=6)


def pairs(recipe, what):
    return [(match.teacher_layer, match.student_layer) for match in recipe.matches if match.what == what]


def test_layers_of_the_papers():
    """DistilBERT begins with 0, 2, 4, 7, 9, 11; PKD-skip matches 2 to 10 and PKD-last 7 to 11; TinyBERT 3m."""
    assert choose_layers("spread", 12, 6) == (0, 2, 4, 7, 9, 11)
    assert choose_layers("first", 12, 3) == (0, 1, 2) and choose_layers("last", 12, 3) == (9, 10, 11)
    assert choose_layers("new", 2, 6) == () and choose_layers("spread", 6, 1) == (0,)
    assert pairs(RECIPES["pkd-skip"](12, 6, None), "cls") == [(2, 1), (4, 2), (6, 3), (8, 4), (10, 5)]
    assert pairs(RECIPES["pkd-last"](12, 6, None), "cls") == [(7, 1), (8, 2), (9, 3), (10, 4), (11, 5)]
    tiny = RECIPES["tinybert"](12, 4, "map")
    assert pairs(tiny, "hidden") == [(0, 0), (3, 1), (6, 2), (9, 3), (12, 4)]
    assert pairs(tiny, "scores") == [(2, 0), (5, 1), (8, 2), (11, 3)]
    assert {match.project for match in tiny.matches if match.what == "hidden"} == {"map"}
    assert pairs(RECIPES["distilbert"](12, 6, None), "hidden") == [(12, 6)]
    mobile = RECIPES["mobilebert"](24, 24, None)
    assert pairs(mobile, "scores") == [(i, i) for i in range(24)] and len(mobile.matches) == 4 * 24
    weights = {match.loss: match.weight * 24 for match in mobile.matches}
    assert weights == pytest.approx({"standardised_mse": 100, "mse_of_means": 5000, "variance_l1": 5, "kl": 1})
    assert len(RECIPES["similarity"](12, 6, None).matches) == 14 and not RECIPES["drop"](12, 6, None).matches


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize(("teacher", "student"), [(12, 6), (12, 5), (6, 3), (4, 4), (24, 2)])
def test_recipes_fit_all_depths(name, teacher, student):
    models = (dataclasses.replace(BERT_BASE, num_layers=layers) for layers in (teacher, student))
    check_matches(RECIPES[name](teacher, student, None).matches, *models)


@pytest.mark.parametrize(
    ("changes", "student", "parts"),
    [
        ({"teacher_layer": 13}, {}, "hidden_13_6_mse: the teacher has no layer 13: with hidden, give one from 0 to 12"),
        ({"student_layer": 7}, {}, "the student has no layer 7"),
        ({"what": "scores", "student_layer": 6}, {}, "no layer 6: with scores, give one from 0 to 5"),
        ({"what": "scores", "student_layer": 5, "loss": "cosine"}, {}, "scores have no loss cosine: use mse"),
        ({"what": "cls", "loss": "similarity"}, {}, "cls have no loss similarity"),
        ({}, {"hidden_size": 384}, "have 768 numbers and the student's 384: give the match a name for project"),
        (
            {"what": "scores", "student_layer": 5},
            {"num_heads": 6},
            "the teacher has 12 attention heads and the student 6",
        ),
        ({"loss": "similarity", "project": "map"}, {}, "leave project out"),
        ({"loss": "kl"}, {}, "hidden have no loss kl"),
        ({"what": "scores", "student_layer": 5, "loss": "kl"}, {"attention_window": 8}, "is local or causal: use mse"),
    ],
)
def test_refused_matches(changes, student, parts):
    match = dataclasses.replace(Match(6, 6, "hidden", "mse"), **changes)
    with pytest.raises(UserError) as error:
        check_matches([match], BERT_BASE, dataclasses.replace(SMALL, **student))
    assert parts in str(error.value) and "\n" not in str(error.value)


def test_a_match_is_given_once():
    with pytest.raises(UserError, match="hidden_6_6_mse is given 2 times"):
        check_matches([Match(6, 6, "hidden", "mse", weight) for weight in (1.0, 2.0)], BERT_BASE, SMALL)


def test_plan_of_options():
    plan = CompressOptions().plan(BERT_BASE)
    assert plan.model == dataclasses.replace(BERT_BASE, num_layers=6) and plan.layers == (0, 1, 2, 3, 4, 5)
    plan = CompressOptions(layers=(0, 5, 11), temperature=3.0, soft_weight=2.0).plan(BERT_BASE)
    assert plan.model.num_layers == 3 and plan.layers == (0, 5, 11)
    assert (plan.recipe.temperature, plan.recipe.soft_weight, plan.recipe.task_weight) == (3.0, 2.0, 0.5)
    narrow = {"hidden_size": 312, "intermediate_size": 1200, "student_layers": 4}
    plan = CompressOptions(recipe="tinybert", start="new", **narrow).plan(BERT_BASE)
    assert plan.layers == () and (plan.model.hidden_size, plan.model.intermediate_size) == (312, 1200)
    assert plan.recipe.matches[-1].project is not None


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"student_layers": 13}, "--student-layers 13: the teacher has 12 layers"),
        ({"student_layers": 1}, "give at least 2"),
        ({"layers": (0, 12)}, "--layers 0 12: the teacher's layers are 0 to 11"),
        (
            {"layers": (*range(12), 0)},
            "--layers 0 1 2 3 4 5 6 7 8 9 10 11 0: the teacher has 12 layers: use at most 12",
        ),
        ({"hidden_size": 384}, "--hidden-size: only a new student can have other sizes"),
        ({"recipe": "drop", "task_weight": 0.0}, "leave no loss"),
        ({"matches": "nowhere.json"}, "nowhere.json does not exist"),
        ({"start": "new", "num_heads": 7}, "not divisible"),
        ({"layers": (0, 1), "student_layers": 2}, "--layers and --student-layers exclude each other"),
        ({"recipe": "mobilebert", "layers": (0, 1)}, "so it begins at random: leave --start and --layers out"),
        ({"bottleneck_size": 64}, "--bottleneck-size belongs to --recipe mobilebert"),
        ({"recipe": "mobilebert", "bottleneck_size": 64}, "model.bottleneck_size 64 is not divisible by model.num_hea"),
        ({"recipe": "drop", "replace_share": 0.5}, "--replace-share belongs to --recipe theseus"),
        ({"recipe": "theseus", "start": "new"}, "--start new and --student are not possible"),
    ],
)
def test_refused_options(options, part):
    with pytest.raises(UserError) as error:
        CompressOptions(**options).plan(BERT_BASE)
    assert part in str(error.value) and "\n" not in str(error.value)


def test_matches_from_a_file(tmp_path):
    path = tmp_path / "matches.json"
    path.write_text('[{"teacher_layer": 6, "student_layer": 3, "what": "cls", "loss": "cosine", "weight": 2}]')
    assert read_matches(str(path)) == (Match(6, 3, "cls", "cosine", 2.0),)
    plan = CompressOptions(matches=str(path), student_layers=3).plan(BERT_BASE)
    assert plan.recipe.matches == read_matches(str(path))
    values = {"teacher_layer": 6, "student_layer": 3, "what": "hidden", "loss": "mse"}
    for content, part in [
        ({}, "not a JSON array"),
        ([{"teacher_layer": 6}], "match 0: field 'student_layer' is missing"),
        ([{"teacher_layer": 6, "student_layer": 3, "what": "head", "loss": "mse"}], "match 0: what is 'head'"),
        (["first"], "match 0: the whole is 'first': it must be an object"),
        ([{"layer": 6}], "match 0: unknown field 'layer'"),
        ([values | {"project": "."}], "match 0: project is '.': it must have 1 to 64 letters, digits, - or _"),
    ]:
        path.write_text(json.dumps(content))
        with pytest.raises(UserError) as error:
            read_matches(str(path))
        assert part in str(error.value), str(error.value)


def test_the_mesh_divides_the_teachers_heads():
    mesh = abstract_mesh(MeshConfig(1, 1, 5), 5)
    check_teacher_heads(dataclasses.replace(BERT_BASE, hidden_size=640, num_heads=10), mesh)
    with pytest.raises(UserError, match=r"mesh\.tensor 5 does not divide the teacher's 12 attention heads"):
        check_teacher_heads(BERT_BASE, mesh)


def test_plan_of_mobilebert():
    """The student has as many layers as the teacher, and its width."""
    plan = CompressOptions(recipe="mobilebert").plan(BERT_BASE)
    model = plan.model
    assert plan.layers == () and (model.num_layers, model.hidden_size, model.num_heads) == (12, 768, 12)
    sizes = model.bottleneck_size, model.intermediate_size, model.feed_forward_networks, model.size_per_head
    assert sizes == (192, 768, 4, 16) and (model.norm, model.activation) == ("none", "relu")
    narrow = CompressOptions(recipe="mobilebert", hidden_size=384, bottleneck_size=48, student_layers=6).plan(BERT_BASE)
    assert (narrow.model.num_layers, narrow.model.bottleneck_size, narrow.model.intermediate_size) == (6, 48, 384)
    assert {match.project for match in narrow.recipe.matches if match.what == "hidden"} == {"to_teacher"}
    teacher = families.ib_bert()
    assert CompressOptions(recipe="mobilebert").plan(teacher).model == dataclasses.replace(
        families.mobilebert(), hidden_dropout=teacher.hidden_dropout
    )
