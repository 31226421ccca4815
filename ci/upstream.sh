#!/usr/bin/env bash
# Runs this job's share of upstream's tests on both trees of a line and compares them. Without Buildkite: all of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
line="${1:?usage: ci/upstream.sh LINE}"

mapfile -t files < <(scripts/lib/run.sh series ci shard "$line")
if [ "${#files[@]}" -eq 0 ]; then
    echo "error: this job has no test file" >&2
    exit 1
fi
modes=off,on
[ "${BUILDKITE_SOURCE:-}" != schedule ] || modes=off,on,features # nightly: each feature alone as well
code=0
scripts/lib/run.sh series baseline diff "$line" --modes "$modes" "${files[@]/#/--select=}" || code=$?

# Each job's reports under a name of its own: artifacts of the same path would replace each other.
if [ -n "${BUILDKITE_PARALLEL_JOB:-}" ]; then
    reports=build/baseline/reports place="build/baseline/reports/$line-job-$BUILDKITE_PARALLEL_JOB"
    rm -rf "$place" && mkdir -p "$place"
    find "$reports" -maxdepth 1 -name "$line-*.md" -exec mv {} "$place" \;
fi
exit "$code"
