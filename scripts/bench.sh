#!/usr/bin/env bash
# Runs the features' benchmarks on this machine's card, stores the results and makes the plots of docs/ from them.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/bench.sh [--select NAME[:STEP]]... [OPTIONS]     PYTHON=... names the Python that has the wheel
       scripts/bench.sh --plots                                 only make the plots, from the stored results
       scripts/bench.sh --list

Results go to bench/results (--out DIR for another folder: then no plot is made). Options are those of
scripts/test.sh --gpu.
TEXT
}

cd "$(dirname "${BASH_SOURCE[0]}")/.."
plots=1 args=()
case "${1:-}" in
    -h | --help)
        usage
        exit 0
        ;;
    --plots) exec scripts/lib/run.sh python bench/plots.py "${@:2}" ;;
    --list) exec "${PYTHON:-python3}" ci/gpu/suite.py --benches-only --list ;;
esac
for one in "$@"; do
    case "$one" in --out | --out=*) plots="" ;; esac
    args+=("$one")
done
[ -z "$plots" ] || args+=(--out bench/results)
"${PYTHON:-python3}" ci/gpu/suite.py --benches-only "${args[@]}"
[ -z "$plots" ] || scripts/lib/run.sh python bench/plots.py
