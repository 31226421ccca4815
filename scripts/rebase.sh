#!/usr/bin/env bash
# Carries a line's patches over to another release: scripts/rebase.sh LINE --to NEW [--report] [...], see docs/rebase.md.
set -euo pipefail
# shellcheck source=scripts/lib/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib/env.sh"
series rebase "$@"
