"""Studies: cells, equal budgets, and what is refused. Nothing is trained here."""

import dataclasses

import pytest

from bert_jax import config as config_lib
from bert_jax.config import Config, ModelConfig, ObjectiveConfig, Phase
from bert_jax.errors import UserError
from bert_jax.experiments import budget
from bert_jax.experiments.study import HeldOutRows, Study, load_study, study_files
from bert_jax.training.pretraining_task import train_step_flops

BASE = Config(
    name="base",
    model=ModelConfig(vocab_size=99, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32, max_positions=64),
    phases=(
        Phase(steps=90, seq_len=16, batch_size=8, warmup_steps=10),
        Phase(steps=10, seq_len=32, batch_size=4, warmup_steps=0, decay_start=4),
    ),
)
BATCHES = {"8": {}, "16": {"phases": {"batch_size": 16}}}
HEADS = {"2": {}, "4": {"model": {"num_heads": 4}}, "1": {"model": {"num_heads": 1}}}


CAUSAL = {"a": {"b": {}, "c": {"model": {"direction": "causal"}, "objective": {"pair": "none"}}}}
NARROW = dataclasses.replace(BASE.model, vocab_size=98, intermediate_size=16)
NORM = {"tasks": {"cls_norm": "layer"}}


def rate(mask_rate: float) -> dict:
    return {"objective": {"mask_rate": mask_rate}}


LONG = {"b" * 64: {}}


def grid(a: dict, b: dict) -> dict:
    """Two factors of a grid, with one level each besides the baseline's."""
    return {"factors": {"a": {"x": {}, "y": a}, "b": {"x": {}, "y": b}}, "design": "grid"}


def make_study(**changes) -> Study:
    values = {"name": "s", "base": BASE, "factors": {"heads": HEADS}, "margins": {"mlm_loss": 0.1}}
    return Study(**(values | {"rows": HeldOutRows(seq_len=32)} | changes))


def names(study: Study) -> list[str]:
    return [study.cell_name(levels) for levels in study.combinations()]


def test_combinations():
    rates = {"low": {}, "high": {"objective": {"mask_rate": 0.4}}}
    both = {"factors": {"heads": HEADS, "rate": rates}}
    assert names(make_study(**both)) == ["baseline", "heads=4", "heads=1", "rate=high"]
    assert names(make_study(**both, baseline={"heads": "4"})) == ["baseline", "heads=2", "heads=1", "rate=high"]
    grid = make_study(**both, design="grid", baseline={"heads": "1"})
    assert names(grid) == ["baseline", "rate=high", "heads=2", "heads=2,rate=high", "heads=4", "heads=4,rate=high"]
    cells = budget.make_cells(grid, 70)
    assert [(c.config.model.num_heads, c.config.objective.mask_rate) for c in cells[-2:]] == [(4, 0.15), (4, 0.4)]
    assert {cell.config.model.vocab_size for cell in cells} == {70}
    assert [cells[0].run_config(i).seed for i in range(3)] == [0, 1, 2]


def test_factors_of_one_section_are_merged():
    pair = {"nsp": {}, "sop": {"objective": {"pair": "sop"}, "data": {"format": "sentence_order"}}}
    rate = {"low": {}, "high": {"objective": {"mask_rate": 0.4}}}
    *_, last = budget.make_cells(make_study(factors={"pair": pair, "rate": rate}, design="grid"), 99)
    assert (last.config.objective.pair, last.config.objective.mask_rate) == ("sop", 0.4)


@pytest.mark.parametrize("equal", ["tokens", "flops", "steps"])
def test_equal_budgets(equal):
    deeper = {"2": {}, "4": {"model": {"num_layers": 4}}, "wide": {"model": {"intermediate_size": 400}}}
    study = make_study(factors={"batch": BATCHES, "depth": deeper}, equal=equal, tolerance=0.03)
    baseline, *others = budget.make_cells(study, 99)
    plain = {name: budget.cost_of(study.config_of(cell.levels)) for name, cell in zip("abc", others, strict=True)}
    assert any(getattr(cost, equal) != getattr(baseline.cost, equal) for cost in plain.values()) == (equal != "steps")
    for cell in others:
        assert getattr(cell.cost, equal) == pytest.approx(getattr(baseline.cost, equal), rel=0.03)


def test_steps_of_an_equal_budget_keep_the_shape_of_the_schedule():
    _, doubled = budget.make_cells(make_study(factors={"batch": BATCHES}, tolerance=0.03), 99)
    # 90 * 8 * 16 + 10 * 4 * 32 tokens; the second phase has four times the rows of its baseline.
    assert doubled.cost.tokens == pytest.approx(90 * 8 * 16 + 10 * 4 * 32, rel=0.03)
    first, second = doubled.config.phases
    assert first.warmup_steps / first.steps == pytest.approx(10 / 90, rel=0.1)
    assert 0 < second.decay_start < second.steps < 10


def test_the_last_phase_takes_what_rounding_left():
    phases = (dataclasses.replace(BASE.phases[0], steps=101),) * 5
    study = make_study(base=dataclasses.replace(BASE, phases=phases), factors={"batch": BATCHES}, tolerance=0.003)
    _, doubled = budget.make_cells(study, 99)
    assert [phase.steps for phase in doubled.config.phases] == [50, 50, 50, 50, 52]


def test_cost_is_counted_by_hand():
    cost = budget.cost_of(BASE)
    assert cost.steps == 100 and cost.tokens == 90 * 8 * 16 + 10 * 4 * 32
    assert cost.flops == 90 * train_step_flops(BASE, 0, 8) + 10 * train_step_flops(BASE, 1, 4)
    ramp = dataclasses.replace(BASE.phases[0], start_batch_size=4, ramp_steps=50)
    ramped = dataclasses.replace(BASE, phases=(ramp,))
    assert budget.cost_of(ramped).tokens == 16 * sum(ramp.batch_size_at(step) for step in range(90))


def test_equal_parameters():
    assert len(budget.make_cells(make_study(equal="parameters"), 99)) == 3
    wider = {"2": {}, "wide": {"model": {"intermediate_size": 64}}}
    with pytest.raises(
        UserError, match=r"s, ff=wide: [0-9,]+ parameters cannot .* 1.00% apart: change the level's model"
    ):
        budget.make_cells(make_study(factors={"ff": wider}, equal="parameters"), 99)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"factors": {}}, "at least one factor"),
        ({"factors": {"a": {"b": {}}}}, "study.factors.a: a factor needs at least two levels"),
        ({"factors": {"a/b": {"b": {}, "c": {}}}}, "the name 'a/b' may only have letters"),
        ({"baseline": {"head": "2"}}, "there is no factor 'head': did you mean 'heads'"),
        ({"baseline": {"heads": "3"}}, "there is no level '3'"),
        ({"margins": {"mlm_los": 1.0}}, "there is no metric 'mlm_los': did you mean 'mlm_loss'"),
        ({"margins": {"mlm_loss": 0.0}}, r"study.margins.mlm_loss is 0: it must be a number in \(0, 1e30\]"),
        ({"margins": {"mlm_loss": float("inf")}}, "study.margins.mlm_loss is inf: it must be a number"),
        ({"margins": {"mlm_loss": 0.1, "sop_accuracy": 0.1}}, "margins.sop_accuracy: no cell has this metric"),
        ({"factors": CAUSAL}, "margins: the baseline and the other cells have none of mlm_loss in common"),
        (
            {"factors": {"a": {"b": {}, "c": {"tasks": {"cls_norm": "layer"}}}}, "tasks": {"sst2": {}}},
            "or share the runs",
        ),
        ({"margins": {}}, "name at least one of mlm_loss"),
        ({"factors": {"a": {"b": {}, "c": {"phases": {"steps": 10**5000}}}}}, "a c: phases: steps is a number of more"),
        ({"margins": {"mlm_loss": 10**5000}}, "study.margins.mlm_loss is a number of more than 3,000 digits: it must"),
        (
            {"factors": {f"f{i}": {"b": {}, "c": {}} for i in range(10)}, "design": "grid"},
            "study.factors: 1,024 combinations of levels, and a study has at most 1,000",
        ),
        (
            {"factors": {"x" * 64: LONG | {"c" * 64: rate(0.2)}, "y" * 64: LONG | {"c" * 64: {"seed": 9}}}}
            | {"design": "grid"},
            "the name of the cell x.* has 259 characters, and a directory at most 240",
        ),
        ({"equal": "time"}, "study.equal is 'time'"),
        ({"seeds": 0}, "study.seeds is 0"),
        ({"seeds": 1001}, r"study.seeds is 1001: it must be a whole number in \[1, 1000\]"),
        ({"factors": {"a": {"b": {}, "c": {"modle": {}}}}}, "a c: there is no field 'modle': did you mean 'model'"),
        ({"factors": {"a": {"b": {}, "c": {"model": {"depth": 3}}}}}, "a c, model: there is no field 'depth'"),
        ({"factors": {"a": {"b": {}, "c": {"phases": {"step": 3}}}}}, "a c, phases: there is no field 'step'"),
        ({"factors": {"a": {"b": {}, "c": {"phases": {"steps": 0}}}}}, "a c: phases: steps is 0"),
        ({"factors": {"a": {"b": {}, "c": {"model": {"num_heads": 3}}}}}, "a=c: model.hidden_size 16 is not divisible"),
        ({"factors": {"a": {"b": {}, "c": {"model": {"vocab_size": 9}}}}}, "different tokenizers cannot be compared"),
        ({"factors": {"a": {"b": {}, "c": {"model": BASE.model}}}}, "a=c: model.vocab_size 99 is not that of .*, 98"),
        ({"factors": {"a": {"b": {}, "c": {"model": 3}}}}, "a=c: model is 3: it must be an object"),
        ({"factors": {"a": {"b": {}, "c": {"phases": 3}}}}, "a=c: phases is 3: it must be a list"),
        ({"factors": {"a": {"b": {}, "c": {"phases": [3]}}}}, "a=c: phases.0 is 3: it must be an object"),
        ({"factors": {"a": {"b": {}, "c": {"name": "zz"}}}}, "a c: there is no field 'name'"),
        ({"factors": {"a": {"b": {}, "c": {"seed": {}}}}}, "a c: seed is {}: it has no fields, give a value"),
        ({"factors": {"a": {"b": {}, "c": {"model": {3: 1}}}}}, "a c, model: there is no field '3': use vocab_size,"),
        ({"factors": {"a": {"b": {}, "c": {"tasks": 3}}}, "tasks": {"sst2": {}}}, "tasks is 3: it must be a dict"),
        (grid(rate(0.2), rate(0.4)), r"a and b both change objective.mask_rate \(a=y, b=y\)"),
        (grid(rate(0.2), {"objective": ObjectiveConfig(mask_rate=0.3)}), "a and b both change objective.mask_rate"),
        (grid({"model": {"num_heads": 1}}, {"model": NARROW}), "a and b both change model.num_heads"),
        (
            grid({"phases": {"learning_rate": 0.1}}, {"phases": BASE.phases[:1]}),
            "a and b both change phases.learning_rate",
        ),
        (grid({"seed": 9}, {"seed": 19}), "a and b both change seed"),
        (grid(NORM, {"tasks": {"cls_norm": "batch"}}) | {"tasks": {"sst2": {}}}, "a and b both change tasks.cls_norm"),
        ({"factors": {"a": {"x": {}, "y": {}}}}, "s, a=y and baseline would have equal runs"),
        ({"factors": {"a": {"x": {}, "y": rate(0.15)}}}, "s, a=y and baseline would have equal runs"),
        ({"factors": {"a": {"x": {}, "y": {"seed": 2}}}}, "s, a=y and baseline would have equal runs"),
        ({"factors": {"a": {"x": {}, "y": rate(0.2), "z": rate(0.2)}}}, "s, a=z and a=y would have equal runs"),
        ({"factors": {"a": {"b": {}, "c": {"target": {"mlm_accuracy": 0.7}}}}}, "unset target.mlm_accuracy"),
        ({"rows": HeldOutRows(seq_len=128)}, "rows.seq_len 128 is longer than the position table"),
        ({"factors": {"a": {"b": {}, "c": {"phases": {"batch_size": 700}}}}}, "use more steps, or raise tolerance"),
    ],
)
def test_bad_studies(changes, message):
    with pytest.raises(UserError, match=message):
        budget.make_cells(make_study(**changes), 98)


def test_cells_with_equal_configs_that_are_no_equal_runs():
    """Other seeds, or other tasks; pretraining metrics of the same runs are not compared."""
    other, margins = {"x": {}, "y": {"seed": 3}}, {"mlm_loss": 0.1, "sst2": 0.1}
    study = make_study(factors={"a": other, "b": {"x": {}, "y": NORM}}, tasks={"sst2": {}}, margins=margins)
    baseline, seed, norm = budget.make_cells(study, 98)
    assert baseline.metrics == seed.metrics == norm.metrics == ("mlm_loss", "sst2")
    assert seed.pretrained == "a=y" and norm.pretrained == "baseline"


@pytest.mark.parametrize("name", list(study_files()))
def test_shipped_studies(name):
    """Every cell has a valid config and the stated budget."""
    study = load_study(name)
    assert study.name == name
    cells = budget.make_cells(study, study.base.model.vocab_size)
    assert len({cell.name for cell in cells}) == len(cells) >= 2
    baseline = cells[0].cost
    for cell in cells:
        assert getattr(cell.cost, study.equal) == pytest.approx(getattr(baseline, study.equal), rel=study.tolerance)


def test_changed_plain_values_show():
    plain = make_study().to_dict()
    assert plain == make_study().to_dict() and plain["baseline"] == {"heads": "2"}
    assert plain != make_study(margins={"mlm_loss": 0.2}).to_dict()
    changed = make_study(base=config_lib.replace(BASE, phases=(BASE.phases[0],)))
    assert plain != changed.to_dict()
