"""What the tests in Python share: stubs made from the proto alone, and the two kinds of server they talk to.

The stubs come from protoc and the Python plugin of Debian's protobuf-compiler-grpc; nothing of this project but
proto/ and the built programs is used.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SERVICE = "/flashquant.v1.InferenceService/"


def make_stubs():
    """Compiles proto/ into a temporary folder and puts it on the path; keep the result alive."""
    folder = tempfile.TemporaryDirectory()
    protos = [str(path) for path in sorted((ROOT / "proto").rglob("*.proto"))]
    plugin = subprocess.run(["which", "grpc_python_plugin"], check=True, capture_output=True, text=True).stdout.strip()
    subprocess.run(["protoc", f"-I{ROOT / 'proto'}", f"--python_out={folder.name}", f"--grpc_out={folder.name}",
                    f"--plugin=protoc-gen-grpc={plugin}", *protos], check=True)
    # Folders without an __init__.py would lose against the installed namespace packages google and grpc.
    for name in ("google", "grpc"):
        package = __import__(name)
        package.__path__.append(str(pathlib.Path(folder.name, name)))
    sys.path.insert(0, folder.name)
    return folder


class Steered:
    """steered_server: the real server around a pretended model that does as it is told."""

    def __init__(self, program, *arguments):
        self.process = subprocess.Popen([program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        port, admin_port = self.process.stdout.readline().split()
        self.target, self.admin_target = f"127.0.0.1:{port}", f"127.0.0.1:{admin_port}"

    def tell(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline().strip()
        if command != "leaks" and not command.startswith("sum ") and answer != "ok":
            raise RuntimeError(f"{command}: {answer}")
        return answer

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        code = self.process.wait(timeout=30)
        if code != 0:
            raise RuntimeError(f"steered_server ended with {code}")


class Served:
    """`flashquant serve` with the demo model on free ports."""

    def __init__(self, program, *arguments, port=0):
        self.log = tempfile.NamedTemporaryFile(mode="r+")
        self.process = subprocess.Popen(
            [program, "serve", "--model", "deploy/demo-model", "--listen", f"127.0.0.1:{port}", "--metrics-listen",
             "127.0.0.1:0", "--threads", "1", *arguments], cwd=ROOT, stderr=self.log)
        self.target = f"127.0.0.1:{self.wait_for(r'listening on port ([0-9]+)')}"
        self.metrics_port = int(self.wait_for(r"metrics on port ([0-9]+)"))

    def wait_for(self, pattern):
        """The first group of `pattern` in the log; the process must not end before it is there."""
        while True:
            with open(self.log.name) as log:
                found = re.search(pattern, log.read())
            if found:
                return found.group(1)
            try:
                self.process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                continue
            raise RuntimeError(f"ended with {self.process.returncode}: {open(self.log.name).read()}")

    def close(self):
        self.process.terminate()
        code = self.process.wait(timeout=60)
        self.log.close()
        if code != 0:
            raise RuntimeError(f"flashquant serve ended with {code}")
