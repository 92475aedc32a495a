"""``bert-jax`` whose training process flips a bit of its own copy of a parameter.

Usage: flipped_bits.py FIRST LAST ARGUMENT...: after each of the steps FIRST to LAST that this process computes, counted
over rollbacks. The supervisor's child imports this file.
"""

import os
import sys
import time

PATH, BIT = "encoder/layers/up/kernel", int(os.environ.get("FLIP_BIT", "20"))


def flip(first: int, last: int) -> None:
    """Change the steps that are compiled from now on."""
    import dataclasses

    import jax

    from bert_jax.training.programs import Programs
    from tests.runs import HookedStep, flip_bit

    compile_step, computed = Programs.train_step, iter(range(1, 10**9))

    def after(step, state):
        if not first <= next(computed) <= last:
            return state
        print(f"flipped a bit after step {step} at {time.time():.3f}", file=sys.stderr)
        return dataclasses.replace(state, params=flip_bit(state.params, PATH, jax.local_devices()[0], BIT))

    Programs.train_step = lambda self, *arguments: HookedStep(compile_step(self, *arguments), None, after)


if __name__ == "__main__":
    from bert_jax.cli import main
    from bert_jax.distributed import supervisor

    call = f"from tests.multi_process import flipped_bits; flipped_bits.flip({int(sys.argv[1])}, {int(sys.argv[2])}); "
    supervisor.CHILD = supervisor.CHILD.replace("from bert_jax.cli.main", call + "from bert_jax.cli.main")
    assert call in supervisor.CHILD
    sys.exit(main.main(sys.argv[3:]))
