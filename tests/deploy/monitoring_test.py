"""Rules, scrape configuration and dashboards of deploy/; run by monitoring_test.sh from the repository root.

An unknown metric is no error for Prometheus, only an empty answer. So every name in an expression is looked up in the
table of README.md, and promtool only judges the form and the written cases (rules_test.yaml).
"""
import copy
import glob
import json
import pathlib
import re
import subprocess
import tempfile
import unittest

import yaml

import metric_list
import promql_names

RULES = "deploy/prometheus/flashquant.rules.yaml"
CASES = "tests/deploy/rules_test.yaml"
DASHBOARDS = sorted(glob.glob("deploy/grafana/dashboards/*.json"))
SCHEMA_VERSION = 39
# Exported, and in no rule or panel so far.
NOT_SHOWN_YET = set()


def read(path):
    return pathlib.Path(path).read_text(encoding="utf-8")


def promtool(*arguments):
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def read_rules():
    return [rule for group in yaml.safe_load(read(RULES))["groups"] for rule in group["rules"]]


def recorded_of(rules):
    return {rule["record"]: rule["expr"] for rule in rules if "record" in rule}


def substitute(expression):
    """The expression with Grafana's variables replaced as Grafana would."""
    for name, value in (("$__rate_interval", "1m"), ("$__interval", "15s"), ("$__range", "1h")):
        expression = expression.replace(name, value)
    return re.sub(r"\$(model|instance)\b", ".*", expression)


def expressions_of(dashboard):
    """(where, expression) of every panel, annotation and variable, with the variables replaced."""
    found = []
    for panel in dashboard["panels"]:
        found += [(f"panel {panel['title']}", target["expr"]) for target in panel.get("targets", [])]
    found += [(f"annotation {a['name']}", a["expr"]) for a in dashboard["annotations"]["list"] if "expr" in a]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            # label_values(SELECTOR, LABEL) is Grafana's own; the same names in PromQL:
            query = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
            found.append((f"variable {variable['name']}", f"count by ({query[2]}) ({query[1]})"))
    return [(where, substitute(expression)) for where, expression in found]


def panel_problems(panel):
    found = []
    if not panel.get("title"):
        found.append("no title")
    if panel["type"] == "row":
        return found
    if not panel.get("description"):
        found.append("no description")
    if not panel["fieldConfig"]["defaults"].get("unit"):
        found.append("no unit")
    if not panel.get("targets"):
        found.append("no query")
    for part in [panel, *panel.get("targets", [])]:
        if part.get("datasource") != {"type": "prometheus", "uid": "${datasource}"}:
            found.append("its data source is not the variable")
    ids = [target["refId"] for target in panel.get("targets", [])]
    if len(set(ids)) != len(ids):
        found.append("two queries of one refId")
    return found


def dashboard_problems(dashboard):
    """What is wrong with its form."""
    found = []
    if dashboard["id"] is not None or not dashboard["uid"]:
        found.append("id must be null, uid must be set")
    if dashboard["schemaVersion"] != SCHEMA_VERSION:
        found.append(f"schemaVersion is not {SCHEMA_VERSION}")
    if [v["type"] for v in dashboard["templating"]["list"] if v["name"] == "datasource"] != ["datasource"]:
        found.append("no variable for the data source")
    ids = [panel["id"] for panel in dashboard["panels"]]
    if len(set(ids)) != len(ids):
        found.append("two panels of one id")
    taken = {}
    for panel in dashboard["panels"]:
        title = panel["title"]
        found += [f"{title}: {problem}" for problem in panel_problems(panel)]
        place = panel["gridPos"]
        if place["x"] + place["w"] > 24:
            found.append(f"{title}: wider than the grid")
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                if taken.setdefault((x, y), title) != title:
                    found.append(f"{title} lies over {taken[x, y]}")
                    taken[x, y] = title
    found += [f"{where}: unknown variable" for where, e in expressions_of(dashboard) if "$" in e]
    return found


def check_expressions(expressions):
    """promtool's exit code and words about a rules file made of the expressions."""
    rules = [{"record": f"check:number{i}", "expr": e} for i, e in enumerate(expressions)]
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, "expressions.yaml")
        path.write_text(yaml.safe_dump({"groups": [{"name": "check", "rules": rules}]}), encoding="utf-8")
        return promtool("check", "rules", str(path))


class RulesTest(unittest.TestCase):
    def setUp(self):
        self.rules = read_rules()
        self.alerts = [rule for rule in self.rules if "alert" in rule]

    def test_promtool_accepts_rules_and_scrape_configuration(self):
        for arguments in (("check", "rules", RULES), ("check", "config", "deploy/prometheus/prometheus.yaml")):
            code, output = promtool(*arguments)
            self.assertEqual(code, 0, output)

    def test_written_cases_give_the_alerts_and_values_they_should(self):
        code, output = promtool("test", "rules", CASES)
        self.assertEqual(code, 0, output)

    def test_every_alert_has_a_case_that_fires_and_one_that_does_not(self):
        fires, silent = set(), set()
        for case in yaml.safe_load(read(CASES))["tests"]:
            for alert in case.get("alert_rule_test", []):
                (fires if alert["exp_alerts"] else silent).add(alert["alertname"])
        names = {alert["alert"] for alert in self.alerts}
        self.assertGreater(len(names), 0)
        self.assertEqual(names, fires)
        self.assertEqual(names, silent)

    def test_rules_name_only_what_is_exported(self):
        metrics = promql_names.read_metrics(read("README.md"))
        for rule in self.rules:
            with self.subTest(rule=rule.get("record") or rule["alert"]):
                self.assertEqual(promql_names.problems(rule["expr"], metrics, recorded_of(self.rules)), [])

    def test_every_alert_has_severity_summary_and_a_section_in_the_operators_page(self):
        sections = re.findall(r"^### (\w+)$", read("deploy/prometheus/README.md"), re.M)
        self.assertEqual([alert["alert"] for alert in self.alerts], sections)
        for alert in self.alerts:
            self.assertIn(alert["labels"]["severity"], ("critical", "warning"))
            self.assertTrue(alert["annotations"]["summary"])


class DashboardsTest(unittest.TestCase):
    def setUp(self):
        self.dashboards = {path: json.loads(read(path)) for path in DASHBOARDS}

    def test_there_are_dashboards_and_their_uids_differ(self):
        uids = [dashboard["uid"] for dashboard in self.dashboards.values()]
        self.assertGreater(len(uids), 0)
        self.assertEqual(len(set(uids)), len(uids))

    def test_form_is_what_grafana_imports(self):
        for path, dashboard in self.dashboards.items():
            self.assertEqual(dashboard_problems(dashboard), [], path)

    def test_every_expression_parses_and_names_only_what_is_exported(self):
        metrics = promql_names.read_metrics(read("README.md"))
        recorded = recorded_of(read_rules())
        for path, dashboard in self.dashboards.items():
            expressions = expressions_of(dashboard)
            code, output = check_expressions([expression for _, expression in expressions])
            self.assertEqual(code, 0, f"{path}: {output}")
            for where, expression in expressions:
                with self.subTest(path=path, where=where):
                    self.assertEqual(promql_names.problems(expression, metrics, recorded), [])


class CoverageTest(unittest.TestCase):
    def test_every_exported_metric_is_in_a_rule_or_panel_or_named_as_missing(self):
        expressions = [rule["expr"] for rule in read_rules()]
        for path in DASHBOARDS:
            expressions += [expression for _, expression in expressions_of(json.loads(read(path)))]
        used = {metric for e in expressions for metric, _ in promql_names.find_names(e).selectors}
        families = {}
        for name, metric in promql_names.read_metrics(read("README.md")).items():
            family = re.sub("_(bucket|sum|count)$", "", name) if metric.type == "histogram" else name
            families.setdefault(family, set()).add(name)
        unused = {family for family, names in families.items() if not names & used}
        self.assertEqual(unused, NOT_SHOWN_YET)


class ChecksCanFailTest(unittest.TestCase):
    README = "\n## Metrics\n\n" \
        "| `waiting` | gauge |  | x |\n" \
        "| `rows_total` | counter | kind: padding, real; phase | x |\n" \
        "| `wait_seconds` | histogram |  | x |\n" \
        "| `process_threads` | gauge |  | x |\n\n## Other\n| `later` | gauge |  | x |\n"

    def problems(self, expression):
        return promql_names.problems(expression, promql_names.read_metrics(self.README),
                                     {"a:rows": "sum by (kind) (rate(flashquant_rows_total[5m]))"})

    def test_good_expressions_have_no_problem(self):
        for expression in (
                'sum by (phase) (rate(flashquant_rows_total{kind=~"real|padding", phase="any"}[5m])) > bool 0',
                "histogram_quantile(0.9, sum by (le, model) (rate(flashquant_wait_seconds_bucket[5m] offset 1h)))",
                'a:rows{kind="real"} / on (instance) group_left flashquant_waiting{job="a, b"} and process_threads > 1',
                'up{job="x"} or absent(up{job="x"})'):
            self.assertEqual(self.problems(expression), [], expression)

    def test_names_that_do_not_exist_are_found(self):
        for expression, problem in (
                ("rate(flashquant_missing_total[5m])", "flashquant_missing_total is not exported"),
                ("waiting > 1", "waiting is not exported"),
                ("flashquant_later", "flashquant_later is not exported"),
                ("flashquant_wait_seconds", "flashquant_wait_seconds is not exported"),
                ("b:rows", "b:rows is not exported"),
                ('flashquant_waiting{phase="x"}', "flashquant_waiting has no label phase"),
                ('process_threads{model="x"}', "process_threads has no label model"),
                ('flashquant_rows_total{kind=~"real|other"}', "flashquant_rows_total: kind is never other"),
                ("sum by (reason) (flashquant_waiting)", "no metric here has the label reason"),
                ("vector(1)", "no metric in it")):
            self.assertEqual(self.problems(expression), [problem], expression)

    def test_differences_from_the_list_are_found(self):
        wanted = {"buckets": {"A": [1, 2]}, "metrics": {
            "rows": {"type": "gauge", "labels": {"kind": ["a", "b"]}},
            "wait_seconds": {"type": "histogram", "buckets": "A", "process": True},
            "card": {"type": "gauge", "gpu": True}}}
        types = {"flashquant_rows": "gauge", "flashquant_wait_seconds": "histogram"}
        series = [("flashquant_rows", {"kind": "a", "model": "m"}), ("flashquant_rows", {"kind": "b", "model": "m"}),
                  ("flashquant_wait_seconds_sum", {}), ("flashquant_wait_seconds_count", {}),
                  *(("flashquant_wait_seconds_bucket", {"le": bound}) for bound in ("1", "2", "+Inf"))]
        self.assertEqual(metric_list.list_problems(wanted, types, series), [])
        for change in (lambda: types.update(flashquant_more="gauge"),
                       lambda: types.pop("flashquant_rows"),
                       lambda: types.update(flashquant_rows="counter"),
                       lambda: series.pop(1),
                       lambda: series.append(("flashquant_rows", {"kind": "c", "model": "m"})),
                       lambda: series.append(("flashquant_rows", {"kind": "a"})),
                       lambda: series.append(("flashquant_wait_seconds_bucket", {"le": "3"})),
                       lambda: wanted["metrics"]["rows"].update(without={"kind": ["b"]}, why="not yet"),
                       lambda: wanted["metrics"]["rows"].update(later=True, why="not yet")):
            kept = copy.deepcopy((wanted, types, series))
            change()
            self.assertNotEqual(metric_list.list_problems(wanted, types, series), [])
            wanted, types, series = kept

    def test_expression_that_does_not_parse_is_refused(self):
        self.assertNotEqual(check_expressions(["sum(up"])[0], 0)

    def test_flaws_in_a_dashboard_are_found(self):
        good = json.loads(read(DASHBOARDS[0]))
        panel = next(i for i, p in enumerate(good["panels"]) if p["type"] != "row")

        def broken(change):
            dashboard = copy.deepcopy(good)
            change(dashboard, dashboard["panels"][panel])
            return dashboard_problems(dashboard)

        for change in (lambda d, p: d.update(id=1),
                       lambda d, p: d.update(schemaVersion=41),
                       lambda d, p: d["templating"]["list"].pop(0),
                       lambda d, p: p.update(description=""),
                       lambda d, p: p.update(title=""),
                       lambda d, p: p["fieldConfig"]["defaults"].pop("unit"),
                       lambda d, p: p.update(id=d["panels"][-1]["id"]),
                       lambda d, p: p["targets"][0].update(expr="up{job='$other'}"),
                       lambda d, p: p["targets"][0].update(datasource={"type": "prometheus", "uid": "P1"}),
                       lambda d, p: p["gridPos"].update(x=20, w=6)):
            self.assertNotEqual(broken(change), [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
