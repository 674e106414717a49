#!/usr/bin/env bash
# All checks that are not tests; with --quick those that take a second.
set -euo pipefail
cd "$(dirname "$0")/.."
uv run ruff format --check
uv run ruff check
uv run tools/imports.py
uv run tools/versions.py check
[ "${1:-}" = --quick ] && exit
uv run lint-imports
uv run ty check
packages=()
for folder in packages/*/src/d9d/*/; do packages+=(-p "d9d.$(basename "$folder")"); done
uv run mypy "${packages[@]}"
uv run mypy tools/*.py examples/*/*.py tests-e2e/third_party/*.py
python3 tools/lock.py check
