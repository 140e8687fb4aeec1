#!/usr/bin/env bash
# The manifests of deploy/kubernetes against their schemas and each other.
# Skipped (exit code 77) where the tools are missing: Debian's packages prometheus, python3-yaml, python3-jsonschema.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
for tool in promtool python3; do
  command -v "${tool}" >/dev/null || { echo "skipped: needs ${tool}"; exit 77; }
done
python3 -c 'import jsonschema, yaml' 2>/dev/null || { echo "skipped: needs python3-yaml, python3-jsonschema"; exit 77; }
exec python3 -B tests/deploy/kubernetes_test.py
