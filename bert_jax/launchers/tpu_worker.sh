#!/usr/bin/env bash
# What tpu_pod.sh runs on each host of a slice, in the copy of the clone that it made there.
#
#   bash tpu_worker.sh setup        make .venv with Python 3.12 and bert_jax in it
#   bash tpu_worker.sh run ARG...   start `bert-jax pretrain ARG...` and follow it; one that runs is only followed
#   bash tpu_worker.sh stop         have it save and end
#   bash tpu_worker.sh logs         its last lines, and those to come
#
# The run does not hang on the connection that started it. In ~/bert_jax_run lie its log, its exit code and its process.
# `run` ends with its exit code, and with a line that says so: gcloud has exit codes of its own. When a connection breaks,
# gcloud gives the same command again, which then finds the run going on.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
place=$HOME/bert_jax_run
mkdir -p "$place"
touch "$place/log"
# The lock is held for as long as the run lasts: by `attend`, which is born with it.
[[ ${1:-} == attend ]] || exec 9>>"$place/lock"

say() { printf 'tpu_worker: %s %s\n' "$(hostname)" "$*"; }

fail() {
    say "error: $*"
    exit 2
}

setup() {
    flock -n 9 || fail "a run is going on: stop it first"
    cd "$root"
    rm -rf build
    # The images of TPU hosts bring Python 3.10.
    python3 -m pip install --quiet --user 'uv>=0.5,<1'
    [[ -x .venv/bin/python ]] || python3 -m uv venv --quiet --python 3.12 .venv
    python3 -m uv pip install --quiet --python .venv/bin/python --reinstall-package bert_jax \
        --constraint constraints/tpu-py312.txt '.[tpu,gcs]'
    say "is set up"
}

attend() {
    local code=0
    "$root/.venv/bin/bert-jax" pretrain "$@" 9>&- &
    echo $! >"$place/process"
    wait $! || code=$?
    echo "$code" >"$place/code"
}

run() {
    local from code
    [[ -x $root/.venv/bin/bert-jax ]] || fail "is not set up: bash tpu_pod.sh setup ..."
    from=$(stat --format %s "$place/log")
    if flock -n 9; then
        rm -f "$place/code" "$place/stop"
        setsid bash "$0" attend "$@" >>"$place/log" 2>&1 </dev/null &
        echo $! >"$place/attendant"
    else
        say "is at it already, and is followed"
    fi
    exec 9>&-
    tail --bytes "+$((from + 1))" --follow --sleep-interval 0.2 --pid "$(<"$place/attendant")" "$place/log" || true
    code=$(cat "$place/code" 2>/dev/null || echo 75) # none: killed with its parent
    say "ended with code $code$([[ ! -e $place/stop ]] || echo ' as asked')"
    exit "$code"
}

stop() {
    ! flock -n 9 || fail "has no run"
    touch "$place/stop"
    kill -TERM "$(<"$place/process")"
    say "saves and ends"
}

case ${1:-} in
    setup | run | stop | attend) "$@" ;;
    logs) tail --lines 100 --follow "$place/log" ;;
    *) fail "say setup, run, stop or logs" ;;
esac
