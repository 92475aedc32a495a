#!/usr/bin/env bash
# Set up the environment, then check style, imports and behaviour.
#
#   bash scripts/test.sh             the quick set: at most 15 minutes on 2 cores, without torch
#   bash scripts/test.sh --all       everything: live parity with torch + transformers, Apache Beam, S3: at most 45 minutes
#   bash scripts/test.sh -k masking  further arguments go to pytest
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${BERT_JAX_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$root/$venv

extras=(test plot formats)
all=false
arguments=(--durations=10)
for argument in "$@"; do
    if [[ $argument == --all ]]; then
        all=true
    else
        arguments+=("$argument")
    fi
done
if $all; then extras+=(parity beam stores); fi

bash scripts/setup_env.sh "${extras[@]}"

export PATH=$venv/bin:$PATH
export PYTHONNOUSERSITE=1
export JAX_PLATFORMS=cpu
# Tests, and the processes they start, share compiled programs; a second run finds those of the first.
export JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$venv/jax-cache}
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
export JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
# No test may need the network.
export HF_HUB_OFFLINE=1

failed=()
check() {
    local started=$SECONDS
    printf '\n== %s\n' "$1"
    "${@:2}" || failed+=("$1")
    printf -- '-- %s: %d s\n' "$1" $((SECONDS - started))
}

# In a process of their own: Beam and Dask leave threads behind, and JAX's profiler looks into every thread.
beam_tests() {
    python -m pytest -m beam "${arguments[@]}" || (($? == 5)) # 5: `-k` and the like left none
}

check "ruff check" ruff check .
check "ruff format" ruff format --check .
check "import contracts" lint-imports
if $all; then
    check "pytest" python -m pytest -m "not beam" "${arguments[@]}"
    check "pytest, Beam" beam_tests
else
    check "pytest" python -m pytest -m "not slow" "${arguments[@]}"
fi

if ((${#failed[@]})); then
    printf '\nFAILED:'
    printf ' %s;' "${failed[@]}"
    printf '\n'
    exit 1
fi
printf '\nall passed in %d s\n' "$SECONDS"
