#!/usr/bin/env bash
# Buildkite's first step: makes the pipeline of this commit and uploads it. Through a file, since an agent takes an empty
# input for a pipeline without steps: a pipe would turn a failure to make it into a build that passes with nothing run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

mkdir -p build
scripts/lib/run.sh series ci pipeline >build/pipeline.yml
buildkite-agent pipeline upload build/pipeline.yml
