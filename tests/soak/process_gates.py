"""Gates K7 to K15: connections, bursts, the long soak, kills, drains, idling, contamination, scrapes, a large start."""
import asyncio
import json
import os
import pathlib
import random
import signal
import struct
import subprocess
import tempfile
import time

from soak_gate import first_answer, gate, watching
from soak_tools import Clients, Server, ids_request


def h2load(server, requests, clients, streams):
    """Calls of Tokenize by another HTTP/2 stack; whether all were served."""
    with tempfile.NamedTemporaryFile() as body:
        message = b"\x12\x0cTom and Lily"
        body.write(b"\0" + struct.pack(">I", len(message)) + message)
        body.flush()
        report = subprocess.run(
            ["h2load", "-n", str(requests), "-c", str(clients), "-m", str(streams), "-H", "te: trailers", "-H",
             "content-type: application/grpc", "-d", body.name,
             f"http://{server.target}/flashquant.v1.InferenceService/Tokenize"],
            check=True, capture_output=True, text=True).stdout
    return f"{requests} succeeded" in report


@gate
def K7(program, short, report):
    """Connections that come for one call and go."""
    rounds, size = (4, 250) if short else (40, 500)
    with Server(program) as server:
        h2load(server, size, size, 1)  # the library makes its threads
        time.sleep(2)
        files, threads = server.files(), server.threads()
        served = sum(h2load(server, size, size, 1) for _ in range(rounds))
        time.sleep(2)
        report.equal(f"rounds of {size} connections served in full", served, rounds)
        report.at_most("files more than before", server.files() - files, 2)
        report.at_most("threads more than before", server.threads() - threads, 2)
        report.equal("left behind", server.leaks(), {})


@gate
def K8(program, short, report):
    """Bursts of ten thousand calls: memory must come back after each, and level off.

    What a burst takes at its peak differs by chance, and the C library keeps the highest: within a second or two without
    calls the server gives it back. So what stays is measured after three seconds, the peak right after the burst.
    """
    with Server(program) as server:
        time.sleep(3)
        idle, served, peaks, sizes = server.rss_mb(), 0, [], []
        for _ in range(8):
            served += h2load(server, 2000 if short else 10000, 10, 100)
            peaks.append(server.rss_mb())
            time.sleep(3)
            sizes.append(server.rss_mb())
        report.equal("bursts served in full", served, 8)
        report.at_most("memory after round 8 over that after round 3", sizes[7] / sizes[2], 1.02)
        report.at_most("memory at rest after a burst, above the idle server", max(sizes) - idle, 8, " MB")
        report.at_most("memory right after a burst, above the idle server", max(peaks) - idle, 50, " MB")
        report.equal("left behind", server.leaks(), {})


@gate
def K9(program, short, report):
    """Twenty minutes at 60% of capacity."""
    tenth = 4 if short else 120
    load = ["--input-tokens", 24, "--output-tokens", 48]
    with Server(program) as server:
        capacity = server.load("--concurrency", 32, "--duration", tenth, "--warmup", 1, *load)["rate"]
        points, runs, start = [], [], time.monotonic()
        with watching(server, tenth / 12,
                      lambda _: points.append((time.monotonic() - start, server.rss_besides_pool_mb()))):
            for _ in range(10):
                runs.append(server.load("--rate", 0.6 * capacity, "--duration", tenth, *load))
        late = [point for point in points if point[0] > points[-1][0] * 0.25]
        report.equal("failed", sum(run["sent"] - run["ok"] for run in runs), 0)
        report.at_most("growth of memory besides the KV pool after a quarter of the time", slope(late) * 600, 1,
                       " MB in 10 min")
        report.at_most("p99 of the whole call, last tenth over first",
                       runs[-1]["latency_seconds"]["p99"] / runs[0]["latency_seconds"]["p99"], 1.1)
        report.equal("left behind", server.leaks(), {})


def slope(points):
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    return (sum((x - mean_x) * (y - mean_y) for x, y in points) / sum((x - mean_x)**2 for x, _ in points))


@gate
def K10(program, short, report):
    """kill -9 under load, again and again on the same port."""
    times, port = [], 0
    for _ in range(5 if short else 50):
        with Server(program, port=port) as server:
            times.append(server.ready_seconds)
            port = server.port
            load = server.load_in_background("--concurrency", 8, "--duration", 30, "--grace", 0)
            while server.scrape().sum("requests_running") == 0:
                time.sleep(0.02)
            server.process.kill()
            server.process.wait()
            load.terminate()
            load.wait()
    report.equal("starts", len(times), 5 if short else 50)
    report.at_most("slowest to be ready", max(times), 3, " s")


@gate
def K11(program, short, report):
    """SIGTERM under 200 streams."""
    broken, slowest, codes = 0, 0.0, set()
    for _ in range(3 if short else 20):
        with Server(program, "--max-sequences", 200, "--token-budget", 256, "--drain-seconds", 60) as server:
            async def run():
                async with Clients(server.target, 10) as clients:
                    jobs = [asyncio.create_task(clients.whole(ids_request([5, number % 100], 48)))
                            for number in range(200)]
                    while server.scrape().sum("requests_received_total") < 200:
                        await asyncio.sleep(0.02)
                    server.process.send_signal(signal.SIGTERM)
                    return await asyncio.gather(*jobs, return_exceptions=True)

            answers = asyncio.run(run())
            broken += sum(isinstance(answer, Exception) or len(answer[0]) != 48 for answer in answers)
            code, seconds = server.stop()
            codes.add(code)
            slowest = max(slowest, seconds)
    report.equal("broken streams", broken, 0)
    report.equal("exit codes", codes, {0})
    report.at_most("end of the process after its last stream", slowest, 5, " s")


@gate
def K12(program, short, report):
    """Nothing to do."""
    seconds = 20 if short else 300
    with Server(program) as server:
        asyncio.run(first_answer(server))
        time.sleep(2)
        used = server.cpu_seconds()
        time.sleep(seconds)
        report.at_most("of a core while idle", 100 * (server.cpu_seconds() - used) / seconds, 1, " %")


@gate
def K13(program, short, report):
    """Alone and in random batches: the same ids."""
    environment = dict(os.environ) if short else dict(os.environ, FQ_SOAK="1")
    binary = K13.binary or pathlib.Path(program).parent / "tests/e2e/e2e_contamination_test"
    run = subprocess.run([binary], env=environment, capture_output=True, text=True)
    for line in run.stdout.splitlines():
        if line.startswith("K13"):
            print(line)
    if run.returncode != 0:
        print(run.stdout[-2000:])
    report.equal("answers differ", run.returncode != 0, False)


K13.binary = None


@gate
def K14(program, short, report):
    """Ten scrapes a second."""
    seconds = 10 if short else 60
    load = ["--concurrency", 64, "--duration", seconds, "--warmup", 2, "--output-tokens", 64]
    with Server(program) as server:
        quiet, scraped = [], []
        for _ in range(3):  # by turns, and the best of each: other work on the machine hits both
            quiet.append(server.load(*load)["gap_seconds"]["p99"])
            with watching(server, 0.1, lambda _: None):
                scraped.append(server.load(*load)["gap_seconds"]["p99"])
        report.at_most("p99 gap with scrapes over without", min(scraped) / min(quiet), 1.05)


@gate
def K15(program, short, report):
    """Start with a large model: how fast it is read, and what checking costs."""
    with tempfile.TemporaryDirectory(dir=pathlib.Path(program).parent) as folder:
        size = write_model(pathlib.Path(folder), layers=2 if short else 11)
        evict(folder)
        start = time.monotonic()
        for path in pathlib.Path(folder).glob("*.safetensors"):
            with open(path, "rb", buffering=0) as file:
                while file.read(1 << 22):
                    pass
        disk = size / (time.monotonic() - start)
        evict(folder)
        with Server(program, "--kv-blocks", 64, "--context-length", 256, model=folder) as server:
            figures = server.scrape()
            stages = {name: figures.sum("model_load_duration_seconds", stage=name)
                      for name in ("read", "verify", "pack", "warmup", "total")}
        print(f"K15  {size / 2**20:.0f} MB, disk {disk / 2**20:.0f} MB/s, seconds: {stages}")
        report.at_least("read speed over the disk's", size / stages["read"] / disk, 0.7)
        report.at_most("checking, of the whole start", stages["verify"] / stages["total"], 0.15)


def write_model(folder, layers):
    """A Llama of wide layers in BF16 with the demo model's tokenizer; its values repeat and are small."""
    hidden, inner, vocabulary, kv = 2048, 5504, 8192, 512
    config = json.loads(pathlib.Path("deploy/demo-model/config.json").read_text())
    config.pop("quantization_config")
    config.update(hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=32,
                  num_key_value_heads=8, head_dim=64)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes(pathlib.Path("deploy/demo-model", name).read_bytes())
    shapes = {"model.embed_tokens.weight": [vocabulary, hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        at = f"model.layers.{layer}."
        shapes.update({at + "input_layernorm.weight": [hidden], at + "post_attention_layernorm.weight": [hidden],
                       at + "self_attn.q_proj.weight": [hidden, hidden], at + "self_attn.k_proj.weight": [kv, hidden],
                       at + "self_attn.v_proj.weight": [kv, hidden], at + "self_attn.o_proj.weight": [hidden, hidden],
                       at + "mlp.gate_proj.weight": [inner, hidden], at + "mlp.up_proj.weight": [inner, hidden],
                       at + "mlp.down_proj.weight": [hidden, inner]})
    header, offset = {}, 0
    for name, shape in shapes.items():
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + 2 * count]}
        offset += 2 * count
    text = json.dumps(header).encode()
    randoms = random.Random(15)
    piece = b"".join(struct.pack("<f", randoms.gauss(0, 0.02))[2:] for _ in range(65536))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in range(0, offset, len(piece)):
            file.write(piece[:offset - start])
        file.flush()
        os.fsync(file.fileno())
    return offset


def evict(folder):
    """Out of the page cache."""
    for path in pathlib.Path(folder).glob("*.safetensors"):
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
