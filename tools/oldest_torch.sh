#!/usr/bin/env bash
# The suite on the oldest torch that is supported, in an environment beside the workspace's.
set -euo pipefail
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
UV_PROJECT_ENVIRONMENT="$environment" uv sync --quiet
uv pip install --quiet --python "$environment/bin/python" 'torch==2.11.0'
# Subprocesses of tests find torchrun and python first on the path.
PATH="$environment/bin:$PATH" "$environment/bin/python" -m pytest "$@"
