"""`bert-jax bench` for a machine where bert_jax is not installed: PYTHONPATH=. python scripts/benchmarks/bench.py"""

from bert_jax.bench.bench import main

if __name__ == "__main__":
    raise SystemExit(main())
