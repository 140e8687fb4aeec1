#!/usr/bin/env bash
# Rules, scrape configuration and dashboards of deploy/ against promtool and README's list of metrics. Skipped (exit code
# 77) where the tools are missing: Debian's packages prometheus and python3-yaml.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
command -v promtool >/dev/null || { echo "skipped: needs promtool"; exit 77; }
command -v python3 >/dev/null || { echo "skipped: needs python3"; exit 77; }
python3 -c 'import yaml' 2>/dev/null || { echo "skipped: needs python3-yaml"; exit 77; }
exec python3 -B tests/deploy/monitoring_test.py "$@"
