"""Configs: round trip, strictness, what each error says, and what a fingerprint covers."""

import contextlib
import dataclasses
import math
import typing

import pytest

from bert_jax import config as config_lib
from bert_jax.config import (
    CheckpointConfig,
    Config,
    DataConfig,
    DistilConfig,
    EvaluationConfig,
    FinetuneConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    Phase,
    RecoveryConfig,
    StartConfig,
    TargetConfig,
    TaskHead,
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
        (lambda v: v.pop("name"), "field 'name' is missing"),
    ],
)
def test_keys_are_strict(change, message):
    values = config_lib.to_dict(Config(name="x"))
    change(values)
    with pytest.raises(UserError, match=message):
        config_lib.from_dict(values)


def with_objective(**settings) -> Config:
    return Config(name="x", objective=ObjectiveConfig(**settings))


def with_rtd(**settings) -> Config:
    """Replaced-token detection; settings of the model or of the objective."""
    known = {field.name for field in dataclasses.fields(ModelConfig)}
    objective = {"token": "rtd", "pair": "none", "random_token_share": 0.0}
    objective |= {name: value for name, value in settings.items() if name not in known}
    model = ModelConfig(**{name: value for name, value in settings.items() if name in known})
    return Config(name="x", model=model, objective=ObjectiveConfig(**objective))


def with_data(**settings) -> Config:
    return Config(name="x", data=DataConfig(**settings))


TAGGER = TaskHead("tagging", ("O", "X"), "tokens")


def with_head(**changes) -> FinetuneConfig:
    return FinetuneConfig("rte", dataclasses.replace(TAGGER, **changes), "bert", 8, 64)


def with_layer_decay(**model) -> Config:
    return Config(name="x", model=ModelConfig(**model), optimizer=OptimizerConfig(layer_decay=0.8))


def with_phases(*phases: Phase, **model) -> Config:
    return Config(name="x", model=ModelConfig(**model), phases=phases)


def with_long_rows(**model) -> Config:
    return with_phases(Phase(seq_len=4096), max_positions=4096, **model)


def with_rotary(*phases: Phase) -> Config:
    return with_phases(*phases, positions="rotary")


CAUSAL, UNPAIRED = Phase(direction="causal"), with_objective(pair="none")


def causal_first(config: Config, **settings) -> Config:
    return dataclasses.replace(config, phases=(dataclasses.replace(CAUSAL, **settings), Phase()))


SECTIONS = {
    "model": ModelConfig,
    "objective": ObjectiveConfig,
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "phases": Phase,
    "mesh": MeshConfig,
    "checkpoint": CheckpointConfig,
    "log": LogConfig,
    "evaluation": EvaluationConfig,
    "recovery": RecoveryConfig,
    "target": TargetConfig,
}
# Section, fields, a value that is refused, and words of the message.
OUT_OF_RANGE = [
    ("model", "vocab_size hidden_size num_layers num_heads intermediate_size", 0, "in [1, "),
    ("model", "max_positions head_size global_every scan_unroll", 0, "in [1, "),
    ("model", "embedding_size parameter_groups", 0, "or None"),
    ("model", "type_vocab_size position_offset initializer_range norm_epsilon", -1, "in [0, "),
    ("model", "attention_window", -1, "or None"),
    ("model", "hidden_dropout attention_dropout", 1.0, "in [0, 1)"),
    ("model", "hidden_dropout attention_dropout", -0.1, "in [0, 1)"),
    ("model", "hidden_size", 10**13, "in [1, 1e7]"),
    ("model", "num_layers", 10**9, "in [1, 1e4]"),
    ("model", "activation", "swish", "one of gelu, gelu_tanh, relu"),
    ("objective", "mask_rate", 0.0, "in (0, 1)"),
    ("objective", "mask_rate", 1.0, "in (0, 1)"),
    ("objective", "mask_token_share random_token_share", -0.1, "in [0, 1]"),
    ("objective", "max_ngram max_span", 0, "in [1, 64]"),
    ("objective", "max_ngram max_span", 65, "in [1, 64]"),
    ("objective", "span_rate", 0.0, "in (0, 1]"),
    ("data", "example_copies mask_copies", 0, "or None"),
    ("data", "short_example_rate", 1.5, "in [0, 1]"),
    ("data", "mixture_exponent language_exponent", -0.1, "in [0, 1]"),
    ("data", "prefetch", 0, "in [1, "),
    ("data", "examples_per_row", 0, "in [1, 64]"),
    ("data", "reader_processes", -1, "in [0, "),
    ("data", "reader_processes", 10**13, "in [0, 1000]"),
    ("optimizer", "beta1 beta2", 1.0, "in [0, 1)"),
    ("optimizer", "epsilon", 0.0, "in (0, "),
    ("optimizer", "weight_decay min_trust_ratio", -0.01, "in [0, "),
    ("optimizer", "clip_norm max_trust_ratio", 0.0, "or None"),
    ("phases", "steps batch_size accumulation", 0, "in [1, "),
    ("phases", "seq_len", 7, "in [8, "),
    ("phases", "learning_rate end_learning_rate warmup_steps warmup_done decay_start", -1, "in [0, "),
    ("phases", "max_predictions num_layers hours", 0, "or None"),
    ("phases", "learning_rate", math.inf, "a number in [0, 1e30]"),
    ("phases", "end_learning_rate", math.nan, "a number in [0, 1e30]"),
    ("phases", "steps", 2**64, "in [1, 2e9]"),
    ("phases", "batch_size", 10**13, "in [1, 1e6]"),
    ("phases", "steps", "many", "a whole number"),
    ("phases", "steps", True, "a whole number"),
    ("phases", "frozen", "word", "a list, each item a string"),
    ("mesh", "data fsdp tensor", -2, "in [-1, "),
    ("checkpoint", "every keep", 0, "in [1, "),
    ("log", "every", 0, "in [1, "),
    ("evaluation", "batch_size rows", 0, "in [1, "),
    ("evaluation", "every", -1, "in [0, "),
    ("recovery", "max_skipped stable_steps", 0, "in [1, "),
    ("recovery", "max_rollbacks replica_check_every", -1, "in [0, "),
    ("recovery", "spike", 0.0, "or None"),
    ("target", "mlm_accuracy", 1.5, "or None"),
    ("target", "every_rows", 0, "or None"),
]


def refused(make) -> str:
    with pytest.raises(UserError) as caught:
        make()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("section", "names", "value", "allowed"), OUT_OF_RANGE)
def test_values_out_of_range_are_refused(section, names, value, allowed):
    shown = f"{value:.6g}" if type(value) is float else repr(value)
    for name in names.split():
        message = refused(lambda name=name: SECTIONS[section](**{name: value}))
        assert message.startswith(section) and f"{name} is {shown}: it must be " in message and allowed in message


# What contradicts itself, the words of the message that name it, and those that say what to do.
CONTRADICTIONS = [
    (lambda: DataConfig(language_weights=(("de", 1), ("de", 2))), "data.language_weights has a value twice", "de, de"),
    (lambda: DataConfig(source_weights=(("a", -1.0),)), "data.source_weights.0.1 is -1", "in [0, 1e30]"),
    (lambda: DataConfig(score_weights=((math.nan, 1.0),)), "data.score_weights.0.0 is nan", "in [-1e30, 1e30]"),
    (
        lambda: CheckpointConfig(every=20, keep_every=50),
        "keep_every 50 is not a multiple of checkpoint.every 20",
        "one",
    ),
    (lambda: ModelConfig(num_heads=7), "model.hidden_size 768", "set model.head_size"),
    (lambda: ModelConfig(attention="xla"), "model.attention 'xla'", "set model.attention_dropout 0"),
    (lambda: ModelConfig(attention="pallas_gpu", head_size=24), "'pallas_gpu' has no kernels", "reference"),
    (lambda: with_phases(Phase(seq_len=96), attention="pallas_gpu"), "phases.0.seq_len 96 is not a multiple", "64"),
    (lambda: with_phases(Phase(seq_len=192), attention="pallas_tpu"), "phases.0.seq_len 192 is not a multiple", "128"),
    (lambda: with_long_rows(attention="pallas_tpu"), "seq_len 4096 is longer than 1024", "xla or reference"),
    (lambda: ModelConfig(parameter_groups=5), "model.parameter_groups 5", "model.num_layers 12"),
    (lambda: ModelConfig(head_size=5, positions="rotary"), "not 5", "set model.head_size"),
    (lambda: ObjectiveConfig(mask_token_share=0.95), "objective.mask_token_share 0.95", "must not exceed 1"),
    (lambda: with_rtd(generator_width=1.5), "objective.generator_width 1.5 makes the generator wider", "at most 1"),
    (lambda: with_rtd(generator_width=0.3), "generator_width 0.3 gives a generator of width 230", "e.g. 0.08"),
    (lambda: with_rtd(random_token_share=0.1), "objective.random_token_share is 0.1", "set it to 0"),
    (lambda: with_rtd(pair="nsp"), "objective.pair 'nsp' does not go with objective.token 'rtd'", "pair none"),
    (lambda: with_rtd(direction="causal"), "model.direction 'causal' predicts the next token", "objective.token mlm"),
    (lambda: with_rtd(bottleneck_size=64, num_heads=4), "'rtd' has no generator for models with", "mlm"),
    (lambda: config_lib.replace(with_rtd(), target={"mlm_accuracy": 0.7}), "target.mlm_accuracy: only a", "unset it"),
    (lambda: config_lib.replace(with_rtd(), distil=DistilConfig()), "'rtd' has no distillation", "token mlm"),
    (lambda: OptimizerConfig(min_trust_ratio=2.0, max_trust_ratio=1.0), "max_trust_ratio 1.0", "use min <= max"),
    (lambda: OptimizerConfig(learning_rate_scales=(("a", -1.0),)), "learning_rate_scales.0.1 is -1", "in [0, "),
    (lambda: OptimizerConfig(reduce_dtype="float16"), "optimizer.reduce_dtype is 'float16'", "bfloat16"),
    (lambda: OptimizerConfig(layer_decay=0.0), "layer_decay is 0", "(0, 1]"),
    (lambda: with_layer_decay(parameter_groups=1), "model.parameter_groups 1 shares", "set optimizer.layer_decay 1"),
    (lambda: with_head(reads="mean", cls_norm="centre"), "finetune.head.cls_norm 'centre'", "cls_norm none"),
    (lambda: with_head(labels=()), "finetune.head.labels", "at least one label"),
    (lambda: Phase(batch_size=10, accumulation=4), "batch_size 10", "accumulation 4"),
    (lambda: Phase(start_batch_size=8), "batch ramp", "ramp_steps"),
    (lambda: Phase(ramp_steps=8), "batch ramp", "start_batch_size"),
    (lambda: Phase(start_batch_size=100, ramp_steps=8), "start_batch_size 100", "does not divide batch_size 256"),
    (lambda: Phase(start_batch_size=64, ramp_steps=8, accumulation=1), "micro-batch of 256 rows", "raise accumulation"),
    (lambda: Phase(steps=10, decay_start=10), "decay_start 10", "lower it"),
    (lambda: Phase(moments="reset"), "moments 'reset'", "reset both"),
    (lambda: Phase(learning_rate=10**400), "learning_rate is 1000", "a number in [0, 1e30]"),
    (lambda: StartConfig(embeddings="new"), "start.embeddings 'new'", "start.source"),
    (lambda: StartConfig(optimizer_state="keep"), "start.optimizer_state 'keep'", "set start.source"),
    (lambda: StartConfig("run", embeddings="new", optimizer_state="keep"), "'keep'", "new embeddings have no moments"),
    (lambda: with_objective(mask_rate=0.003), "objective.mask_rate 0.003 rounds to no token", "use at least 0.0078"),
    (lambda: Config("x", ModelConfig(), phases=(Phase(mask_rate=0.003),)), "phases.0.mask_rate 0.003 rounds", "0.0078"),
    (lambda: Phase(mask_rate=1.5), "mask_rate is 1.5", "(0, 1)"),
    (lambda: Phase(corpus_weights=(("a", 0.0),)), "corpus_weights gives all corpora the weight 0 (a)", "positive"),
    (lambda: Phase(corpus_weights=(("a", 1.0), ("a", 2.0))), "corpus_weights names a corpus twice", "a, a"),
    (lambda: Phase(end_mask_rate=-0.1), "end_mask_rate is -0.1", "(0, 1)"),
    (lambda: Phase(end_mask_rate=0.1, hours=1.0), "end_mask_rate with hours", "leave one of them out"),
    (lambda: with_phases(Phase(end_mask_rate=0.003)), "phases.0.end_mask_rate 0.003 rounds", "at least 0.0078"),
    (lambda: with_phases(Phase(end_mask_rate=0.99)), "phases.0.end_mask_rate 0.99 needs 127 predictions", "lower it"),
    (lambda: with_objective(mask_rate=0.985), "mask_rate 0.985 needs 126 predictions in rows of 128", "125 to"),
    (lambda: with_phases(Phase(direction="causal"), Phase()), "phases.0.direction 'causal'", "pair none"),
    (lambda: causal_first(with_rtd()), "phases.0.direction 'causal' predicts the next token", "objective.token mlm"),
    (lambda: causal_first(UNPAIRED, end_mask_rate=0.1), "phases.0.end_mask_rate 0.1: a causal model", "leave it out"),
    (lambda: config_lib.replace(UNPAIRED, phases=(CAUSAL,)), "phases.0.direction causal is not", "the last phase must"),
    (lambda: ModelConfig(rotary_base=5e4), "model.rotary_base 50000 has no effect", "set model.positions rotary"),
    (lambda: with_phases(Phase(rotary_base=1e5), Phase()), "phases.0.rotary_base 100000", "model.positions 'rotary'"),
    (lambda: with_rotary(Phase(local_rotary_base=1e5), Phase()), "needs model.attention_window", "leave this out"),
    (lambda: with_rotary(Phase(rotary_base=1e5)), "phases.0.rotary_base 100000.0 is not", "change model.rotary_base"),
    (lambda: with_objective(pair="sop"), "objective.pair 'sop' needs data.format sentence_order", "not 'segment_pair'"),
    (lambda: with_data(format="doc_sentences"), "objective.pair 'nsp' needs data.format segment_pair", "pair none"),
    (lambda: with_data(format="sentence_order"), "objective.pair 'nsp'", "not 'sentence_order'"),
    (lambda: Config(name="x", model=ModelConfig(direction="causal")), "model.direction 'causal'", "pair none"),
    (lambda: Config(name="x", seed=-1), "seed is -1", "in [0, 2147483647]"),
    (lambda: Config(name="x", seed=2**31), "seed is 2147483648", "in [0, 2147483647]"),
    (lambda: Config(name="x", phases=[Phase()]), "phases is [Phase(", "a list, each item an object"),
    (lambda: with_phases(), "phases", "at least one"),
    (lambda: with_phases(Phase(), Phase(seq_len=513)), "phases.1.seq_len 513", "model.max_positions"),
    (lambda: with_phases(Phase(hours=1.0), Phase()), "phases.0.hours", "give the others steps"),
    (lambda: with_phases(Phase(num_layers=6), Phase(num_layers=3), Phase()), "num_layers shrinks", "only grow"),
    (lambda: with_phases(Phase(num_layers=6)), "phases.0.num_layers 6 is not model.num_layers", "the last phase must"),
    (lambda: with_phases(Phase(frozen=("word",)), Phase()), "phases.1 trains parameters that", "froze (word)"),
]


@pytest.mark.parametrize(("make", "what", "remedy"), CONTRADICTIONS, ids=[what for _, what, _ in CONTRADICTIONS])
def test_contradictions_are_refused(make, what, remedy):
    message = refused(make)
    assert what in message and remedy in message


UNDECISIVE = """
    mesh.data mesh.fsdp mesh.tensor checkpoint.every checkpoint.every_minutes checkpoint.keep checkpoint.keep_every
    checkpoint.keep_best checkpoint.local_directory checkpoint.local_every
    log.every log.tensorboard log.layers log.wandb log.prometheus_port
    recovery.max_skipped recovery.max_skipped_share recovery.spike recovery.stable_steps recovery.max_rollbacks
    recovery.rollback_steps recovery.max_starts recovery.replica_check_every recovery.stall_seconds
    target.mlm_accuracy target.every_rows
    evaluation.every evaluation.rows evaluation.batch_size data.prefetch data.reader_processes data.verify
    data.cache_dir data.cache_limit_gb
    model.attention model.remat model.scan_unroll phases.0.accumulation
"""
NEEDS = {
    "model.embeddings": {"embedding_size": 128},
    "objective.token": {"random_token_share": 0.0},
    "phases.0.moments": {"step_count": "reset"},
    "start.embeddings": {"source": "runs/first"},
    "start.generator": {"source": "runs/first"},
    "start.optimizer_state": {"source": "runs/first"},
}
"""What must be set with a field, in its section."""
OTHER_VALUES = {
    "checkpoint.keep_every": [2000],
    "model.bottleneck_size": [48],
    "phases.0.direction": ["bidirectional"],
    "phases.0.rotary_base": [10000.0],
    "phases.0.local_rotary_base": [10000.0],
    "data.language_weights": [[["de", 2.0]]],
    "data.source_weights": [[["web", 2.0]]],
    "data.score_weights": [[[3.0, 2.0]]],
    "finetune": [dataclasses.asdict(FinetuneConfig("rte", TAGGER, "bert", 8, 64))],
    "distil": [dataclasses.asdict(DistilConfig(source_sha256="0"))],
}
"""Values to try where no simple one is possible."""


def changed(config: Config, path: str) -> Config:
    """The config with the first other value of a field that it can have."""
    sections, _, name = path.rpartition(".")
    values = config_lib.to_dict(config)
    section = values
    for key in sections.split(".") if sections else ():
        section = section[int(key) if key.isdigit() else key]
    section |= NEEDS.get(path, {})
    old = section[name]
    kind = typing.get_type_hints(type_of(config, sections))[name]
    simple = [old + 1, old * 2, old // 2, old / 2] if type(old) in (int, float) else [not old, "y"]
    literals = [value for value in typing.get_args(kind) if not isinstance(value, type)]
    for value in [*OTHER_VALUES.get(path, ()), *literals, *simple, 1, 0.5, 12, None]:
        section[name] = value
        with contextlib.suppress(UserError):
            made = config_lib.from_dict(values)
            if made != config:
                return made
    raise AssertionError(path)


def type_of(config: Config, path: str) -> type:
    """The class of a section."""
    return Config if not path else Phase if path.startswith("phases") else type(getattr(config, path))


def test_fingerprint_covers_what_decides_updates_and_nothing_else():
    model = ModelConfig(attention_dropout=0.0, positions="rotary", attention_window=64)
    phase = Phase(accumulation=4, start_batch_size=64, ramp_steps=10)
    base = Config(name="x", model=model, objective=ObjectiveConfig(pair="none"), phases=(phase,))
    fields = config_lib.flatten(config_lib.to_dict(base))
    assert fields.keys() >= {*UNDECISIVE.split()}
    before = config_lib.fingerprint(base)
    for path in fields:
        assert (config_lib.fingerprint(changed(base, path)) == before) == (path in UNDECISIVE.split()), path
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
