#!/usr/bin/env bash
# Installs a line's wheel from dist/ into an environment of its own and runs the GPU suite there.
# Further arguments go to the suite: ci/gpu.sh 0.33.0 --select fused_q
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
line="${1:?usage: ci/gpu.sh LINE [OPTIONS]}"
shift

if [ -n "${BUILDKITE:-}" ]; then
    buildkite-agent artifact download "dist/vllm-$line+*.whl" . --step "build-${line//./_}"
fi
shopt -s nullglob
wheels=(dist/vllm-"$line"+*.whl)
if [ "${#wheels[@]}" -ne 1 ]; then
    echo "error: dist/ has ${#wheels[@]} wheels of $line, not one" >&2
    echo "  fix: rm dist/vllm-$line+*.whl && ci/local.sh build-$line" >&2
    exit 2
fi

# shellcheck source=scripts/lib/env.sh
. scripts/lib/env.sh
place="build/gpu-env/$line"
"$VLLM_SERIES_UV" venv --clear --quiet --python "$VLLM_SERIES_PYTHON" "$place"
"$VLLM_SERIES_UV" pip install --quiet --python "$place/bin/python" "${wheels[0]}" pytest
# Steps of several queues have folders of their own: artifacts of the same path would replace each other.
out="build/gpu-results${BUILDKITE_STEP_KEY:+/$BUILDKITE_STEP_KEY}"
PYTHON="$place/bin/python" exec scripts/test.sh --gpu --out "$out" "$@"
