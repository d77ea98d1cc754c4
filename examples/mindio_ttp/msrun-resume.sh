#!/bin/bash
# Goes on with what msrun.sh has trained, from the last step in ./ttp_checkpoints. The same variables and arguments.
set -eu
exec bash "$(dirname "$0")/msrun.sh" --is_recover 1 "$@"
