"""What the soak gates share: the server as a process with its figures, the load tool, asynchronous clients."""
import asyncio
import json
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))
import python_client  # noqa: E402

STUBS = python_client.make_stubs()
import grpc  # noqa: E402
from flashquant.v1 import inference_pb2 as pb  # noqa: E402
from flashquant.v1 import inference_service_pb2_grpc as service  # noqa: E402


class Figures:
    """One scrape of /metrics."""

    def __init__(self, text):
        self.values = re.findall(r"^(?:flashquant_)?(\w+)(?:\{(.*)\})? (\S+)$", text, re.M)

    def sum(self, name, **labels):
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(value) for found, have, value in self.values
                   if found == name and all(label in have for label in wanted))

    def quantile(self, name, share):
        """The upper bound of the bucket in which it lies."""
        buckets = {}
        for found, have, value in self.values:
            if found == name + "_bucket":
                bound = float(re.search(r'le="([^"]+)"', have).group(1).replace("+Inf", "inf"))
                buckets[bound] = buckets.get(bound, 0) + float(value)
        total = max(buckets.values(), default=0)
        return min((bound for bound, count in buckets.items() if count >= share * total), default=0) if total else 0


class Server:
    """flashquant serve; the demo model unless another is named."""

    def __init__(self, program, *arguments, model="deploy/demo-model", port=0):
        self.program = program
        self.num_loads = 0
        self.log = tempfile.NamedTemporaryFile(mode="r", prefix="fq_soak_")
        self.started = time.monotonic()
        self.process = subprocess.Popen(
            [program, "serve", "--model", str(model), "--listen", f"127.0.0.1:{port}", "--metrics-listen",
             "127.0.0.1:0", *map(str, arguments)], cwd=ROOT, stderr=open(self.log.name, "w"))
        self.port = int(self.wait_for(r"listening on port ([0-9]+)"))
        self.metrics_port = int(self.wait_for(r"metrics on port ([0-9]+)"))
        self.wait_for(r"(serving model)")
        self.ready_seconds = time.monotonic() - self.started
        self.target = f"127.0.0.1:{self.port}"

    def wait_for(self, pattern):
        while True:
            with open(self.log.name) as log:
                text = log.read()
            if found := re.search(pattern, text):
                return found.group(1)
            if self.process.poll() is not None:
                raise RuntimeError(f"ended with {self.process.returncode}: {text[-500:]}")
            time.sleep(0.02)

    def status(self, key):
        return int(re.search(rf"^{key}:\s+(\d+)", pathlib.Path(f"/proc/{self.process.pid}/status").read_text(),
                             re.M).group(1))

    def rss_mb(self):
        return self.status("VmRSS") / 1024

    def rss_besides_pool_mb(self):
        """Without the KV pool, whose pages become resident when a block is used for the first time, in the server's
        lifetime once each: mappings of more than 64 MiB, the size of an arena of malloc."""
        pool = size = 0
        for line in pathlib.Path(f"/proc/{self.process.pid}/smaps").read_text().splitlines():
            if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)", line):
                size = 0 if found.group(3) else int(found.group(2), 16) - int(found.group(1), 16)
            elif size > 64 << 20 and line.startswith("Rss:"):
                pool += int(line.split()[1]) / 1024
        return self.rss_mb() - pool

    def threads(self):
        return self.status("Threads")

    def files(self):
        return len(list(pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir()))

    def cpu_seconds(self):
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def scrape(self):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as answer:
            return Figures(answer.read().decode())

    def leaks(self, seconds=10):
        """What is open, running or allocated after everybody left; empty when nothing is."""
        end = time.monotonic() + seconds
        while True:
            figures = self.scrape()
            left = {name: value for name, value in {
                "streams_open": figures.sum("streams_open"), "waiting": figures.sum("requests_waiting"),
                "running": figures.sum("requests_running"), "used": figures.sum("kv_blocks", state="used"),
                "unaccounted": figures.sum("kv_blocks_unaccounted"),
                "received - finished": figures.sum("requests_received_total") - figures.sum("requests_finished_total"),
            }.items() if value}
            if not left or time.monotonic() > end:
                return left
            time.sleep(0.1)

    def load(self, *arguments):
        """The figures of `flashquant loadtest`, one run a rate or concurrency."""
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            subprocess.run([*self.loadtest(), "--json", out.name, *map(str, arguments)], cwd=ROOT, check=True,
                           capture_output=True)
            runs = json.load(open(out.name))["runs"]
        return runs[0] if len(runs) == 1 else runs

    def load_in_background(self, *arguments):
        return subprocess.Popen([*self.loadtest(), *map(str, arguments)], cwd=ROOT, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL)

    def loadtest(self):
        """Its command. Each has prompts of its own: with those of an earlier one the prefix cache would answer, and
        a capacity measured before a load would be another load's."""
        self.num_loads += 1
        return [self.program, "loadtest", "--target", self.target, "--seed", str(1000 * self.num_loads)]

    def stop(self):
        """The exit code, and the seconds that the end took."""
        start = time.monotonic()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=90)
        return code, time.monotonic() - start

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self.log.close()


def ids_request(prompt, tokens, seed=1, text=False, every=32, **more):
    return pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=prompt), sampling=pb.SamplingParams(seed=seed, temperature=0.8),
        stop=pb.StopConditions(max_output_tokens=tokens, ignore_eos=True),
        output=pb.OutputOptions(token_ids=True, omit_text=not text, tokens_per_message=every), **more)


class Clients:
    """A few connections, and calls that take turns on them."""

    def __init__(self, target, connections):
        self.channels = [grpc.aio.insecure_channel(target, options=[("grpc.use_local_subchannel_pool", 1),
                                                                    ("grpc.enable_retries", 0)])
                         for _ in range(connections)]
        self.stubs = [service.InferenceServiceStub(channel) for channel in self.channels]
        self.next = 0

    def start(self, request, timeout=600):
        self.next += 1
        return self.stubs[self.next % len(self.stubs)].Generate(request, timeout=timeout)

    async def whole(self, request):
        """(ids, Finished) of a good answer."""
        ids, finished = [], None
        async for message in self.start(request):
            ids.extend(message.delta.token_ids)
            if message.HasField("finished"):
                finished = message.finished
        return ids, finished

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        for channel in self.channels:
            await channel.close()


async def at_most(count, jobs):
    """Runs the coroutines, at most `count` at once; their results in order."""
    gate = asyncio.Semaphore(count)

    async def one(job):
        async with gate:
            return await job

    return await asyncio.gather(*(one(job) for job in jobs))


class SilentReaders:
    """Connections whose every stream asks for an answer and never reads it: windows of 1 KiB that stay shut."""

    def __init__(self, target, connections, streams):
        import h2.config
        import h2.connection
        import h2.settings
        self.sockets = []
        host, port = target.split(":")
        for _ in range(connections):
            link = socket.create_connection((host, int(port)), timeout=30)
            stack = h2.connection.H2Connection(h2.config.H2Configuration())
            stack.local_settings = h2.settings.Settings(
                initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1024})
            stack.initiate_connection()
            for number in range(streams):
                stream = stack.get_next_available_stream_id()
                stack.send_headers(stream, [(":method", "POST"), (":scheme", "http"), (":authority", "x"),
                                            (":path", python_client.SERVICE + "Generate"), ("te", "trailers"),
                                            ("content-type", "application/grpc")])
                body = ids_request([5, number % 100], 400, text=True, every=0).SerializeToString()
                stack.send_data(stream, b"\0" + len(body).to_bytes(4, "big") + body, end_stream=True)
            link.sendall(stack.data_to_send())
            self.sockets.append(link)

    def close(self):
        for link in self.sockets:
            link.close()


def kernel_send_mb(port):
    """Bytes that the kernel holds for what this port has sent and nobody took."""
    total = 0
    for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].split(":")[1], 16) == port:
            total += int(fields[4].split(":")[0], 16)
    return total / 2**20
