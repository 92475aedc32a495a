#!/usr/bin/env bash
# tpu_pod.sh runs this on each host of a slice, in its copy of the clone.
#
#   bash tpu_worker.sh setup        create .venv with Python 3.12 and bert_jax
#   bash tpu_worker.sh run ARG...   start `bert-jax pretrain ARG...` and follow it; if it is running, only follow it
#   bash tpu_worker.sh stop         make the run save and end
#   bash tpu_worker.sh logs         print the last lines of the log, and follow it
#
# The run survives a lost connection. Its log, exit code and process id are in ~/bert_jax_run. `run` ends with the exit
# code of the run and prints it in its last line, because gcloud has exit codes of its own. When a connection breaks,
# gcloud repeats the command, which then follows the run that is in progress.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
run_dir=$HOME/bert_jax_run
mkdir -p "$run_dir"
touch "$run_dir/log"
# `supervise` inherits the lock from `run`, and holds it until the run ends.
[[ ${1:-} == supervise ]] || exec 9>>"$run_dir/lock"

log() { printf 'tpu_worker: %s %s\n' "$(hostname)" "$*"; }

fail() {
    log "error: $*"
    exit 2
}

setup() {
    flock -n 9 || fail "a run is in progress: stop it first"
    cd "$root"
    rm -rf build
    # The images of TPU hosts have Python 3.10.
    python3 -m pip install --quiet --user 'uv>=0.5,<1'
    [[ -x .venv/bin/python ]] || python3 -m uv venv --quiet --python 3.12 .venv
    python3 -m uv pip install --quiet --python .venv/bin/python --reinstall-package bert_jax \
        --constraint constraints/tpu-py312.txt '.[tpu,gcs]'
    log "is set up"
}

supervise() {
    local code=0
    cd "$root" # where a config is configs/mine.py, as in the clone
    "$root/.venv/bin/bert-jax" pretrain "$@" 9>&- &
    echo $! >"$run_dir/process"
    wait $! || code=$?
    echo "$code" >"$run_dir/code"
}

run() {
    local from code
    [[ -x $root/.venv/bin/bert-jax ]] || {
        log "is not set up: bash tpu_pod.sh setup ..."
        exit 127 # as without this script
    }
    from=$(stat --format %s "$run_dir/log")
    if flock -n 9; then
        rm -f "$run_dir/code" "$run_dir/stop"
        setsid bash "$0" supervise "$@" >>"$run_dir/log" 2>&1 </dev/null &
        echo $! >"$run_dir/supervisor"
    else
        log "has a run in progress, which is followed"
    fi
    exec 9>&-
    tail --bytes "+$((from + 1))" --follow --sleep-interval 0.2 --pid "$(<"$run_dir/supervisor")" "$run_dir/log" || true
    code=$(cat "$run_dir/code" 2>/dev/null || echo 75) # no file: the run was killed together with `supervise`
    log "ended with code $code$([[ ! -e $run_dir/stop ]] || echo ' as requested')"
    exit "$code"
}

stop() {
    ! flock -n 9 || fail "has no run"
    touch "$run_dir/stop"
    kill -TERM "$(<"$run_dir/process")"
    log "saves and ends"
}

case ${1:-} in
    setup | run | stop | supervise) "$@" ;;
    logs) tail --lines 100 --follow "$run_dir/log" ;;
    *) fail "give setup, run, stop or logs" ;;
esac
