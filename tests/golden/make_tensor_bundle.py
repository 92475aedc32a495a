"""Makes the checkpoints in tests/golden/tensor_bundle/ with TensorFlow, so that the quick tests do not need it.

Command, from the root of the clone, with a Python that has tensorflow-cpu:

    python -m tests.golden.make_tensor_bundle [DIRECTORY]

Made with TensorFlow 2.21.0. tensor_bundle_recipe.py describes their contents.
"""

import json
import os
import pathlib
import shutil
import sys

from tests.golden import tensor_bundle_recipe as recipe

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
DIRECTORY = pathlib.Path(__file__).parent / "tensor_bundle"


def save(prefix: pathlib.Path, build, *, sharded: bool = False, version: int = 2) -> None:
    """Write a checkpoint of the variables that `build` creates, with tf.train.Saver and without the graph."""
    import tensorflow as tf

    v1 = tf.compat.v1
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tf.Graph().as_default():
        build(v1)
        saver = v1.train.Saver(sharded=sharded, write_version=version)
        with v1.Session(config=v1.ConfigProto(device_count={"CPU": 2})) as session:
            session.run(v1.global_variables_initializer())
            saver.save(session, str(prefix), write_meta_graph=False, write_state=False)


def weights(shapes: recipe.Shapes, *, step: bool = False):
    """Variables of Google's code, alternating between two devices."""

    def build(v1):
        for number, (name, shape) in enumerate(shapes.items()):
            with v1.device(f"/cpu:{number % 2}"):
                v1.get_variable(name, initializer=recipe.values(name, shape), use_resource=False)
        if step:
            v1.get_variable("global_step", initializer=v1.constant(recipe.STEP, v1.int64), use_resource=False)

    return build


def others(v1):
    """Variables of all kinds."""
    for name, array in recipe.others().items():
        v1.get_variable(name, initializer=v1.constant(array), use_resource=False)
    v1.get_variable("bfloat16", initializer=v1.constant(recipe.BFLOAT16, v1.bfloat16), use_resource=False)
    v1.get_variable("text", initializer=v1.constant(["a", "bc"]), use_resource=False)


def partitioned(v1):
    """A variable in two slices."""
    v1.get_variable("whole", initializer=recipe.values("whole", (3,)), use_resource=False)
    v1.get_variable("sliced", (4, 2), partitioner=v1.fixed_size_partitioner(2), use_resource=False)


def main(directory: pathlib.Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    save(directory / "bert/model.ckpt-7", weights(recipe.with_slots(recipe.bert_variables()), step=True), sharded=True)
    (directory / "bert/bert_config.json").write_text(json.dumps(recipe.BERT_CONFIG, indent=2) + "\n")
    save(directory / "albert/model.ckpt-best", weights(recipe.albert_variables()))
    (directory / "albert/albert_config.json").write_text(json.dumps(recipe.ALBERT_CONFIG, indent=2) + "\n")
    save(directory / "others/others.ckpt", others)
    save(directory / "partitioned/partitioned.ckpt", partitioned)
    save(directory / "v1/v1.ckpt", weights({"a": (2,)}), version=1)
    for file in sorted(directory.rglob("*.*")):
        if file.is_file():
            print(f"{file.relative_to(directory)}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY)
