#!/usr/bin/env bash
# Train a BERT on the documentation of Python and export it for other tools, in minutes on two CPU cores.
#
#   bash scripts/quickstart.sh [DIRECTORY [FLAG ...]]      default: runs/quickstart; flags go to `bert-jax pretrain`
#
# Every stage is a command that you can run on your own text. The same call continues an interrupted run.
set -euo pipefail

run=${1:+$(realpath -m "$1")}
run=${run:-runs/quickstart}
cd "$(dirname "${BASH_SOURCE[0]}")/.."
flags=("${@:2}")
bash scripts/setup_env.sh plot
venv=${BERT_JAX_VENV:-.venv}
export PATH="$(cd "$venv" && pwd)/bin:$PATH"
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu} JAX_COMPILATION_CACHE_DIR=${JAX_COMPILATION_CACHE_DIR:-$venv/jax-cache}

say() { printf '\n\033[1m%s\033[0m\n' "$*" >&2; }
step() { # print a command, then run it
    say "\$ $*"
    "$@"
}

mkdir -p "$run"
[[ -f $run/started ]] || date +%s >"$run/started"

[[ -f $run/tokenizer.json ]] ||
    step bert-data tokenizer --source python-docs --kind wordpiece --vocab-size 8192 --out "$run/tokenizer.json"
[[ -f $run/corpus/corpus.json ]] ||
    step bert-data build --source python-docs --tokenizer "$run/tokenizer.json" --out "$run/corpus" \
        --workers 2 --validation-fraction 0.03
step bert-jax pretrain bert_tiny --corpus "$run/corpus" --workdir "$run/model" "${flags[@]}"
say "\$ bert-jax evaluate $run/model --corpus $run/corpus --json > $run/heldout.json"
bert-jax evaluate "$run/model" --corpus "$run/corpus" --json >"$run/heldout.json"
[[ -d $run/export ]] || step bert-jax convert "$run/model" "$run/export" --to huggingface
step python scripts/quickstart_report.py "$run"
