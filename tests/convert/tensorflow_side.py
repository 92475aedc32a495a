"""What TensorFlow itself does in test_tensorflow_live.py. Run by a Python that has it; needs numpy besides.

python tests/convert/tensorflow_side.py write FILE.npz PREFIX     what SaveV2 writes of the arrays
python tests/convert/tensorflow_side.py read PREFIX FILE.npz      what load_checkpoint and RestoreV2 read
python tests/convert/tensorflow_side.py restore PREFIX FILE.npz   what tf.train.Saver restores into variables
"""

import os
import sys

import numpy as np

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def write(arrays: str, prefix: str) -> None:
    import tensorflow as tf

    with np.load(arrays) as file:
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=file.files,
            shape_and_slices=[""] * len(file.files),
            tensors=[tf.constant(file[name]) for name in file.files],
        )


def read(prefix: str, arrays: str) -> None:
    """bfloat16, which an npz does not know, goes as uint16."""
    import tensorflow as tf

    reader = tf.train.load_checkpoint(prefix)
    names = sorted(reader.get_variable_to_shape_map())
    dtypes = reader.get_variable_to_dtype_map()
    types = [dtypes[name] for name in names]
    restored = tf.raw_ops.RestoreV2(prefix=prefix, tensor_names=names, shape_and_slices=[""] * len(names), dtypes=types)
    out = {}
    for name, kind, array in zip(names, types, restored, strict=True):
        array = array.numpy()
        assert np.array_equal(array, reader.get_tensor(name)), name
        out[name] = array.view(np.uint16) if kind == tf.bfloat16 else array
    np.savez(arrays, **out)


def restore(prefix: str, arrays: str) -> None:
    """As Google's code starts from a checkpoint."""
    import tensorflow as tf

    v1 = tf.compat.v1
    reader = tf.train.load_checkpoint(prefix)
    dtypes = reader.get_variable_to_dtype_map()
    with tf.Graph().as_default():
        variables = {
            name: v1.get_variable(name, shape, dtypes[name], use_resource=False)
            for name, shape in reader.get_variable_to_shape_map().items()
        }
        with v1.Session() as session:
            v1.train.Saver().restore(session, prefix)
            np.savez(arrays, **session.run(variables))


if __name__ == "__main__":
    {"write": write, "read": read, "restore": restore}[sys.argv[1]](*sys.argv[2:])
