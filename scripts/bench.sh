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
code=0
"${PYTHON:-python3}" ci/gpu/suite.py --benches-only "${args[@]}" || code=$?
[ "$code" -le 1 ] || exit "$code" # 1: a row failed, the others have results
if [ -n "$plots" ] && ! scripts/lib/run.sh python bench/plots.py; then
    echo "error: the results are stored in bench/results, but there are no plots of them" >&2
    echo "  fix: scripts/bench.sh --plots, here or in any checkout with these results" >&2
    code=1
fi
exit "$code"
