#!/usr/bin/env bash
# Build the documentation site into build/docs; a warning is an error. Needs the extra `docs`, and no network.
#
#   bash scripts/docs.sh [FLAGS OF sphinx-build]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
venv=${BERT_JAX_VENV:-$root/.venv}
[[ $venv == /* ]] || venv=$root/$venv
bash scripts/setup_env.sh docs
JAX_PLATFORMS=cpu PYTHONNOUSERSITE=1 "$venv/bin/python" -m sphinx --fresh-env --fail-on-warning --keep-going --quiet "$@" docs build/docs
printf 'the site is in build/docs: open build/docs/index.html\n'
