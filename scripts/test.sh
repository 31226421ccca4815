#!/usr/bin/env bash
# Runs the project's tests in stages. Each stage has a budget in minutes; together they stay within 45 minutes on 2
# cores that do nothing else. A stage that takes longer is marked in the table at the end (a busy machine is no
# error), and after twice its budget it is stopped and counts as failed.
# shellcheck disable=SC2329 # the run_* functions are called by name
set -euo pipefail

STAGES=(lint unit real verify envs overlay upstream)
declare -A BUDGET=([lint]=2 [unit]=6 [real]=9 [verify]=2 [envs]=5 [overlay]=10 [upstream]=11)
declare -A TITLE=(
    [lint]="the pre-commit hooks: ruff, mypy, shellcheck, shfmt, clang-format, hadolint, Buildkite schema, series lint"
    [unit]="our tests without an upstream tree"
    [real]="our tests on the real upstream trees and wheels"
    [verify]="series verify of all lines"
    [envs]="the torch environment of each line (made once, then kept)"
    [overlay]="tests of vllm.dsa in the patched trees, with torch on the CPU"
    [upstream]="short set of upstream's tests: off equals upstream, features on regress nothing"
)

usage() {
    echo "usage: scripts/test.sh [--only STAGE[,STAGE]] [--skip STAGE[,STAGE]] [--list] [--gpu [OPTIONS]]"
    echo "       scripts/test.sh --upstream [LINE...] [--select PATTERN...] [--mode NAME...] [--gpu] [OPTION...]"
    echo
    for stage in "${STAGES[@]}"; do
        printf '  %-9s %3s min  %s\n' "$stage" "${BUDGET[$stage]}" "${TITLE[$stage]}"
    done
    echo
    echo "  --upstream  all of upstream's tests that concern what the patches touch (hours), nothing else:"
    echo "      LINE              only this line (default: all)"
    echo "      --select PATTERN  only these tests: a file, a folder, a wildcard or a part of the name"
    echo "      --mode NAME       only these modes: off, on, a feature (overlap, overlap=full), features"
    echo "                        (one for each); default: off, on and features"
    echo "      --gpu             instead those that need a GPU, on this machine's card"
    echo "      OPTION            of \`series baseline diff\` (with --gpu: \`series baseline gpu\`), as --resume"
    echo "  --gpu       the GPU suite, in the Python that has the wheel: PYTHON=...; options: --gpu --help"
}

fail() {
    echo "error: $1" >&2
    usage >&2
    exit 2
}

check_names() {
    local name
    for name in ${1//,/ }; do
        [ -n "${BUDGET[$name]:-}" ] || fail "unknown stage $name"
    done
}

only="" skip="" whole="" rest=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help | --list)
            usage
            exit 0
            ;;
        --only | --skip)
            [ $# -ge 2 ] || fail "$1 needs a stage"
            check_names "$2"
            if [ "$1" = --only ]; then only="$2"; else skip="$2"; fi
            shift
            ;;
        --upstream)
            shift
            whole=1 rest=("$@")
            break
            ;;
        --gpu)
            # In the Python that has the wheel; our own environment, which needs the network, is not made.
            shift
            exec "${PYTHON:-python3}" "$(dirname "${BASH_SOURCE[0]}")/../ci/gpu/suite.py" "$@"
            ;;
        *) fail "unknown option $1" ;;
    esac
    shift
done

# shellcheck source=scripts/lib/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib/env.sh"
cd "$VLLM_SERIES_ROOT"
PATH="$VLLM_SERIES_ROOT/.venv/bin:$PATH"
JOBS="${JOBS:-2}"

# Calls the tool with what follows --upstream; --select and --mode take several words.
run_whole() {
    local command=(diff --set full) args=() modes="" taker=""
    while [ $# -gt 0 ]; do
        case "$1" in
            --gpu) command=(gpu) taker="" ;;
            --select | --mode)
                [ $# -ge 2 ] && [ "${2#-}" = "$2" ] || fail "$1 needs a name"
                taker="$1"
                ;;
            -h | --help)
                usage
                exit 0
                ;;
            -*) taker="" args+=("$1") ;;
            *)
                case "$taker" in
                    --select) args+=(--select "$1") ;;
                    --mode) modes="$modes,$1" ;;
                    *) args+=("$1") ;;
                esac
                ;;
        esac
        shift
    done
    [ -z "$modes" ] || args+=(--modes "${modes#,}")
    [ -n "$modes" ] || [ "${command[0]}" = gpu ] || args+=(--modes "off,on,features")
    series baseline "${command[@]}" "${args[@]}"
}

if [ -n "$whole" ]; then
    run_whole "${rest[@]}"
    exit
fi

# The checks are listed in .pre-commit-config.yaml; its formatters change the file that they find wrong.
# pre-commit shows all that differs from the commit as its own changes: only of use where nothing differed before.
run_lint() {
    local options=(--all-files --color never)
    ! git diff --quiet || options+=(--show-diff-on-failure)
    PRE_COMMIT_HOME="$VLLM_SERIES_ROOT/.tools/pre-commit" pre-commit run "${options[@]}"
}

run_unit() { pytest -n "$JOBS" --dist loadfile -m "not slow and not torch and not upstream" tests; }

run_real() { pytest -n "$JOBS" --dist loadfile -m "slow and not torch" tests; }

run_verify() { series verify; }

run_envs() {
    local line code=0
    for line in $(series_lines); do series baseline env "$line" || code=$?; done
    return "$code"
}

run_overlay() { series overlay-test && pytest -m torch tests/deepgemm tests/fused_q; }

run_upstream() { series baseline diff && pytest -m upstream tests/baseline; }

series_lines() {
    for pin in pins/*.toml; do basename "$pin" .toml; done
}

# A stage runs in a shell of its own, so that `timeout` can interrupt it with all its children: pytest then still says
# what failed so far.
export -f series series_lines run_lint run_unit run_real run_verify run_envs run_overlay run_upstream
export PATH JOBS

# Seconds of processor time of all children so far.
cpu_seconds() {
    local note
    note="$(mktemp)"
    times >"$note"
    awk 'NR == 2 { gsub(/s/, ""); total = 0
                   for (i = 1; i <= 2; i++) { split($i, part, "m"); total += part[1] * 60 + part[2] }
                   printf "%d\n", total }' "$note"
    rm -f "$note"
}

rows=() failed=0 start_all=$SECONDS cpu=0
for stage in "${STAGES[@]}"; do
    case ",$only," in ,, | *",$stage,"*) ;; *) continue ;; esac
    case ",$skip," in *",$stage,"*) continue ;; esac
    budget="${BUDGET[$stage]}"
    echo
    echo "== $stage: ${TITLE[$stage]} (budget $budget min)"
    start=$SECONDS code=0
    timeout --signal=INT --kill-after=30 "$((2 * budget))m" bash -o pipefail -c "run_$stage" </dev/null || code=$?
    wall=$((SECONDS - start))
    case $code in
        0) said=ok ;;
        124 | 137) said="FAILED (stopped after twice its budget)" ;;
        *) said="FAILED ($code)" ;;
    esac
    [ "$code" -eq 0 ] || failed=1
    [ "$wall" -le $((60 * budget)) ] || said="$said, over its budget"
    before=$cpu
    cpu_seconds >"${TMPDIR:-/tmp}/cpu.$$"
    cpu="$(cat "${TMPDIR:-/tmp}/cpu.$$")"
    rows+=("$(printf '%-9s %4d s of %2d min, %4d s of processor time  %s' "$stage" "$wall" "$budget" \
        $((cpu - before)) "$said")")
done
rm -f "${TMPDIR:-/tmp}/cpu.$$"

echo
printf '%s\n' "${rows[@]}"
echo "total     $((SECONDS - start_all)) s"
exit $failed
