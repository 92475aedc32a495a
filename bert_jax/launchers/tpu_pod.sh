#!/usr/bin/env bash
# Pretrain on a Cloud TPU slice, on demand or spot: made, set up, run on all hosts, made again when it is taken away.
#
#   bash tpu_pod.sh VERB --name NAME --zone ZONE [--type TYPE] [OPTION ...] [-- CONFIG --corpus gs://... ...]
#
# VERB is one of
#   create   ask for the slice (a queued resource) and wait until it is there
#   setup    copy the code of a clone of bert_jax to all hosts, and install it there with the extras tpu and gcs and with
#            constraints/tpu-py312.txt
#   run      create and set up if there is no slice, then `bert-jax pretrain` on all hosts, until it has ended
#   stop     have the run save and end; `run` continues it
#   logs     the log of host 0, as it grows
#   delete   give the slice back; what it was asked with, too
#
# Behind `--` stands what `bert-jax pretrain` takes (`run` only). --corpus and --workdir must be in buckets (gs://...):
# the disks of hosts go with the slice. A CONFIG that is a file must lie in the clone, as in configs/mine.py.
#
# Options
#   --name NAME           of the slice, and of its queued resource
#   --zone ZONE           as in europe-west4-a; without it gcloud's own setting is not used: places decide prices
#   --type TYPE           (create, run) v2-8 to v2-512, v3-8 to v3-2048, v4-8 to v4-8192, v5litepod-1 to -256, v5p-8 to
#                         v5p-12288, v6e-1 to v6e-256. Numbers count cores, for v5litepod and v6e chips
#   --spot                (create, run) cheaper, and may be taken away at any time
#   --runtime VERSION     (create, run) image of the hosts; without it, the one that belongs to the type
#   --project PROJECT     without it, gcloud's own setting
#   --clone DIR           (setup, run) the clone of bert_jax; without it, the one that holds this script, or else the
#                         working directory
#   --max-restarts N      (run) how often it is started again (100)
#   --poll SECONDS        between looks at a slice that is awaited, and before a restart (30)
#   --dry-run             print the commands, one per line, and run none; gcloud need not be there. A slice is taken not
#                         to exist yet
#
# `run` starts again when the run ends with exit code 75 (saved, or a host is gone), when the connection breaks, and, on
# a new slice, when the state of the old one is not READY. It follows a run that goes on already. Of two launchers with
# one name, each would undo what the other does: start one.
#
# Exit codes: 0 done; 1 a bug; 2 a mistake, said in one line; 75 not over yet, and the same command continues it.
# Needs bash 4.4, gcloud with a login, and hosts that reach the internet (PyPI, GitHub) and the buckets.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
content=(LICENSE README.md setup.cfg setup.py constraints bert_jax data_prep configs)
worker='bash bert_jax/tpu_worker.sh'

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*" >&2; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

refused() { fail "that did not succeed: the reason is above"; }

quoted() { # the words of a command, as a shell reads them
    local word line=
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
        line+="${line:+ }$word"
    done
    printf '%s\n' "$line"
}

# ---------------------------------------------------------------- what was asked

parse() {
    verb=${1:-}
    case $verb in
        create | setup | run | stop | logs | delete) shift ;;
        *) fail "say create, setup, run, stop, logs or delete first${verb:+, not $verb}: $(quoted "$0") has all options at its top" ;;
    esac
    name='' zone='' type='' runtime='' project='' clone='' spot=false max_restarts=100 poll=30 dry=false words=()
    while (($#)); do
        case $1 in
            --name | --zone | --type | --runtime | --project | --clone | --max-restarts | --poll)
                (($# > 1)) && [[ -n $2 && $2 != --* ]] || fail "$1 needs a value"
                local option=${1#--}
                printf -v "${option//-/_}" %s "$2"
                shift 2
                ;;
            --spot) spot=true && shift ;;
            --dry-run) dry=true && shift ;;
            --) shift && words=("$@") && break ;;
            *) fail "there is no option $1: arguments of bert-jax pretrain stand behind --" ;;
        esac
    done
}

check() {
    local option
    for option in name zone; do
        [[ -n ${!option} ]] || fail "--$option is missing"
    done
    [[ $name =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] ||
        fail "--name $name: take lower-case letters, digits and hyphens, a letter first, 40 at most"
    [[ $max_restarts =~ ^[0-9]+$ ]] || fail "--max-restarts $max_restarts is no number"
    [[ $poll =~ ^[0-9]+$ ]] || fail "--poll $poll is no number of seconds"
    case $verb in create | run) check_type ;; esac
    case $verb in setup | run) check_clone ;; esac
    case $verb in
        run) check_words ;;
        *) ((!${#words[@]})) || fail "arguments behind -- belong to run, not to $verb" ;;
    esac
    $dry || command -v gcloud >/dev/null ||
        fail "gcloud is not on PATH: install the Google Cloud CLI and log in, or add --dry-run"
}

check_type() {
    [[ -n $type ]] || fail "--type is missing, as in --type v5litepod-16"
    local sizes image most=0
    case $type in
        v2-*) sizes='8 32 128 256 512' image=tpu-ubuntu2204-base ;;
        v3-*) sizes='8 32 64 128 256 512 1024 2048' image=tpu-ubuntu2204-base ;;
        v4-*) sizes='multiples of 8 up to 8192' most=8192 image=tpu-ubuntu2204-base ;;
        v5litepod-*) sizes='1 4 8 16 32 64 128 256' image=v2-alpha-tpuv5-lite ;;
        v5p-*) sizes='multiples of 8 up to 12288' most=12288 image=v2-alpha-tpuv5 ;;
        v6e-*) sizes='1 4 8 16 32 64 128 256' image=v2-alpha-tpuv6e ;;
        *) fail "--type $type is unknown: take v2-8, v3-8, v4-8, v5litepod-16, v5p-8, v6e-16 or another size of these" ;;
    esac
    local size=${type##*-}
    [[ $size =~ ^[1-9][0-9]{0,4}$ ]] && if ((most)); then
        ((size % 8 == 0 && size <= most))
    else
        [[ " $sizes " == *" $size "* ]]
    fi || fail "--type $type: ${type%-*} comes in the sizes $sizes"
    runtime=${runtime:-$image}
}

check_clone() {
    local file
    if [[ -z $clone ]]; then
        clone=$PWD
        [[ ! -f $here/../../setup.cfg ]] || clone=$(cd "$here/../.." && pwd)
    fi
    for file in "${content[@]}"; do
        [[ -e $clone/$file ]] || fail "$clone has no $file: give --clone, the directory of a clone of bert_jax"
    done
}

check_words() {
    local i value given=' '
    ((${#words[@]})) && [[ ${words[0]} != -* ]] || fail "say what to train behind --, as in: -- bert_base --corpus gs://..."
    for ((i = 1; i < ${#words[@]}; i++)); do
        case ${words[i]} in
            --corpus | --workdir) value=${words[i + 1]:-} ;;
            --corpus=* | --workdir=*) value=${words[i]#*=} ;;
            *) continue ;;
        esac
        [[ $value == gs://?* ]] || fail "${words[i]%%=*} $value: give a place in a bucket, gs://..."
        given+="${words[i]%%=*} "
    done
    for value in --corpus --workdir; do
        [[ $given == *" $value "* ]] || fail "$value is missing behind --"
    done
}

# ---------------------------------------------------------------- gcloud

do_or_print() {
    if $dry; then quoted "$@"; else "$@"; fi
}

on_hosts() { # WHICH COMMAND
    do_or_print gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker="$1" --quiet --command="$2"
}

look() { # KIND FIELD: sets `state`; NONE if there is no such thing
    local try command=(gcloud compute tpus "$1" describe "$name" "${where[@]}" --format="value($2)")
    state=NONE
    if $dry; then
        quoted "${command[@]}"
        return
    fi
    for try in 1 2 3 4 5; do
        if state=$("${command[@]}" 2>"$notes/describe"); then
            return
        elif grep -qiE 'NOT_FOUND|not found' "$notes/describe"; then
            state=NONE
            return
        fi
        ((try == 5)) || sleep "$poll"
    done
    fail "gcloud cannot say how $name is: $(tail -n 1 "$notes/describe")"
}

create() {
    local command=(gcloud compute tpus queued-resources create "$name" --node-id="$name" "${where[@]}"
        --accelerator-type="$type" --runtime-version="$runtime")
    if $spot; then command+=(--spot); fi
    do_or_print "${command[@]}" --quiet
}

await() { # until the slice is there; fails if it will not come
    local told=
    while look queued-resources state.state; do
        case $state in
            ACTIVE) return ;;
            NONE | FAILED | SUSPENDING | SUSPENDED | DELETING)
                $dry && return
                say "the request for $name ended: $state"
                return 1
                ;;
        esac
        [[ $state == "$told" ]] || say "waiting for $name: $state"
        told=$state
        sleep "$poll"
    done
}

delete() { do_or_print gcloud compute tpus queued-resources delete "$name" "${where[@]}" --force --quiet; }

setup() {
    local archive=${TMPDIR:-/tmp}/bert_jax-$name.tar.gz
    do_or_print tar -czf "$archive" --exclude=__pycache__ -C "$clone" "${content[@]}" -C "$here" tpu_worker.sh || return
    do_or_print gcloud compute tpus tpu-vm scp "$archive" "$name:bert_jax.tar.gz" "${where[@]}" --worker=all --quiet || return
    on_hosts all "mkdir -p bert_jax && tar -xzf bert_jax.tar.gz -C bert_jax && $worker setup"
}

# ---------------------------------------------------------------- the run and its restarts

ready() { # have a slice that is set up
    local node
    look tpu-vm state
    node=$state
    if [[ $node != READY ]]; then
        fresh=true
        look queued-resources state.state
        case $state in
            NONE) create || return ;;
            ACTIVE | FAILED | SUSPENDING | SUSPENDED | DELETING)
                say "$name is lost (slice $node, request $state): asking for another"
                delete && create || return
                ;;
        esac
        await || return
    fi
    if $fresh; then
        setup || return
        fresh=false
    fi
}

follow() { # the run on all hosts; sets `status` and `said`
    status=0 said=
    if $dry; then
        on_hosts all "$worker run $(quoted "${words[@]}")"
        return
    fi
    on_hosts all "$worker run $(quoted "${words[@]}")" 2>&1 | tee "$notes/output" || status=${PIPESTATUS[0]}
    said=$(grep -oE '^tpu_worker: .* ended with code [0-9]+( as asked)?' "$notes/output" || true)
}

ended() { # CODE: some host has said so
    grep -qE "code $1( |$)" <<<"$said"
}

run() {
    local restarts why
    fresh=false # a slice that is not set up yet
    for ((restarts = 0; ; restarts++)); do
        if ready; then
            follow
            ((status)) || return 0
            ! ended 2 || fail "a host refuses: its message is above"
            if ended 1; then
                say "a bug: its message is above"
                exit 1
            fi
            ((status != 127)) || fail "$name is not set up: bash tpu_pod.sh setup --name $name --zone $zone"
            why="the connection to the hosts broke"
            [[ -z $said ]] || why="the run is not over"
            if [[ $said == *'as asked'* ]]; then
                say "stopped as asked; the same command continues"
                exit 75
            fi
        elif [[ -z ${said+set} ]]; then
            fail "the slice cannot be had or set up: the reason is above"
        else
            why="there is no slice that works"
        fi
        if ((restarts >= max_restarts)); then
            say "$why, and $restarts restarts were all (--max-restarts); the same command continues"
            exit 75
        fi
        say "$why: restart $((restarts + 1)) of at most $max_restarts"
        sleep "$poll"
    done
}

parse "$@"
check
where=(--zone="$zone")
[[ -z $project ]] || where+=(--project="$project")
notes=$(mktemp -d)
trap 'rm -rf "$notes"' EXIT
case $verb in
    create)
        create || refused
        await || exit 75
        ;;
    setup) setup || refused ;;
    stop) on_hosts all "$worker stop" || refused ;;
    logs) on_hosts 0 "$worker logs" || refused ;;
    delete) delete || refused ;;
    run)
        trap 'say "no longer followed; on the slice the run goes on: run follows it again, stop ends it"; exit 130' INT
        run
        ;;
esac
