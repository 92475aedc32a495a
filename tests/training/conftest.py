"""What tests of training share: quick compilation, a config without extras, and a function that trains."""

import dataclasses

import pytest

from bert_jax.config import Config, EvaluationConfig, LogConfig
from bert_jax.data.mixture import CorpusWeight
from bert_jax.training import pretraining


@pytest.fixture(autouse=True, scope="module")
def quick(quick_compilation):
    """Half the time to compile; results are equal to rounding."""


@pytest.fixture(scope="session")
def plain_config(tiny_config) -> Config:
    """`tiny_config` with a line for every step, no TensorBoard, and an evaluation at the end only."""
    log, evaluation = LogConfig(every=1, tensorboard=False), EvaluationConfig(every=0, rows=8, batch_size=8)
    return dataclasses.replace(tiny_config, log=log, evaluation=evaluation)


@pytest.fixture(scope="session")
def train(tiny_corpus, tiny_programs):
    """Trains in a directory, by default on `tiny_corpus`; the hooks are those of `runs.share_programs`."""

    def train(
        config, workdir, before_step=None, after_step=None, change_task=lambda task: task, corpus=tiny_corpus, **others
    ):
        programs = tiny_programs(before_step, after_step, change_task)
        return pretraining.pretrain(config, [CorpusWeight(corpus)], workdir, make_programs=programs, **others)

    return train
