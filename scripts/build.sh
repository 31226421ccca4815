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
  --with-deepgemm    also build DeepGEMM's extension with the series' patch; needs a CUDA
                     toolkit and a Python with torch (docs/deepgemm.md)
  --json             print the result as one JSON object

Needs Python 3.11 or newer and git; everything else is fetched. Kernels also need g++,
which is installed through apt-get where that is possible.
TEXT
}

line="" full=--check deepgemm="" args=()
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
        --with-deepgemm) deepgemm=1 ;;
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
line="${line:-0.33.0}"
if [ -n "$deepgemm" ]; then
    built="$VLLM_SERIES_ROOT/.work/deepgemm/$line/built"
    series deepgemm build "$line" --output "$built" >&2
    args+=(--deepgemm "$built")
fi
series wheel "$line" "$full" "${args[@]}"
