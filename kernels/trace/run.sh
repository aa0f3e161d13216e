#!/bin/sh
# sh run.sh PROGRAM ARGUMENTS...
#
# Run a program under the tracer. On stdout comes what it prints, then the trace; the exit status is the program's.
set -e
here=$(cd "$(dirname "$0")" && pwd)
make -s -C "$here" OUT="$here/build" >&2
trace=$(mktemp)
trap 'rm -f "$trace"' EXIT
library=$here/build/libtrace.so
TRACE_OUT=$trace CUDA_INJECTION64_PATH=$library LD_PRELOAD=$library "$@"
echo  # after a line that the program may have cut
cat "$trace"
