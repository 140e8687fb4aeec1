"""A real server under load, scraped by a real Prometheus with our rules: live_metrics_test.py PROGRAM.

Run by monitoring_test.sh from the repository root. What the program exports must be README's table, no more and no
less; every recorded value and every panel of the dashboards must have an answer that is a number; no alert may fire.
"""
import json
import math
import pathlib
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import unittest
import urllib.parse
import urllib.request

import yaml

import metric_list
import monitoring_test
import promql_names

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "e2e"))
import python_client  # noqa: E402

STUBS = python_client.make_stubs()
import grpc  # noqa: E402
from flashquant.v1 import inference_pb2 as pb  # noqa: E402
from flashquant.v1 import inference_service_pb2_grpc as service  # noqa: E402

SERIES_BUDGET = 1000
# What prometheus-cpp adds about the page itself.
OF_THE_LIBRARY = "exposer_"
# Of one wait or call. Generous: a sanitizer's build on a busy machine takes minutes for all of them.
DEADLINE_SECONDS = 180
LOADS = 3
# What the load must have reached, each with a series that counts it.
PATHS = [
    'generations_finished_total{reason="%s"}' % reason
    for reason in ("eos", "stop_sequence", "length", "cancelled", "deadline")
] + ['requests_rejected_total{reason="%s"}' % reason for reason in ("invalid", "too_long", "queue_full")
] + ['preemptions_total{cause="kv_pressure"}', 'preemptions_total{cause="priority"}', "kv_allocation_failures_total",
     'input_tokens_total{kind="recomputed"}',
     "stream_aborts_total", "cancel_to_release_seconds_count",
     'prefix_cache_lookup_tokens_total{result="hit"}', 'input_tokens_total{kind="cached"}']


def may_be_empty(expression, exported):
    """Nothing fires on a healthy server, and a machine without a GPU has no series of one."""
    missing = {f"flashquant_{name}" for name in promql_names.ONLY_WITH_GPU} - exported
    used = {metric for metric, _ in promql_names.find_names(expression).selectors}
    return expression.startswith("ALERTS{") or bool(used & missing)


def fetch(url):
    with urllib.request.urlopen(url, timeout=5) as answer:
        return answer.read().decode()


def free_port():
    """Below the range from which the system hands out ports, so that nobody gets it in the meantime by chance."""
    while True:
        with socket.socket() as listener:
            try:
                port = random.randrange(20000, 30000)
                listener.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue


def parse_exposition(text):
    """(family to type, list of (series name, {label: value})) of a page in the Prometheus text format."""
    types = {name: kind for name, kind in re.findall(r"^# TYPE (\S+) (\w+)$", text, re.M)
             if not name.startswith(OF_THE_LIBRARY)}
    series = []
    for name, labels in re.findall(r"^([a-z_]+)(?:\{(.*)\})? \S+$", text, re.M):
        if name.startswith(OF_THE_LIBRARY):
            continue
        series.append((name, dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', labels))))
    return types, series


class Served:
    """The program with the demo model and a Prometheus that scrapes it each second, both on free ports."""

    def __init__(self):
        self.processes = []

    def launch(self, program, folder):
        self.program = program
        self.log = pathlib.Path(folder, "server.log")
        self.prometheus_log = pathlib.Path(folder, "prometheus.log")
        self.prometheus_url = f"http://127.0.0.1:{free_port()}"
        self.start(self.log, program, "serve", "--model", "deploy/demo-model", "--listen", "127.0.0.1:0",
                   "--metrics-listen", "127.0.0.1:0", "--max-sequences", "4", "--threads", "1",
                   "--context-length", "256", "--kv-blocks", "20", "--max-waiting", "3", "--row-multiple", "8")
        wait_until(lambda: "listening on port" in self.log.read_text(), "the server listens", self.log)
        ports = dict(re.findall(r"(metrics|listening) on port (\d+)", self.log.read_text()))
        self.target = f"127.0.0.1:{ports['listening']}"
        metrics = f"127.0.0.1:{ports['metrics']}"
        self.metrics_url = f"http://{metrics}/metrics"

        config = yaml.safe_load(monitoring_test.read("deploy/prometheus/prometheus.yaml"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(pathlib.Path(monitoring_test.RULES).absolute())]
        config["scrape_configs"][0]["scrape_timeout"] = "1s"
        config["scrape_configs"][0]["static_configs"] = [{"targets": [metrics]}]
        path = pathlib.Path(folder, "prometheus.yaml")
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        self.start(self.prometheus_log, "prometheus", f"--config.file={path}",
                   f"--storage.tsdb.path={folder}/tsdb", "--web.listen-address=" + self.prometheus_url[7:])

    def start(self, log, *command):
        with open(log, "w", encoding="utf-8") as out:
            self.processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))

    def generate(self, *arguments):
        return subprocess.run([self.program, "generate", "--target", self.target, *arguments],
                              capture_output=True, timeout=DEADLINE_SECONDS, check=False).returncode

    def crowd(self):
        """Twelve answers at once, of one process: programs that start meet or not by how fast they start. Four run, whose
        100 tokens each need 28 of the 20 KV blocks; then two come that take the place of others, and six of which some
        find the queue full."""
        def start(priority):
            return stub.Generate(pb.GenerateRequest(
                text="Once upon a time", priority=priority, stop=pb.StopConditions(max_output_tokens=100, ignore_eos=True),
                output=pb.OutputOptions(tokens_per_message=1)), timeout=DEADLINE_SECONDS)

        with grpc.insecure_channel(self.target, options=[("grpc.enable_retries", 0)]) as channel:
            stub = service.InferenceServiceStub(channel)
            calls = []
            for _ in range(4):  # each once the one before runs: four at once would not all fit the queue
                calls.append(start(0))
                while not next(calls[-1]).HasField("delta"):
                    pass
            calls += [start(10) for _ in range(2)] + [start(0) for _ in range(6)]
            for call in calls:
                try:
                    for _ in call:
                        pass
                except grpc.RpcError as error:
                    if error.code() != grpc.StatusCode.RESOURCE_EXHAUSTED:
                        raise

    def load(self):
        """A round over PATHS."""
        self.crowd()
        call = [self.program, "generate", "--target", self.target, "--prompt", "Once upon a time", "--ignore-eos"]
        for seed in range(8):  # where a story often ends
            self.generate("--prompt", "They lived happily ever after.", "--max-tokens", "2", "--seed", str(seed))
        self.generate("--prompt", "Once upon a time", "--stop", "a", "--max-tokens", "200")
        for _ in range(2):  # the second finds the blocks of the first
            self.generate("--prompt", "Once upon a time there was a little girl. " * 6, "--max-tokens", "2")
        self.generate("--prompt", "Once", "--ignore-eos", "--timeout", "0.05")
        self.generate("--prompt", "")
        self.generate("--prompt", "Once", "--max-tokens", "1000000")
        with subprocess.Popen([*call, "--max-tokens", "200"], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL) as cancelled:
            cancelled.stdout.read(1)  # the answer has begun
            cancelled.kill()

    def query(self, expression):
        """The values of the answer; an error of Prometheus raises."""
        url = f"{self.prometheus_url}/api/v1/query?" + urllib.parse.urlencode({"query": expression})
        return [float(sample["value"][1]) for sample in json.loads(fetch(url))["data"]["result"]]

    def stop(self):
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_until(ready, what, log):
    """Calls `ready` until it gives something true; a refused connection counts as not yet."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        try:
            if ready():
                return
        except OSError:
            pass
        time.sleep(0.1)  # a pause between looks at another process, not a wait that the result depends on
    raise AssertionError(f"not within {DEADLINE_SECONDS} s: {what}\n{log.read_text()}")


class LiveMetricsTest(unittest.TestCase):
    program = None

    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.served = Served()
        cls.addClassCleanup(cls.served.stop)
        cls.served.launch(cls.program, folder.name)
        serves = [cls.program, "health", "--target", cls.served.target]
        wait_until(lambda: subprocess.run(serves, capture_output=True, check=False).returncode == 0,
                   "the server serves", cls.served.log)
        wait_until(lambda: fetch(f"{cls.served.prometheus_url}/-/ready"), "Prometheus is ready",
                   cls.served.prometheus_log)

    def test_program_exports_what_readme_lists(self):
        types, series = parse_exposition(fetch(self.served.metrics_url))
        listed = promql_names.read_metrics(monitoring_test.read("README.md"))
        found = {}
        for name, labels in series:
            known = found.setdefault(name, {})
            for label, value in labels.items():
                known.setdefault(label, set()).add(value)
        absent = {name for name in listed if promql_names.needs_gpu(name)} - set(found)
        self.assertEqual(set(found), set(listed) - absent)
        for name, labels in found.items():
            family = name if name in types else re.sub("_(bucket|sum|count)$", "", name)
            self.assertEqual(types[family], listed[name].type, name)
            self.assertEqual(set(labels), set(listed[name].labels), name)
            for label, values in listed[name].labels.items():
                if values is not None:
                    self.assertEqual(labels[label], values, f"{name}, {label}")
        self.assertLessEqual(len(series), SERIES_BUDGET)

    def test_program_exports_the_design_s_list(self):
        page = parse_exposition(fetch(self.served.metrics_url))
        self.assertEqual(metric_list.list_problems(metric_list.read_list(), *page), [])

    def test_promtool_accepts_the_page(self):
        done = subprocess.run(["promtool", "check", "metrics"], input=fetch(self.served.metrics_url),
                              capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_every_recorded_value_and_every_panel_has_an_answer_and_no_alert_fires(self):
        exported = {name for name, _ in parse_exposition(fetch(self.served.metrics_url))[1]}
        wanted = {f"rule {name}": name for name in monitoring_test.recorded_of(monitoring_test.read_rules())}
        for path in monitoring_test.DASHBOARDS:
            for where, expression in monitoring_test.expressions_of(json.loads(monitoring_test.read(path))):
                if not may_be_empty(expression, exported):
                    wanted[f"{path}, {where}: {expression}"] = expression
        wanted.update({f"path {path}": f"sum(flashquant_{path}) > 0" for path in PATHS})
        # By time for a fast machine, whose Prometheus looks once a second; by rounds for a slow one.
        rounds, deadline = 0, time.monotonic() + DEADLINE_SECONDS / 3
        while wanted and (rounds < LOADS or time.monotonic() < deadline):
            rounds += 1
            self.served.load()
            wanted = {where: e for where, e in wanted.items()
                      if all(math.isnan(value) for value in self.served.query(e))}
        self.assertEqual(list(wanted), [], "without an answer")

        groups = json.loads(fetch(f"{self.served.prometheus_url}/api/v1/rules"))["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        self.assertEqual(len(rules), len(monitoring_test.read_rules()))
        for rule in rules:
            self.assertEqual((rule["name"], rule["health"], rule.get("lastError", "")), (rule["name"], "ok", ""))
            self.assertNotEqual(rule.get("state"), "firing", rule["name"])


if __name__ == "__main__":
    LiveMetricsTest.program = sys.argv.pop(1)
    unittest.main(verbosity=2)
