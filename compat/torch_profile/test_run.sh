#!/usr/bin/env bash
# Is this machine ready? Every trainer once on the tiny model, into test_run/ of the current folder.
set -euo pipefail

here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
exec "${PYTHON:-python3}" "$here/profiling_script.py" --mode=test "$@"
