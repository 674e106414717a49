#!/usr/bin/env bash
# The tests that cross packages, on the oldest torch that is supported, in an environment beside the workspace's.
# Those of the packages run on it in tools/wheels.py.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
UV_PROJECT_ENVIRONMENT="$environment" uv sync --quiet
uv pip install --quiet --python "$environment/bin/python" 'torch==2.11.0'
# Subprocesses of tests find torchrun and python first on the path.
PATH="$environment/bin:$PATH" "$environment/bin/python" -m pytest -n 2 tests-e2e "$@"
