#!/usr/bin/env bash
# What operators import from deploy/ (rules, scrape configuration, dashboards), against promtool and README's metrics:
#   monitoring_test.sh             the files alone
#   monitoring_test.sh PROGRAM     with a server that a Prometheus scrapes
# Skipped (exit code 77) where the tools are missing: Debian's packages prometheus and python3-yaml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
for tool in promtool prometheus python3; do
  command -v "${tool}" >/dev/null || { echo "skipped: needs ${tool}"; exit 77; }
done
if (($# > 0)); then
  exec bash tests/e2e/python_client_test.sh tests/deploy/live_metrics_test.py "$1"
fi
python3 -c 'import yaml' 2>/dev/null || { echo "skipped: needs python3-yaml"; exit 77; }
exec python3 -B tests/deploy/monitoring_test.py
