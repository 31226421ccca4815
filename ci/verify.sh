#!/usr/bin/env bash
# Verifies a line. When that fails and an export would write other patches, they are left in build/refresh as a diff
# (Buildkite uploads it), with the command that applies it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
line="${1:?usage: ci/verify.sh LINE}"

code=0
scripts/lib/run.sh series verify "$line" || code=$?
[ "$code" -eq 0 ] || scripts/lib/run.sh series ci refresh "$line" || true
exit "$code"
