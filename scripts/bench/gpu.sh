#!/bin/sh
# One prepared run on one NVIDIA GPU of a machine without a network, in at most 8 minutes.
#   scripts/bench/gpu.sh gather [FOLDER]    beforehand, where there is a network and jojax: scripts/bench/carry.py
#   scripts/bench/gpu.sh [--out FOLDER]     there: scripts/bench/gpu.py says what it does; --tiny tries all on a CPU
here=$(dirname "$0")
[ "$1" = gather ] && exec python3 "$here/carry.py" "$@"
exec python3 "$here/gpu.py" "$@"
