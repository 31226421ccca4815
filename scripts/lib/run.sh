#!/usr/bin/env bash
# Runs a command of the tool's environment (.venv), which it makes or brings up to date first: scripts/lib/run.sh
# ruff check. The pre-commit hooks use it, so that they and scripts/test.sh have the tools of uv.lock.
set -euo pipefail
# shellcheck source=scripts/lib/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/env.sh"
PATH="$VLLM_SERIES_ROOT/.venv/bin:$PATH" exec "$@"
