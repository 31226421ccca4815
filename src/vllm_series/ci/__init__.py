"""Continuous integration: the steps, the Buildkite pipeline made of them, and what the steps need beside."""
