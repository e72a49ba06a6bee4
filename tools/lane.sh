#!/usr/bin/env bash
# Python with the oldest or the newest versions that weft is tested with:
#
#     tools/lane.sh newest -m pytest tests/sim/test_sim.py
#
# The first call makes the environment (6 GB, a few minutes) in the user's cache. All clones share
# it; weft itself is read from the clone that this file is in.
set -euo pipefail

case ${1-} in
  oldest) pins=(torch==2.11.0 triton==3.6.0 'numpy<2.4') ;;  # Triton 3.6 interprets with no newer
  newest) pins=(torch==2.15.0 triton==3.9.0) ;;
  *) echo "usage: $0 oldest|newest PYTHON-ARGUMENTS" >&2; exit 2 ;;
esac
lane=$1
shift
here=$(cd "$(dirname "$0")/.." && pwd)
lanes=${XDG_CACHE_HOME:-$HOME/.cache}/weft/lanes
environment=$lanes/$lane
mkdir -p "$lanes"

# One clone at a time makes it, while nobody runs in it.
exec 9>"$lanes/$lane.lock"
constraints=$(
  printf '%s\n' "${pins[@]}"
  grep -vE '^(#|torch=|triton=|numpy=|setuptools=)' "$here/constraints.txt"  # the tools are the pinned ones
)
asked=$(
  "${PYTHON:-python3}" --version
  echo "$constraints"
  sed -n '/^dependencies/,/^\[project.scripts/p' "$here/pyproject.toml"
)
has_what_is_asked() { [ "$(cat "$environment/asked" 2>/dev/null)" = "$asked" ]; }
flock -s 9
if ! has_what_is_asked; then
  flock -u 9
  flock 9
  if ! has_what_is_asked; then
    echo "making $environment" >&2
    rm -rf "$environment"
    "${PYTHON:-python3}" -m venv "$environment"
    echo "$constraints" >"$environment/constraints.txt"
    # A machine's own configuration of pip may cap torch.
    PIP_CONFIG_FILE=/dev/null PIP_CONSTRAINT='' "$environment/bin/python" -m pip install --quiet \
      -c "$environment/constraints.txt" "$here[dev]" >&2
    "$environment/bin/python" -m pip uninstall --quiet --yes weft >&2
    echo "$asked" >"$environment/asked"
  fi
  flock -s 9
fi
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" exec "$environment/bin/python" "$@"
