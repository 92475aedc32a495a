#!/usr/bin/env bash
# Pretrain on a Cloud TPU slice, or several, on demand or spot: create, set up, run, and recreate after a preemption.
#
#   bash tpu_pod.sh VERB --name NAME --zone ZONE [--type TYPE] [OPTION ...] [-- CONFIG --corpus gs://... ...]
#
# VERB is one of
#   create   request the slice (a queued resource) and wait until it is active
#   setup    copy the code of a clone of bert_jax to all hosts, and install it there with the extras tpu and gcs and with
#            constraints/tpu-py312.txt
#   run      create and set up the slice if there is none, then run `bert-jax pretrain` on all hosts until it ends
#   stop     make the run save and end; `run` continues it
#   logs     follow the log of host 0 (of slice 0)
#   delete   delete the slice and its queued resource
#
# The arguments of `bert-jax pretrain` follow `--` (`run` only). --corpus and --workdir must be in buckets (gs://...): the
# disks of the hosts are deleted with the slice. CONFIG is a preset, or a file in the directory configs of the clone, as in
# configs/mine.py; the hosts run the command in their copy of the clone.
#
# Options
#   --name NAME           of the slice, and of its queued resource
#   --zone ZONE           as in europe-west4-a; required, since prices differ (gcloud's own setting is not used)
#   --type TYPE           (create, run) v2-8 to v2-512, v3-8 to v3-2048, v4-8 to v4-8192, v5litepod-1 to -256, v5p-8 to
#                         v5p-12288, v6e-1 to v6e-256. Numbers are cores; for v5litepod and v6e, chips
#   --slices N            (all but delete) slices of this type, joined over the network of the data centre (Multislice;
#                         default: 1). Their names are NAME-0, NAME-1, ...; v4 and later
#   --spot                (create, run) cheaper, may be preempted at any time
#   --runtime VERSION     (create, run) image of the hosts (default: by type)
#   --project PROJECT     (default: gcloud's own setting)
#   --clone DIR           (setup, run) the clone of bert_jax (default: the one that contains this script, or else
#                         the working directory)
#   --max-restarts N      (run) restarts at most (default: 100)
#   --poll SECONDS        between two queries while waiting for a slice, and before a restart (default: 30)
#   --dry-run             print the commands, one per line, and run none, as if no slice existed; gcloud is not needed
#
# `run` restarts when the run ends with exit code 75 (saved, or a host is gone), when the connection breaks, and, on a new
# slice, when the state of the old one is not READY. If the run is in progress already, it only follows it. Start one
# launcher per name: two would undo each other's work.
#
# Exit codes: 0 done; 1 a bug; 2 a mistake, with a one-line message; 75 not finished, the same command continues.
# Requires bash 4.4, gcloud with a login, and hosts with access to the internet (PyPI, GitHub) and the buckets.
set -euo pipefail

script_dir=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
clone_files=(LICENSE README.md setup.cfg setup.py constraints bert_jax data_prep configs)
worker='bash bert_jax/tpu_worker.sh'

log() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*" >&2; }

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

fail_above() { fail "the command failed: see the message above"; }

quote() { # the arguments of a command, quoted for a shell
    local word line=
    for word in "$@"; do
        [[ $word =~ ^[A-Za-z0-9_./:=,@%+-]+$ ]] || word=${word@Q}
        line+="${line:+ }$word"
    done
    printf '%s\n' "$line"
}

# ---------------------------------------------------------------- arguments

parse() {
    verb=${1:-}
    case $verb in
        create | setup | run | stop | logs | delete) shift ;;
        *) fail "give create, setup, run, stop, logs or delete first${verb:+, not $verb}: the top of $(quote "$0") lists all options" ;;
    esac
    name='' zone='' type='' slices=1 runtime='' project='' clone='' spot=false
    max_restarts=100 poll=30 dry=false pretrain_args=()
    while (($#)); do
        case $1 in
            --name | --zone | --type | --slices | --runtime | --project | --clone | --max-restarts | --poll)
                (($# > 1)) && [[ -n $2 && $2 != --* ]] || fail "$1 needs a value"
                local option=${1#--}
                printf -v "${option//-/_}" %s "$2"
                shift 2
                ;;
            --spot) spot=true && shift ;;
            --dry-run) dry=true && shift ;;
            --) shift && pretrain_args=("$@") && break ;;
            *) fail "there is no option $1: arguments of bert-jax pretrain follow --" ;;
        esac
    done
}

check() {
    local option
    for option in name zone; do
        [[ -n ${!option} ]] || fail "--$option is missing"
    done
    [[ $name =~ ^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$ ]] ||
        fail "--name $name: use lower-case letters, digits and hyphens, a letter first, 40 at most"
    [[ $slices =~ ^[1-9][0-9]{0,2}$ ]] || fail "--slices $slices: it must be a number from 1 to 999"
    # Bash takes 08 for octal, and numbers beyond 2^63 for others.
    [[ $max_restarts =~ ^(0|[1-9][0-9]{0,8})$ ]] || fail "--max-restarts $max_restarts: it must be a number up to 999999999"
    [[ $poll =~ ^[0-9]{1,9}$ ]] || fail "--poll $poll: it must be a number of seconds"
    case $verb in create | run) check_type ;; esac
    case $verb in setup | run) check_clone ;; esac
    case $verb in
        run) check_pretrain_args ;;
        *) ((!${#pretrain_args[@]})) || fail "arguments after -- are for run, not for $verb" ;;
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
    [[ $slices == 1 || $type != v[23]-* ]] || fail "--slices $slices: $type cannot be joined: take v4 or later"
    runtime=${runtime:-$image}
}

check_clone() {
    local file
    if [[ -z $clone ]]; then
        clone=$PWD
        [[ ! -f $script_dir/../../setup.cfg ]] || clone=$(cd "$script_dir/../.." && pwd)
    fi
    for file in "${clone_files[@]}"; do
        [[ -e $clone/$file ]] || fail "$clone has no $file: give --clone, the directory of a clone of bert_jax"
    done
}

check_config() { # the hosts find only what `setup` copies to them
    local file=${1#./}
    [[ $file == *.py ]] || file=configs/$file.py
    [[ $file == configs/* && /$file/ != */../* ]] ||
        fail "config $1: the hosts do not have it: copy it to $clone/configs, and give configs/${file##*/}"
    [[ -f $clone/$file ]] || fail "config $1: $clone has no file $file"
}

check_pretrain_args() {
    local i value given=' '
    ((${#pretrain_args[@]})) && [[ ${pretrain_args[0]} != -* ]] || fail "give the config to train after --, as in: -- bert_base --corpus gs://..."
    check_config "${pretrain_args[0]}"
    for ((i = 1; i < ${#pretrain_args[@]}; i++)); do
        case ${pretrain_args[i]} in
            --corpus | --workdir) value=${pretrain_args[i + 1]:-} ;;
            --corpus=* | --workdir=*) value=${pretrain_args[i]#*=} ;;
            *) continue ;;
        esac
        [[ $value == gs://?* ]] || fail "${pretrain_args[i]%%=*} $value: give a path in a bucket, gs://..."
        given+="${pretrain_args[i]%%=*} "
    done
    for value in --corpus --workdir; do
        [[ $given == *" $value "* ]] || fail "$value is missing after --"
    done
}

# ---------------------------------------------------------------- gcloud

run_or_print() {
    if $dry; then quote "$@"; else "$@"; fi
}

# `gcloud compute tpus queued-resources ssh --node=all` connects to at most 64 hosts at the same time, and ignores slices
# that are not ready (version 528).
on_slices() { # COMMAND...: on all slices at the same time; the name of a slice is its last argument
    local slice
    if $dry || ((slices == 1)); then
        for slice in "${slice_names[@]}"; do "$@" "$slice" || return; done
    else
        (in_parallel "$@")
    fi
}

in_parallel() { # in a subshell, whose settings and trap it changes
    local slice pid code status=0 pids=()
    set -m # each slice gets a process group, which ends on Ctrl-C together with its connections
    trap 'for pid in "${pids[@]}"; do kill -INT -- "-$pid" 2>/dev/null || true; done' INT
    for slice in "${slice_names[@]}"; do
        "$@" "$slice" </dev/null &
        pids+=($!)
    done
    for pid in "${pids[@]}"; do
        code=0
        wait "$pid" || code=$?
        ((code <= status)) || status=$code
    done
    return "$status"
}

ssh_to() { # WHICH COMMAND SLICE
    run_or_print gcloud compute tpus tpu-vm ssh "$3" "${location[@]}" --worker="$1" --quiet --command="$2"
}

copy_to() { # FILE SLICE
    run_or_print gcloud compute tpus tpu-vm scp "$1" "$2:bert_jax.tar.gz" "${location[@]}" --worker=all --quiet
}

query_state() { # KIND FIELD NAME: sets `state`; NONE if there is no such resource
    local try command=(gcloud compute tpus "$1" describe "$3" "${location[@]}" --format="value($2)")
    state=NONE
    if $dry; then
        quote "${command[@]}"
        return
    fi
    for try in 1 2 3 4 5; do
        if state=$("${command[@]}" 2>"$temporary/describe"); then
            return
        elif grep -qiE 'NOT_FOUND|not found' "$temporary/describe"; then
            state=NONE
            return
        fi
        ((try == 5)) || sleep "$poll"
    done
    fail "gcloud cannot query the state of $3: $(tail -n 1 "$temporary/describe")"
}

create() {
    local nodes=(--node-id="$name")
    ((slices == 1)) || nodes=(--node-count="$slices" --node-prefix="$name")
    local command=(gcloud compute tpus queued-resources create "$name" "${nodes[@]}" "${location[@]}"
        --accelerator-type="$type" --runtime-version="$runtime")
    if $spot; then command+=(--spot); fi
    run_or_print "${command[@]}" --quiet
}

wait_until_active() { # fails if the request for the slice ended
    local last=
    while query_state queued-resources state.state "$name"; do
        case $state in
            ACTIVE) return ;;
            NONE | FAILED | SUSPENDING | SUSPENDED | DELETING)
                $dry && return
                log "the request for $name ended: $state"
                return 1
                ;;
        esac
        [[ $state == "$last" ]] || log "waiting for $name: $state"
        last=$state
        sleep "$poll"
    done
}

delete() { run_or_print gcloud compute tpus queued-resources delete "$name" "${location[@]}" --force --quiet; }

setup() {
    local archive=$temporary/bert_jax.tar.gz
    run_or_print tar -czf "$archive" --exclude=__pycache__ -C "$clone" "${clone_files[@]}" -C "$script_dir" tpu_worker.sh || return
    on_slices copy_to "$archive" || return
    on_slices ssh_to all "mkdir -p bert_jax && tar -xzf bert_jax.tar.gz -C bert_jax && $worker setup"
}

# ---------------------------------------------------------------- the run and its restarts

prepare_slices() { # create and set up the slices if necessary
    local slice node
    for slice in "${slice_names[@]}"; do
        query_state tpu-vm state "$slice"
        node=$state
        [[ $node == READY ]] || break
    done
    if [[ $node != READY ]]; then
        needs_setup=true
        query_state queued-resources state.state "$name"
        case $state in
            NONE) create || return ;;
            ACTIVE | FAILED | SUSPENDING | SUSPENDED | DELETING)
                log "$slice is lost (slice $node, request $state): requesting another"
                delete && create || return
                ;;
        esac
        wait_until_active || return
    fi
    if $needs_setup; then
        setup || return
        needs_setup=false
    fi
}

follow() { # the run on all hosts; sets `status` and `exit_lines`
    status=0 exit_lines=
    if $dry; then
        on_slices ssh_to all "$worker run $(quote "${pretrain_args[@]}")"
        return
    fi
    on_slices ssh_to all "$worker run $(quote "${pretrain_args[@]}")" 2>&1 | tee "$temporary/output" || status=${PIPESTATUS[0]}
    exit_lines=$(grep -oE '^tpu_worker: .* ended with code [0-9]+( as requested)?' "$temporary/output" || true)
}

any_host_ended() { # CODE
    grep -qE "code $1( |$)" <<<"$exit_lines"
}

run() {
    local restarts why
    needs_setup=false # whether the slice is new
    for ((restarts = 0; ; restarts++)); do
        if prepare_slices; then
            follow
            ((status)) || return 0
            ! any_host_ended 2 || fail "a host ended with a mistake: see its message above"
            if any_host_ended 1; then
                log "a bug: see its message above"
                exit 1
            fi
            if ((status == 127)); then
                ((slices > 1)) || fail "$name is not set up: bash tpu_pod.sh setup --name $name --zone $zone"
                needs_setup=true # a slice that Cloud TPU has replaced by itself
            fi
            why="the connection to the hosts broke"
            [[ -z $exit_lines ]] || why="the run is not finished"
            if [[ $exit_lines == *'as requested'* ]]; then
                log "stopped as requested; the same command continues"
                exit 75
            fi
        elif [[ -z ${exit_lines+set} ]]; then
            fail "the slice cannot be created or set up: see the message above"
        else
            why="no slice is ready"
        fi
        if ((restarts >= max_restarts)); then
            log "$why after $restarts restarts, the maximum (--max-restarts); the same command continues"
            exit 75
        fi
        log "$why: restart $((restarts + 1)) of at most $max_restarts"
        sleep "$poll"
    done
}

parse "$@"
check
location=(--zone="$zone")
[[ -z $project ]] || location+=(--project="$project")
slice_names=("$name")
for ((slice = 0; slices > 1 && slice < slices; slice++)); do slice_names[slice]=$name-$slice; done
temporary=$(mktemp -d)
trap 'rm -rf "$temporary"' EXIT
case $verb in
    create)
        create || fail_above
        wait_until_active || exit 75
        ;;
    setup) setup || fail_above ;;
    stop) on_slices ssh_to all "$worker stop" || fail_above ;;
    logs) ssh_to 0 "$worker logs" "${slice_names[0]}" || fail_above ;;
    delete) delete || fail_above ;;
    run)
        trap 'log "no longer followed; the run continues on the slice: run follows it again, stop ends it"; exit 130' INT
        run
        ;;
esac
