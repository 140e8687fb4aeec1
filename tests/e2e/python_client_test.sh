#!/usr/bin/env bash
# Runs one of the tests in Python: python_client_test.sh SCRIPT PROGRAM STEERED_SERVER
# Skipped (exit code 77) where Debian's python3-grpcio, python3-protobuf, python3-h2 or python3-yaml are missing. A
# python3 that is first in the path may be another one, without the distribution's packages.
set -euo pipefail
script="$1"; shift
for python in python3 /usr/bin/python3; do
  if "${python}" -c 'import google.protobuf, grpc, h2, yaml' 2> /dev/null; then
    exec "${python}" -B "${script}" "$@"
  fi
done
echo "skipped: needs python3-grpcio, python3-protobuf, python3-h2 and python3-yaml"
exit 77
