"""`bert-jax bench`: the speed of the train step beside the device's limits and a peer library; parts of benchmarks."""
