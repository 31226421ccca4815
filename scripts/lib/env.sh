# shellcheck shell=bash
# Sourced by the scripts: finds a Python, makes the tool's environment (see bootstrap.py) and defines
# `series`, the command line of this project. VLLM_SERIES_ROOT, VLLM_SERIES_UV and VLLM_SERIES_PYTHON are set.

VLLM_SERIES_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)"
export VLLM_SERIES_ROOT

# Prints the first interpreter that is new enough; PYTHON overrides the search. The environment that is to be made
# is no candidate, even when it is activated.
find_python() {
    local candidate found PATH="$PATH"
    PATH="$(echo ":$PATH:" | sed "s#:$VLLM_SERIES_ROOT/.venv/bin:#:#g; s#^:##; s#:\$##")"
    set -- python3 python3.14 python3.13 python3.12 python3.11
    [ -z "${PYTHON:-}" ] || set -- "$PYTHON"
    for candidate in "$@"; do
        found="$(command -v "$candidate" 2>/dev/null)" || continue
        if "$found" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$found"
            return 0
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        echo "error: PYTHON=$PYTHON is not Python 3.11 or newer" >&2
    else
        echo "error: no Python 3.11 or newer found" >&2
    fi
    echo "  fix: apt-get install python3 git ca-certificates   (Debian 12, Ubuntu 24.04 or newer)," >&2
    echo "       or set PYTHON=/path/to/python3.11" >&2
    return 1
}

# Python 3.11 reads the paths of an environment in the locale's encoding: LC_ALL=C would fail in a folder with
# letters outside of ASCII.
case "${LC_ALL:-}" in C | POSIX) export LC_ALL=C.UTF-8 ;; esac

# uv and httpx bring certificates of their own; a machine behind a proxy that re-signs has the right ones here.
if [ -z "${SSL_CERT_FILE:-}" ] && [ -r /etc/ssl/certs/ca-certificates.crt ]; then
    export SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt
fi

# A script ends with an error here; a person's shell that sources this stays open.
case $- in *i*) leave='return' ;; *) leave='exit' ;; esac
VLLM_SERIES_PYTHON="$(find_python)" || "$leave" 2
export VLLM_SERIES_PYTHON
VLLM_SERIES_UV="$("$VLLM_SERIES_PYTHON" -I "$VLLM_SERIES_ROOT/scripts/lib/bootstrap.py")" || "$leave" $?
unset leave
export VLLM_SERIES_UV

series() {
    "$VLLM_SERIES_ROOT/.venv/bin/series" --root "$VLLM_SERIES_ROOT" "$@"
}
