#!/usr/bin/env bash
# Builds a line's wheel again, from a clone in another folder, and compares its sha256 with the one in dist/ (which
# Buildkite's first build uploaded, perhaps from another machine).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
line="${1:?usage: ci/rebuild.sh LINE}"

if [ -n "${BUILDKITE:-}" ]; then
    buildkite-agent artifact download "dist/vllm-$line+*.whl" . --step "build-${line//./_}"
fi
shopt -s nullglob
first=(dist/vllm-"$line"+*.whl)
if [ "${#first[@]}" -ne 1 ]; then
    echo "error: dist/ has ${#first[@]} wheels of $line, not one" >&2
    echo "  fix: rm dist/vllm-$line+*.whl && ci/local.sh build-$line rebuild-$line" >&2
    exit 2
fi

changed="$(git status --porcelain)"
[ -z "$changed" ] || printf 'note: not committed, so not in the second build:\n%s\n' "$changed" >&2

place="$(mktemp -d)"
trap 'rm -rf "$place"' EXIT
git clone -q --no-hardlinks . "$place/checkout"
"$place/checkout/scripts/build.sh" "$line"

one="$(sha256sum <"${first[0]}")" two="$(sha256sum <"$place/checkout/dist/$(basename "${first[0]}")")"
echo "sha256 of $(basename "${first[0]}"): ${one%% *}, built again: ${two%% *}"
if [ "$one" != "$two" ]; then
    echo "error: the second build differs; what the first difference is:" >&2
    "$place/checkout/scripts/lib/run.sh" series wheel --verify "$PWD/${first[0]}" || true
    exit 4
fi
