#!/usr/bin/env bash
# Runs steps of CI on this machine, as Buildkite's agents run them: ci/local.sh STEP...; --list shows them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec scripts/lib/run.sh series ci run "$@"
