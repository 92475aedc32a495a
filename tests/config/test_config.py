"""Configs: round trip, strictness, what each error says, and what a fingerprint covers."""

import dataclasses
from typing import Any

import pytest

from bert_jax import config as config_lib
from bert_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    EvaluationConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    Phase,
    RecoveryConfig,
    StartConfig,
    TargetConfig,
    presets,
)
from bert_jax.errors import UserError


def test_round_trip():
    """Tuples become lists, and come back as tuples."""
    phase = Phase(frozen=("word",))
    config = Config(name="x", phases=(Phase(), phase), optimizer=OptimizerConfig(learning_rate_scales=(("word", 0.5),)))
    described = config_lib.to_dict(config)
    assert config_lib.from_dict(described) == config
    assert isinstance(described["phases"], list) and isinstance(described["phases"][0], dict)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.update(modle={}), "unknown field 'modle'"),
        (lambda v: v["model"].update(layers=2), "unknown field 'model.layers'"),
        (lambda v: v["phases"][0].update(lr=1.0), "unknown field 'phases.0.lr'"),
        (lambda v: v.pop("name"), "missing field 'name'"),
    ],
)
def test_keys_are_strict(change, message):
    values = config_lib.to_dict(Config(name="x"))
    change(values)
    with pytest.raises(UserError, match=message):
        config_lib.from_dict(values)


def with_objective(**settings) -> Config:
    return Config(name="x", objective=ObjectiveConfig(**settings))


def with_data(**settings) -> Config:
    return Config(name="x", data=DataConfig(**settings))


def with_phases(*phases: Phase) -> Config:
    return Config(name="x", phases=phases)


# What is asked, and the words that must be in the message: the field, its value, and what to do.
BAD = [
    (lambda: ModelConfig(vocab_size=0), "model.vocab_size is 0", "in [1, "),
    (lambda: ModelConfig(hidden_size=-1), "model.hidden_size is -1", "in [1, "),
    (lambda: ModelConfig(num_layers=0), "model.num_layers is 0", "in [1, "),
    (lambda: ModelConfig(num_heads=0), "model.num_heads is 0", "in [1, "),
    (lambda: ModelConfig(intermediate_size=0), "model.intermediate_size is 0", "in [1, "),
    (lambda: ModelConfig(num_heads=7), "model.hidden_size 768", "set model.head_size"),
    (lambda: ModelConfig(hidden_dropout=1.0), "model.hidden_dropout is 1", "[0, 1)"),
    (lambda: ModelConfig(attention_dropout=-0.1), "model.attention_dropout is -0.1", "[0, 1)"),
    (lambda: ModelConfig(attention="xla"), "model.attention 'xla'", "set model.attention_dropout 0"),
    (lambda: ModelConfig(parameter_groups=5), "model.parameter_groups 5", "model.num_layers 12"),
    (lambda: ModelConfig(parameter_groups=0), "model.parameter_groups is 0", "in [1, "),
    (lambda: ModelConfig(global_every=0), "model.global_every is 0", "in [1, "),
    (lambda: ModelConfig(scan_unroll=0), "model.scan_unroll is 0", "in [1, "),
    (lambda: ObjectiveConfig(mask_rate=0.0), "objective.mask_rate is 0", "in (0, 1)"),
    (lambda: ObjectiveConfig(mask_rate=1.0), "objective.mask_rate is 1", "in (0, 1)"),
    (lambda: ObjectiveConfig(mask_token_share=0.95), "objective.mask_token_share 0.95", "must not exceed 1"),
    (lambda: ObjectiveConfig(random_token_share=-0.1), "random_token_share is -0.1", "in [0, 1]"),
    (lambda: DataConfig(example_copies=0), "data.example_copies is 0", "or None"),
    (lambda: DataConfig(mask_copies=0), "data.mask_copies is 0", "or None"),
    (lambda: DataConfig(short_example_rate=1.5), "data.short_example_rate is 1.5", "[0, 1]"),
    (lambda: DataConfig(prefetch=0), "data.prefetch is 0", "in [1, "),
    (lambda: Phase(steps=0), "steps is 0", "in [1, "),
    (lambda: Phase(batch_size=0), "batch_size is 0", "in [1, "),
    (lambda: Phase(accumulation=0), "accumulation is 0", "in [1, "),
    (lambda: Phase(seq_len=7), "seq_len is 7", "in [8, "),
    (lambda: Phase(batch_size=10, accumulation=4), "batch_size 10", "accumulation 4"),
    (lambda: CheckpointConfig(every=0), "checkpoint.every is 0", "in [1, "),
    (lambda: CheckpointConfig(keep=0), "checkpoint.keep is 0", "in [1, "),
    (lambda: LogConfig(every=0), "log.every is 0", "in [1, "),
    (lambda: EvaluationConfig(batch_size=0), "evaluation.batch_size is 0", "in [1, "),
    (lambda: EvaluationConfig(rows=0), "evaluation.rows is 0", "in [1, "),
    (lambda: EvaluationConfig(every=-1), "evaluation.every is -1", "in [0, "),
    (lambda: ModelConfig(max_positions=0), "model.max_positions is 0", "in [1, "),
    (lambda: ModelConfig(type_vocab_size=-1), "model.type_vocab_size is -1", "in [0, "),
    (lambda: ModelConfig(embedding_size=0), "model.embedding_size is 0", "or None"),
    (lambda: ModelConfig(head_size=0), "model.head_size is 0", "in [1, "),
    (lambda: ModelConfig(head_size=5, positions="rotary"), "not 5", "set model.head_size"),
    (lambda: Phase(learning_rate=-1e-4), "learning_rate is -0.0001", "in [0, "),
    (lambda: Phase(warmup_steps=-1), "warmup_steps is -1", "in [0, "),
    (lambda: OptimizerConfig(beta1=1.0), "optimizer.beta1 is 1", "[0, 1)"),
    (lambda: OptimizerConfig(epsilon=0.0), "optimizer.epsilon is 0", "in (0, "),
    (lambda: OptimizerConfig(weight_decay=-0.01), "optimizer.weight_decay is -0.01", "in [0, "),
    (lambda: OptimizerConfig(clip_norm=0.0), "optimizer.clip_norm is 0", "or None"),
    (lambda: Config(name="x", phases=()), "phases", "at least one"),
    (lambda: DataConfig(examples_per_row=0), "data.examples_per_row is 0", "in [1, 64]"),
    (lambda: DataConfig(mixture_exponent=-0.1), "data.mixture_exponent is -0.1", "[0, 1]"),
    (lambda: DataConfig(reader_processes=-1), "data.reader_processes is -1", "in [0, "),
    (lambda: ObjectiveConfig(max_ngram=0), "objective.max_ngram is 0", "in [1, 64]"),
    (lambda: ObjectiveConfig(max_span=65), "objective.max_span is 65", "in [1, 64]"),
    (lambda: ObjectiveConfig(span_rate=0.0), "objective.span_rate is 0", "in (0, 1]"),
    (lambda: Phase(start_batch_size=8), "batch ramp", "ramp_steps"),
    (lambda: Phase(ramp_steps=8), "batch ramp", "start_batch_size"),
    (lambda: Phase(start_batch_size=100, ramp_steps=8), "start_batch_size 100", "does not divide batch_size 256"),
    (lambda: Phase(start_batch_size=64, ramp_steps=8, accumulation=1), "micro-batch of 256 rows", "raise accumulation"),
    (lambda: with_objective(mask_rate=0.003), "objective.mask_rate 0.003 rounds to no token", "use at least 0.0078"),
    (lambda: with_data(format="doc_sentences"), "objective.pair 'nsp' needs data.format segment_pair", "pair none"),
    (lambda: with_data(format="sentence_order"), "objective.pair 'nsp'", "not 'sentence_order'"),
    (lambda: with_objective(pair="sop"), "objective.pair 'sop' needs data.format sentence_order", "not 'segment_pair'"),
    (
        lambda: Config(name="x", model=ModelConfig(direction="causal")),
        "model.direction 'causal'",
        "objective.pair none",
    ),
    (lambda: OptimizerConfig(min_trust_ratio=-1.0), "optimizer.min_trust_ratio is -1", "in [0, "),
    (lambda: OptimizerConfig(min_trust_ratio=2.0, max_trust_ratio=1.0), "max_trust_ratio 1.0", "use min <= max"),
    (lambda: OptimizerConfig(learning_rate_scales=(("word", -1.0),)), "'word', -1.0", "in [0, "),
    (lambda: Phase(max_predictions=0), "max_predictions is 0", "or None"),
    (lambda: Phase(num_layers=0), "num_layers is 0", "or None"),
    (lambda: Phase(steps=10, decay_start=10), "decay_start 10", "lower it"),
    (lambda: Phase(hours=0.0), "hours is 0", "or None"),
    (lambda: Phase(moments="reset"), "moments 'reset'", "reset both"),
    (lambda: Phase(warmup_done=-1), "warmup_done is -1", "in [0, "),
    (lambda: with_phases(Phase(hours=1.0), Phase()), "phases.0.hours", "give the others steps"),
    (lambda: with_phases(Phase(num_layers=6), Phase(num_layers=3), Phase()), "num_layers shrinks", "only grow"),
    (lambda: with_phases(Phase(num_layers=6)), "phases.0.num_layers", "the last phase must have the full depth"),
    (
        lambda: with_phases(Phase(frozen=("word",)), Phase()),
        "phases.1 trains parameters that the phase before froze",
        "reset",
    ),
    (lambda: RecoveryConfig(max_skipped=0), "recovery.max_skipped is 0", "in [1, "),
    (lambda: RecoveryConfig(stable_steps=0), "recovery.stable_steps is 0", "in [1, "),
    (lambda: RecoveryConfig(max_rollbacks=-1), "recovery.max_rollbacks is -1", "in [0, "),
    (lambda: RecoveryConfig(spike=0.0), "recovery.spike is 0", "or None"),
    (lambda: TargetConfig(mlm_accuracy=1.5), "target.mlm_accuracy is 1.5", "or None"),
    (lambda: TargetConfig(every=0), "target.every is 0", "or None"),
    (lambda: StartConfig(embeddings="new"), "start.embeddings 'new'", "start.source"),
    (lambda: StartConfig(optimizer_state="keep"), "start.optimizer_state 'keep'", "start.source"),
    (lambda: StartConfig("run", "new", "keep"), "start.optimizer_state 'keep'", "new embeddings have no moments"),
    (lambda: Config(name="x", seed=-1), "seed is -1", "in [0, 2147483647]"),
    (lambda: Config(name="x", seed=2**31), "seed is 2147483648", "in [0, 2147483647]"),
    (lambda: Config(name="x", phases=(Phase(), Phase(seq_len=513))), "phases.1.seq_len 513", "model.max_positions"),
    (lambda: ModelConfig(hidden_size=10**13), "model.hidden_size is 10000000000000", "in [1, 1e7]"),
    (lambda: ModelConfig(num_layers=10**9), "model.num_layers is 1000000000", "in [1, 1e4]"),
    (lambda: ModelConfig(initializer_range=-0.02), "model.initializer_range is -0.02", "in [0, "),
    (lambda: ModelConfig(norm_epsilon=-1e-12), "model.norm_epsilon is -1e-12", "in [0, "),
    (lambda: ModelConfig(attention_window=-1), "model.attention_window is -1", "or None"),
    (lambda: Phase(learning_rate=float("inf")), "learning_rate is inf", "a number in [0, 1e30]"),
    (lambda: Phase(end_learning_rate=float("nan")), "end_learning_rate is nan", "a number in [0, 1e30]"),
    (lambda: Phase(learning_rate=10**400), "learning_rate is 1000", "a number in [0, 1e30]"),
    (lambda: Phase(steps=2**64), "steps is 18446744073709551616", "in [1, 2e9]"),
    (lambda: Phase(batch_size=10**13), "batch_size is 10000000000000", "in [1, 1e6]"),
    (lambda: Phase(steps="many"), "steps is 'many'", "a whole number"),
    (lambda: Phase(steps=True), "steps is True", "a whole number"),
    (lambda: Phase(frozen="word"), "frozen is 'word'", "a list of a string"),
    (lambda: ModelConfig(activation="swish"), "model.activation is 'swish'", "one of gelu, gelu_tanh, relu"),
    (lambda: DataConfig(reader_processes=10**13), "data.reader_processes is 10", "in [0, 1000]"),
    (lambda: MeshConfig(data=-2), "mesh.data is -2", "in [-1, "),
    (lambda: Config(name="x", phases=[Phase()]), "phases is [Phase(", "a list of Phase"),
]


@pytest.mark.parametrize(("make", "what", "remedy"), BAD, ids=[what for _, what, _ in BAD])
def test_bad_values_are_refused(make, what, remedy):
    with pytest.raises(UserError) as caught:
        make()
    message = str(caught.value)
    assert what in message and remedy in message and "\n" not in message


UNDECISIVE = {
    *(f"mesh.{name}" for name in ("data", "fsdp", "tensor")),
    *("checkpoint.every", "checkpoint.keep", "log.every", "log.tensorboard", "log.layers", "log.wandb"),
    *("recovery.max_skipped", "recovery.spike", "recovery.stable_steps", "recovery.max_rollbacks"),
    *("target.mlm_accuracy", "target.every"),
    *("evaluation.every", "evaluation.rows", "evaluation.batch_size"),
    *(
        "data.prefetch",
        "data.reader_processes",
        "data.verify",
        "model.attention",
        "model.remat",
        "model.scan_unroll",
        "phases.0.accumulation",
    ),
}
OTHER_VALUES = {
    "model.activation": "relu",
    "model.positions": "rotary",
    "model.norm_placement": "pre",
    "model.attention": "xla",
    "model.compute_dtype": "bfloat16",
    "model.remat": "full",
    "model.head_size": 32,
    "model.attention_window": 4,
    "model.parameter_groups": 1,
    "model.hidden_size": 1536,
    "model.embedding_size": 128,
    "model.feed_forward": "gated",
    "model.biases": "none",
    "model.num_heads": 6,
    "optimizer.beta1": 0.95,
    "model.num_layers": 6,
    "model.max_positions": 1024,
    "objective.mask_token_share": 0.7,
    "objective.pair": "nsp",
    "data.examples_per_row": 2,
    "data.example_copies": 10,
    "data.mask_copies": 10,
    "data.format": "doc_sentences",
    "data.example_end": "row",
    "data.mixture_exponent": 0.7,
    "data.verify": "counts",
    "model.direction": "causal",
    "objective.mask_unit": "span",
    "phases.0.start_batch_size": 128,
    "optimizer.name": "lamb",
    "optimizer.lamb_flavour": "paper",
    "optimizer.clip_norm": None,
    "optimizer.bias_correction": False,
    "optimizer.max_trust_ratio": 10.0,
    "phases.0.decay": "cosine",
    "phases.0.hours": 24.0,
    "phases.0.max_predictions": 20,
    "phases.0.num_layers": 12,
    "phases.0.step_count": "reset",
    "phases.0.moments": "reset",
    "start.embeddings": "new",
    "start.optimizer_state": "keep",
    "log.wandb": "bert",
    "target.mlm_accuracy": 0.72,
    "target.every": 1000,
    "start.source": "runs/first",
    "mesh.data": 2,
}
NEEDS = {
    "phases.0.moments": ("phases.0.step_count", "reset"),
    "start.embeddings": ("start.source", "runs/first"),
    "start.optimizer_state": ("start.source", "runs/first"),
}
"""What has to be set first."""


def changed(config: Config, path: str) -> Config:
    values = config_lib.to_dict(config)

    def set_value(path: str, make) -> None:
        *sections, name = path.split(".")
        node = values
        for section in sections:
            node = node[int(section)] if section.isdigit() else node[section]
        old, node[name] = node[name], make(node[name])
        assert node[name] != old, path

    def other(old: Any) -> Any:
        if isinstance(old, bool):
            return not old
        return old + "x" if isinstance(old, str) else old / 2 if isinstance(old, float) and old else old + 1

    if path in NEEDS:
        set_value(NEEDS[path][0], lambda old: NEEDS[path][1])
    set_value(path, (lambda old: OTHER_VALUES[path]) if path in OTHER_VALUES else other)
    return config_lib.from_dict(values)


def test_fingerprint_covers_what_decides_updates_and_nothing_else():
    model = ModelConfig(attention_dropout=0.0)
    phase = Phase(accumulation=4, start_batch_size=64, ramp_steps=10)
    base = Config(name="x", model=model, objective=ObjectiveConfig(pair="none"), phases=(phase,))
    fields = config_lib.flatten(config_lib.to_dict(base))
    assert fields.keys() >= UNDECISIVE
    before = config_lib.fingerprint(base)
    for path in fields.keys() - {"name", "model.attention_dropout", "phases.0.accumulation", "phases.0.batch_size"}:
        assert (config_lib.fingerprint(changed(base, path)) == before) == (path in UNDECISIVE), path
    dropout = dataclasses.replace(base, model=dataclasses.replace(model, attention_dropout=0.1))
    assert config_lib.fingerprint(dropout) != before
    accumulated = dataclasses.replace(base, phases=(dataclasses.replace(phase, accumulation=8),))
    assert config_lib.fingerprint(accumulated) == before
    larger = dataclasses.replace(base, phases=(dataclasses.replace(phase, batch_size=512, accumulation=8),))
    assert config_lib.fingerprint(larger) != before
    assert config_lib.fingerprint(dataclasses.replace(base, phases=(Phase(), Phase()))) != before
    frozen = dataclasses.replace(base, phases=(dataclasses.replace(phase, frozen=("word",)),))
    scaled = dataclasses.replace(base, optimizer=OptimizerConfig(learning_rate_scales=(("word", 0.5),)))
    for config in (frozen, scaled):
        assert config_lib.fingerprint(config) != before
        assert config_lib.from_dict(config_lib.to_dict(config)) == config


def test_replace_takes_dicts_for_sections():
    config = config_lib.replace(Config(name="x"), model={"num_layers": 2}, seed=3)
    assert (config.model.num_layers, config.seed, config.model.hidden_size) == (2, 3, 768)
    with pytest.raises(UserError):
        config_lib.replace(config, model={"num_layers": 0})


def test_config_files_by_path(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("from bert_jax.config import Config\ndef config():\n    return Config(name='mine', seed=4)\n")
    assert presets.load_config(str(path)).seed == 4
    with pytest.raises(UserError, match="did you mean 'bert_base'"):
        presets.load_config("bert_bse")
    with pytest.raises(UserError, match=r"must end in \.py"):
        presets.load_config(str(tmp_path / "no.json"))
    path.write_text("x = 1\n")
    with pytest.raises(UserError, match=r"no function config\(\)"):
        presets.load_config(str(path))
    path.write_text("def config():\n    return 3\n")
    with pytest.raises(UserError, match="returned a int"):
        presets.load_config(str(path))
