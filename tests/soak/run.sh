#!/usr/bin/env bash
# Load and soak gates K1 to K15 on the demo model: tests/soak/run.sh PROGRAM [--short] [--only K1,K8]
# Prints each gate's figures beside its limits; exit code 1 when one is broken. Needs python3-grpcio, python3-protobuf,
# python3-h2 and nghttp2-client (docker/apt-packages.txt, "test"); what is measured and how: stream_gates.py, process_gates.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
ulimit -n "$(ulimit -Hn)" 2> /dev/null || true
exec bash tests/e2e/python_client_test.sh tests/soak/soak.py "$@"
