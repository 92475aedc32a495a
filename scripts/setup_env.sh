#!/usr/bin/env bash
# Create or update the environment of the scripts.
#
#   bash scripts/setup_env.sh EXTRA...      extras of setup.cfg, e.g. `test plot`
#
# The environment is $BERT_JAX_VENV or .venv in the project root; its Python is $PYTHON, or the first of python3.12, python3.13
# and python3.11 that works. pip runs only after a change: a stamp in the environment holds a hash of its inputs, and the
# installed extras.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${BERT_JAX_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$root/$venv
stamp=$venv/bert_jax.stamp
log=$venv/pip.log

say() { printf '[%s] %s\n' "$(date +%H:%M:%S)" "$*" >&2; }

fail() {
    say "error: $*"
    exit 2
}

# Prints the version, as in "3.12", of a usable Python. A shim of a version manager may exist but not run; a distribution's
# Python may lack the modules venv and ensurepip.
version_of() {
    "$1" -c 'import sys, venv, ensurepip; print("%d.%d" % sys.version_info[:2])' 2>/dev/null | grep -xE '3\.1[1-3]'
}

find_python() {
    local candidate
    while read -r candidate; do
        if version_of "$candidate" >/dev/null; then
            printf '%s\n' "$candidate"
            return
        fi
    done < <(type -aP python3.12 python3.13 python3.11 python3 python || true)
    return 1
}

make_venv() {
    local python
    if [[ -n ${PYTHON:-} ]]; then
        version_of "$PYTHON" >/dev/null ||
            fail "PYTHON=$PYTHON is not a Python 3.11 to 3.13 with the modules venv and ensurepip"
        python=$PYTHON
    else
        python=$(find_python) ||
            fail "no Python 3.11 to 3.13 with the modules venv and ensurepip was found; install one, or set PYTHON=/path/to/python3.12"
    fi
    [[ ! -e $venv || -f $venv/pyvenv.cfg || -z $(ls -A "$venv") ]] ||
        fail "$venv exists and is not a virtual environment; move it or set BERT_JAX_VENV"
    say "making $venv with $("$python" --version) ($python)"
    "$python" -m venv --clear "$venv"
}

# Write pip's messages (standard input) to the log; on a terminal, show a count.
log_progress() {
    local line collected=0
    while IFS= read -r line; do
        printf '%s\n' "$line" >>"$log"
        [[ -t 2 ]] || continue
        case $line in
            Collecting*) printf '\r  package %d of about %d ' $((++collected)) "$packages" >&2 ;;
            "Installing collected"*) printf '\r  unpacking %d packages        ' "$collected" >&2 ;;
        esac
    done
    [[ ! -t 2 || $collected -eq 0 ]] || printf '\n' >&2
}

version=$(version_of "$venv/bin/python") || version=
if [[ -z $version || ( -n ${PYTHON:-} && $(version_of "$PYTHON") != "$version" ) ]]; then
    make_venv
    version=$(version_of "$venv/bin/python")
fi

# Installed extras are kept, so that quickstart and tests can share the environment.
extras=$(printf '%s\n' "$@" $([[ ! -f $stamp ]] || tail -n +2 "$stamp") | sort -u)
# jax 0.11 needs Python 3.12, so 3.11 has versions of its own.
if [[ $version == 3.11 ]]; then pins=cpu-py311.txt; else pins=cpu-py312.txt; fi
inputs=("$root/setup.cfg" "$root/setup.py" "$root/constraints/$pins")
constraints=(--constraint "${inputs[2]}")
if grep -qxE 'parity|torch' <<<"$extras"; then
    inputs+=("$root/constraints/parity.txt")
    constraints+=(--constraint "${inputs[3]}")
fi
wanted=$("$venv/bin/python" -c '
import hashlib, pathlib, sys
root, files, extras = sys.argv[1], sys.argv[2].split("\n"), sys.argv[3]
print(hashlib.sha256(b"\0".join([root.encode(), *(pathlib.Path(file).read_bytes() for file in files)])).hexdigest())
print(extras)
' "$root" "$(printf '%s\n' "${inputs[@]}")" "$extras")

if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then
    say "$venv is up to date"
    exit
fi

packages=$(grep -chv '^#' "${inputs[@]:2}" | awk '{ sum += $1 } END { print sum }')
say "installing bert_jax[$(paste -sd, <<<"$extras")] and about $packages packages; takes minutes, mostly for downloads"
: >"$log"
rm -f "$stamp"
# PyTorch's own index has builds without CUDA, gigabytes smaller (CONTRIBUTING.md).
if ! "$venv/bin/python" -m pip install --disable-pip-version-check --use-pep517 "${constraints[@]}" \
    ${BERT_JAX_TORCH_INDEX:+--extra-index-url "$BERT_JAX_TORCH_INDEX"} \
    --editable "$root[$(paste -sd, <<<"$extras")]" 2>&1 | log_progress; then
    grep -E '^ERROR|error:' "$log" >&2 || tail -n 5 "$log" >&2
    fail "pip did not finish (all of its messages: $log); is there a network?"
fi
printf '%s\n' "$wanted" >"$stamp"
say "installed"
