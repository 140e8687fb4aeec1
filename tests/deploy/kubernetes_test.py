"""Manifests of deploy/kubernetes; run by kubernetes_test.sh from the repository root.

Every file is held against kubernetes_schemas.yaml and against what the manifests, the program and the rules must agree
on. Where kubectl is installed, each kustomization is built by it and the result checked the same way.
"""
import copy
import glob
import pathlib
import re
import shutil
import subprocess
import sys
import unittest

import jsonschema
import yaml

import monitoring_test
import promql_names

FOLDER = "deploy/kubernetes"
SCHEMAS = yaml.safe_load(monitoring_test.read("tests/deploy/kubernetes_schemas.yaml"))
OVERLAYS = sorted(str(pathlib.Path(path).parent) for path in glob.glob(f"{FOLDER}/*/kustomization.yaml"))


def load(path):
    return yaml.safe_load(monitoring_test.read(f"{FOLDER}/{path}"))


def problems(document):
    """What is wrong with one object."""
    kind = SCHEMAS["kinds"].get(document.get("kind"))
    if kind is None:
        return [f"unknown kind {document.get('kind')}"]
    schema = {"$defs": SCHEMAS["$defs"], "type": "object", "additionalProperties": False,
              "required": ["apiVersion", "kind", "metadata", *(["spec"] if "spec" in kind["properties"] else [])],
              "properties": {"apiVersion": {"const": kind["apiVersion"]}, "kind": {},
                             "metadata": {"$ref": "#/$defs/metadata"}, **kind["properties"]}}
    errors = jsonschema.Draft202012Validator(schema).iter_errors(document)
    return [f"{'/'.join(map(str, error.absolute_path))}: {error.message}" for error in errors]


def server_options():
    """The environment variables of README's table of options."""
    return set(re.findall(r"`(FLASHQUANT_[A-Z_]+)`", monitoring_test.read("README.md")))


class ManifestsTest(unittest.TestCase):
    def test_every_file_belongs_to_its_kustomization_and_fits_its_schema(self):
        for overlay in OVERLAYS:
            kustomization = yaml.safe_load(monitoring_test.read(f"{overlay}/kustomization.yaml"))
            patches = {patch["path"] for patch in kustomization.get("patches", [])}
            resources = set(kustomization["resources"])
            self.assertEqual({p.name for p in pathlib.Path(overlay).iterdir()} - {"kustomization.yaml"},
                             {r for r in resources if not r.startswith("..")} | patches)
            for name in resources - {r for r in resources if r.startswith("..")}:
                document = yaml.safe_load(monitoring_test.read(f"{overlay}/{name}"))
                self.assertEqual(problems(document), [], f"{overlay}/{name}")

    def test_what_kubectl_builds_of_each_kustomization_fits_the_schemas(self):
        if shutil.which("kubectl") is None:
            self.skipTest("needs kubectl 1.24 or later")
        for overlay in OVERLAYS:
            done = subprocess.run(["kubectl", "kustomize", overlay], capture_output=True, text=True, check=False)
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            documents = list(yaml.safe_load_all(done.stdout))
            self.assertGreater(len(documents), 0)
            for document in documents:
                self.assertEqual(problems(document), [], overlay)
                self.assertEqual(document["metadata"]["labels"]["app.kubernetes.io/name"], "flashquant")

    def test_selectors_choose_the_pods_and_nothing_asks_clients_for_the_servers_labels(self):
        labels = load("base/deployment.yaml")["spec"]["template"]["metadata"]["labels"]
        policy = load("base/network-policy.yaml")["spec"]
        for selector in (load("base/deployment.yaml")["spec"]["selector"]["matchLabels"],
                         load("base/service.yaml")["spec"]["selector"], policy["podSelector"]["matchLabels"],
                         load("base/pod-disruption-budget.yaml")["spec"]["selector"]["matchLabels"]):
            self.assertEqual(selector, labels)
        for overlay in OVERLAYS:
            kustomization = yaml.safe_load(monitoring_test.read(f"{overlay}/kustomization.yaml"))
            # It would add the label to the policy's clients too.
            self.assertNotIn("commonLabels", kustomization)
            self.assertFalse(any(rule.get("includeSelectors") for rule in kustomization.get("labels", [])))

    def test_options_are_those_of_the_server(self):
        for path in ("base/config.yaml", "gpu/config.yaml"):
            self.assertEqual(set(load(path)["data"]) - server_options(), set(), path)

    def test_a_pod_has_time_to_drain_after_routers_have_let_go_of_it(self):
        pod = load("base/deployment.yaml")["spec"]["template"]["spec"]
        pause = int(pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
        drain = int(load("base/config.yaml")["data"]["FLASHQUANT_SHUTDOWN_DRAIN_SECONDS"])
        # The program ends by itself 5 s after the drain.
        self.assertGreater(pod["terminationGracePeriodSeconds"], pause + drain + 5)
        self.assertGreater(pause, 2 * 5, "less than two readiness probes")

    def test_ports_of_pod_service_policy_and_configuration_are_the_same(self):
        ports = {p["name"]: p["containerPort"]
                 for p in load("base/deployment.yaml")["spec"]["template"]["spec"]["containers"][0]["ports"]}
        data = load("base/config.yaml")["data"]
        self.assertEqual(ports, {"grpc": int(data["FLASHQUANT_LISTEN_ADDRESS"].rsplit(":", 1)[1]),
                                 "metrics": int(data["FLASHQUANT_METRICS_ADDRESS"].rsplit(":", 1)[1])})
        service = load("base/service.yaml")["spec"]["ports"]
        self.assertEqual({p["targetPort"]: p["port"] for p in service}, ports)
        policy = load("base/network-policy.yaml")["spec"]["ingress"]
        self.assertEqual({p["port"] for rule in policy for p in rule["ports"]}, set(ports.values()))
        monitor = load("monitoring/service-monitor.yaml")["spec"]["endpoints"]
        self.assertEqual([e["port"] for e in monitor], ["metrics"])

    def test_pods_meet_the_restricted_standard(self):
        pod = load("base/deployment.yaml")["spec"]["template"]["spec"]
        self.assertTrue(pod["securityContext"]["runAsNonRoot"])
        self.assertEqual(pod["securityContext"]["seccompProfile"], {"type": "RuntimeDefault"})
        self.assertFalse(pod["automountServiceAccountToken"])
        for container in pod["containers"]:
            self.assertEqual(container["securityContext"], {
                "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}})

    def test_rules_of_the_operator_are_made_of_those_of_prometheus(self):
        made = subprocess.run([sys.executable, "-B", f"{FOLDER}/make_prometheus_rule.py"], capture_output=True,
                              text=True, check=True).stdout
        self.assertEqual(monitoring_test.read(f"{FOLDER}/monitoring/prometheus-rule.yaml"), made)
        self.assertEqual(yaml.safe_load(made)["spec"], yaml.safe_load(monitoring_test.read(monitoring_test.RULES)))

    def test_autoscaling_asks_for_metrics_that_are_exported(self):
        metrics = promql_names.read_metrics(monitoring_test.read("README.md"))
        for trigger in load("monitoring/scaled-object.yaml")["spec"]["triggers"]:
            query = trigger["metadata"]["query"].replace(', namespace="flashquant"', "")  # added by the operator
            self.assertEqual(monitoring_test.check_expressions([query])[0], 0)
            self.assertEqual(promql_names.problems(query, metrics, {}), [])


class ChecksCanFailTest(unittest.TestCase):
    def test_flaws_in_an_object_are_found(self):
        good = load("base/deployment.yaml")
        self.assertEqual(problems(good), [])

        def container(document):
            return document["spec"]["template"]["spec"]["containers"][0]

        for change in (lambda d: d.update(kind="Deploymint"),
                       lambda d: d.update(apiVersion="apps/v1beta1"),
                       lambda d: d["metadata"].update(name="Flash_Quant"),
                       lambda d: d["spec"].pop("selector"),
                       lambda d: d["spec"].update(replica=2),
                       lambda d: container(d).update(readynessProbe={}),
                       lambda d: container(d)["readinessProbe"].update(tcpSocket={"port": "grpc"}),
                       lambda d: container(d)["readinessProbe"]["grpc"].update(port="grpc"),
                       lambda d: container(d)["resources"]["limits"].update(memory="4GB"),
                       lambda d: container(d)["ports"][0].update(containerPort=70000)):
            document = copy.deepcopy(good)
            change(document)
            self.assertNotEqual(problems(document), [])


if __name__ == "__main__":
    unittest.main(verbosity=2)
