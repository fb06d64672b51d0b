#!/usr/bin/env bash
# Sets everything up on a fresh machine, checks the style and runs the tests; arguments go to pytest.
#
#   bash scripts/test.sh
#   bash scripts/test.sh tests/test_verification.py -k residual
#   bash scripts/test.sh -n auto --dist loadfile   # as many tests at a time as there are cores
#
# `scripts/environment.sh` tells how to choose the interpreter and the environment's folder.
set -euo pipefail

source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

make_environment '[test]'
cd "$root"
"$venv/bin/python" -m ruff check .
# The tests' tolerances are those of float32 on a CPU; other devices round products by default.
export JAX_PLATFORMS=${JAX_PLATFORMS:-cpu}
# Tests, and the commands that they start, compile many programs alike: each is compiled once.
cache=$(mktemp -d)
trap 'rm -r "$cache"' EXIT
export JAX_COMPILATION_CACHE_DIR=$cache JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0
"$venv/bin/python" -m pytest "$@"
