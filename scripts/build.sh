#!/usr/bin/env bash
# Builds the patched vLLM wheel of a line into dist/ and proves that it installs.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: scripts/build.sh [LINE] [options]        (default line: 0.33.0)

  --platform P       x86_64 or aarch64 (default: this machine)
  --no-kernels       leave the compiled kernels out; the file name says so
  --system-nvcc      compile the kernels with this machine's nvcc instead of the pinned one
  --full-check       also install torch and all dependencies (several GB) and import vllm
  --python X.Y       the Python of the full check (default: the one that runs this)
  --with-deepgemm    not in this release
  --json             print the result as one JSON object

Needs Python 3.11 or newer and git; everything else is fetched. Kernels also need g++,
which is installed through apt-get where that is possible.
TEXT
}

line="" full=--check args=()
while [ $# -gt 0 ]; do
    case "$1" in
        -h | --help)
            usage
            exit 0
            ;;
        --platform | --python)
            [ $# -ge 2 ] || {
                echo "error: $1 needs a value" >&2
                exit 2
            }
            args+=("$1" "$2")
            shift
            ;;
        --platform=* | --python=* | --no-kernels | --system-nvcc | --json) args+=("$1") ;;
        --full-check) full=--full-check ;;
        --with-deepgemm)
            echo "error: --with-deepgemm: not in this release" >&2
            echo "  fix: run without it; vLLM's own DeepGEMM stays as upstream built it" >&2
            exit 2
            ;;
        -*)
            echo "error: unknown option $1" >&2
            usage >&2
            exit 2
            ;;
        *)
            [ -z "$line" ] || {
                echo "error: one line at a time: $line or $1" >&2
                exit 2
            }
            line="$1"
            ;;
    esac
    shift
done

# shellcheck source=scripts/lib/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib/env.sh"
series wheel "${line:-0.33.0}" "$full" "${args[@]}"
