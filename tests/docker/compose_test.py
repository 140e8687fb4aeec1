"""docker/compose.yaml and its override, as docker-compose reads them: every combination of files, profiles and variables.

    compose_test.py [PROGRAM]

Also: what the containers mount is there, Prometheus takes its configuration (promtool), and with PROGRAM the proxy's
configuration is tried by Debian's nginx (skipped by name where it is missing): a generation through it is streamed.
Exit code 77 (skipped) where docker-compose or python3-yaml is missing.
"""
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest

try:
    import yaml
except ImportError:
    print("skipped: needs python3-yaml")
    sys.exit(77)

SERVER_DRAIN_AND_EXIT_SECONDS = 35
PROGRAM = None


def compose(files, profiles=(), variables=None):
    """The merged configuration; an error of docker-compose is a failed test."""
    command = ["docker-compose"]
    for name in files:
        command += ["-f", "docker/" + name]
    for name in profiles:
        command += ["--profile", name]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("FLASHQUANT_", "COMPOSE_"))}
    environment.update(variables or {})
    done = subprocess.run(command + ["config"], env=environment, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise AssertionError(f"{command}: {done.stderr}")
    return yaml.safe_load(done.stdout)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ComposeTest(unittest.TestCase):
    def assert_fixed(self, image):
        """A version that stays the same: by digest, or one that is built or named by the user."""
        if "flashquant" not in image:
            self.assertRegex(image, r"^[a-z/-]+:[\w.-]+@sha256:[0-9a-f]{64}$")
        self.assertNotIn(":latest", image)
        self.assertIn(":", image)

    def test_dockerfiles_start_from_images_pinned_by_digest(self):
        for kind in ("cpu", "cuda"):
            with open(f"docker/{kind}.Dockerfile", encoding="utf-8") as file:
                text = file.read()
            defaults = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.M))
            images = re.findall(r"^FROM (\S+)", text, re.M)
            self.assertEqual(len(images), 2)
            for image in images:
                name = re.fullmatch(r"\$\{(\w+)\}", image)
                self.assertTrue(name, image)
                self.assert_fixed(defaults[name[1]])

    def every_combination(self):
        files = (["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"])
        profiles = ([], ["proxy"])
        variables = ({}, {"FLASHQUANT_MODEL": "/srv/models/mine", "FLASHQUANT_MODEL_NAME": "mine",
                          "FLASHQUANT_IMAGE": "registry.example/flashquant:1", "FLASHQUANT_GPU": "3"})
        for combination in itertools.product(files, profiles, variables):
            yield combination, compose(*combination)

    def test_every_combination_is_accepted_and_confines_every_service(self):
        for combination, config in self.every_combination():
            for name, service in config["services"].items():
                with self.subTest(combination=combination, service=name):
                    self.assertIs(service["read_only"], True)
                    self.assertEqual(service["cap_drop"], ["ALL"])
                    self.assertIn("no-new-privileges:true", service["security_opt"])
                    self.assertNotIn("privileged", service)
                    for port in service["ports"]:
                        self.assertTrue(str(port).startswith("127.0.0.1:"), port)
                    self.assert_fixed(service["image"])

    def test_the_server_may_drain_before_it_is_killed(self):
        config = compose(["compose.yaml"])
        server = config["services"]["server"]
        self.assertEqual(server["environment"]["FLASHQUANT_SHUTDOWN_DRAIN_SECONDS"], "30")
        self.assertGreater(int(server["stop_grace_period"].rstrip("s")), SERVER_DRAIN_AND_EXIT_SECONDS)

    def test_only_the_override_asks_for_a_gpu(self):
        plain = compose(["compose.yaml"])["services"]["server"]
        self.assertNotIn("deploy", plain)
        self.assertEqual(plain["build"]["dockerfile"], "docker/cpu.Dockerfile")
        gpu = compose(["compose.yaml", "compose.gpu.yaml"], variables={"FLASHQUANT_GPU": "3"})["services"]["server"]
        device, = gpu["deploy"]["resources"]["reservations"]["devices"]
        self.assertEqual(device["driver"], "nvidia")
        self.assertEqual(device["device_ids"], ["3"])
        self.assertEqual(device["capabilities"], ["gpu"])
        self.assertEqual(gpu["build"]["dockerfile"], "docker/cuda.Dockerfile")
        self.assertEqual(gpu["environment"]["FLASHQUANT_BACKEND_KIND"], "cuda")
        self.assertEqual(gpu["environment"]["FLASHQUANT_MODEL_PATH"], "/models/model")

    def test_every_mounted_file_and_dockerfile_exists(self):
        for files in (["compose.yaml"], ["compose.yaml", "compose.gpu.yaml"]):
            config = compose(files, ["proxy"])
            for name, service in config["services"].items():
                for volume in service.get("volumes", []):
                    source = volume.split(":")[0] if isinstance(volume, str) else volume["source"]
                    if source in config["volumes"]:
                        continue
                    self.assertTrue(os.path.exists(source), f"{name} mounts {source}")
                if "build" in service:
                    build = service["build"]
                    self.assertTrue(os.path.exists(os.path.join(build["context"], build["dockerfile"])), build)

    def test_variables_choose_model_and_image(self):
        server = compose(["compose.yaml"], variables={"FLASHQUANT_MODEL": "/srv/models/mine",
                                                      "FLASHQUANT_MODEL_NAME": "mine",
                                                      "FLASHQUANT_IMAGE": "registry.example/flashquant:1"})
        server = server["services"]["server"]
        self.assertEqual(server["image"], "registry.example/flashquant:1")
        self.assertEqual(server["environment"]["FLASHQUANT_MODEL_NAME"], "mine")
        self.assertIn("/srv/models/mine:/models/model:ro", [str(v) for v in server["volumes"]])


class MountedFilesTest(unittest.TestCase):
    @unittest.skipUnless(shutil.which("promtool"), "needs promtool")
    def test_prometheus_takes_its_configuration_and_scrapes_the_server(self):
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy("docker/compose/prometheus.yaml", folder)
            shutil.copy("deploy/prometheus/flashquant.rules.yaml", folder)
            done = subprocess.run(["promtool", "check", "config", folder + "/prometheus.yaml"],
                                  capture_output=True, text=True, timeout=60)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        with open("docker/compose/prometheus.yaml", encoding="utf-8") as file:
            job, = yaml.safe_load(file)["scrape_configs"]
        with open("deploy/prometheus/prometheus.yaml", encoding="utf-8") as file:
            other, = yaml.safe_load(file)["scrape_configs"]
        self.assertEqual(job.pop("static_configs"), [{"targets": ["server:9464"]}])
        other.pop("static_configs")
        self.assertEqual(job, other)

    def test_grafana_finds_prometheus_and_the_dashboards(self):
        services = compose(["compose.yaml"])["services"]
        with open("docker/compose/grafana-datasources.yaml", encoding="utf-8") as file:
            source, = yaml.safe_load(file)["datasources"]
        self.assertEqual((source["type"], source["url"], source["isDefault"]),
                         ("prometheus", "http://prometheus:9090", True))
        self.assertIn("prometheus", services)
        with open("docker/compose/grafana-dashboards.yaml", encoding="utf-8") as file:
            provider, = yaml.safe_load(file)["providers"]
        targets = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
        self.assertIn(provider["options"]["path"], targets)

    def test_a_generation_streams_through_the_proxy(self):
        if PROGRAM is None or not shutil.which("nginx"):
            self.skipTest("needs the program and nginx")
        port, metrics, front = free_port(), free_port(), free_port()
        with open("docker/compose/nginx.conf", encoding="utf-8") as file:
            text = file.read()
        for old, new in (("server server:50051;", f"server 127.0.0.1:{port};"),
                         ("listen 50052", f"listen 127.0.0.1:{front}")):
            self.assertEqual(text.count(old), 2 if old.startswith("listen") else 1)
            text = text.replace(old, new)
        with tempfile.TemporaryDirectory() as folder:
            with open(folder + "/nginx.conf", "w", encoding="utf-8") as file:
                file.write(text.replace("/tmp/", folder + "/"))
            processes = [
                subprocess.Popen([PROGRAM, "serve", "--model", "deploy/demo-model", "--listen", f"127.0.0.1:{port}",
                                  "--metrics-listen", f"127.0.0.1:{metrics}", "--backend", "cpu"],
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL),
                subprocess.Popen(["nginx", "-p", folder, "-c", folder + "/nginx.conf", "-g", "daemon off;"],
                                 stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)]
            try:
                target = ["--target", f"127.0.0.1:{front}"]
                ready = False
                for _ in range(300):
                    if subprocess.run([PROGRAM, "health", "--timeout", "2"] + target, capture_output=True,
                                      timeout=30, check=False).returncode == 0:
                        ready = True
                        break
                self.assertTrue(ready, "not healthy through the proxy")
                done = subprocess.run([PROGRAM, "generate", "--prompt", "Once upon a time", "--max-tokens", "24",
                                       "--temperature", "0", "--ignore-eos", "--json"] + target,
                                      capture_output=True, text=True, timeout=60, check=False)
                self.assertEqual(done.returncode, 0, done.stderr)
                messages = [json.loads(line) for line in done.stdout.splitlines()]
                self.assertIn("accepted", messages[0])
                self.assertIn("finished", messages[-1])
                self.assertGreater(len(messages), 3, "the answer came in one piece")
            finally:
                for process in reversed(processes):
                    process.terminate()
                    process.wait(timeout=45)


if __name__ == "__main__":
    if not shutil.which("docker-compose") or subprocess.run(
            ["docker-compose", "version"], capture_output=True, check=False).returncode != 0:
        print("skipped: needs docker-compose")
        sys.exit(77)
    if len(sys.argv) > 1:
        PROGRAM = os.path.abspath(sys.argv.pop(1))
    unittest.main()
