"""Makes monitoring/prometheus-rule.yaml of deploy/prometheus/flashquant.rules.yaml: make_prometheus_rule.py > FILE.

The groups are copied as text, so that comments stay; tests/deploy holds the file against this program's output.
"""
import pathlib

RULES = pathlib.Path(__file__).resolve().parent.parent / "prometheus" / "flashquant.rules.yaml"
HEADER = """\
# Made by deploy/kubernetes/make_prometheus_rule.py of deploy/prometheus/flashquant.rules.yaml: change that file.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: flashquant
spec:
"""


def prometheus_rule():
    groups = RULES.read_text(encoding="utf-8").split("\ngroups:\n", 1)[1]
    lines = ("groups:\n" + groups).splitlines()
    return HEADER + "".join(f"  {line}".rstrip() + "\n" for line in lines)


if __name__ == "__main__":
    print(prometheus_rule(), end="")
