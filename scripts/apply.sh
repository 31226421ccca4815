#!/usr/bin/env bash
# Lays the patched tree of a line out in build/LINE: scripts/apply.sh [LINE] [--git URL] [...]; default line 0.33.0.
set -euo pipefail
# shellcheck source=scripts/lib/env.sh
. "$(dirname "${BASH_SOURCE[0]}")/lib/env.sh"
case "${1:-}" in
    "" | -*) set -- 0.33.0 "$@" ;;
esac
series apply "$@"
