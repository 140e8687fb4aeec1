"""Load and soak gates K1 to K15: each prints its figures beside its limits and fails when one is broken.

    tests/soak/run.sh PROGRAM [--short] [--only K1,K8] [--contamination-test BINARY]

--short: minutes instead of hours, for a check while working; limits on latencies and slopes need the long form on a
machine that does nothing else. The long form of all takes about an hour and a half, of which K9 takes twenty minutes.
"""
import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import random
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time

from soak_tools import Clients, Server, SilentReaders, at_most, grpc, ids_request, kernel_send_mb

GATES = {}


def gate(function):
    GATES[function.__name__] = function
    return function


class Report:
    """The checks of one gate."""

    def __init__(self, name):
        self.name, self.ok = name, True

    def at_most(self, what, value, limit, unit=""):
        self.line(what, value, f"at most {limit:.4g}{unit}", value <= limit, unit)

    def at_least(self, what, value, limit, unit=""):
        self.line(what, value, f"at least {limit:.4g}{unit}", value >= limit, unit)

    def equal(self, what, value, wanted):
        self.line(what, value, f"{wanted}", value == wanted)

    def line(self, what, value, limit, ok, unit=""):
        self.ok = self.ok and ok
        shown = f"{value:.4g}{unit}" if isinstance(value, float) else f"{value}{unit}"
        print(f"{self.name:4} {'pass' if ok else 'FAIL'}  {what}: {shown} ({limit})", flush=True)


@contextlib.contextmanager
def watching(server, every, look):
    """Calls look(Figures) every so many seconds meanwhile."""
    done = threading.Event()

    def run():
        while not done.wait(every):
            look(server.scrape())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def prompt_of(randoms, low, high):
    return [randoms.randrange(3, 8000) for _ in range(randoms.randint(low, high))]


@gate
def K1(program, short, report):
    """Many streams at once: 10 connections with 100 each, 64 tokens."""
    count = 200 if short else 1000
    bench = subprocess.run([program, "bench", "engine", "--model", "deploy/demo-model", "--batch", str(count),
                            "--context", "64", "--steps", "10"], check=True, capture_output=True, text=True).stdout
    alone = count / engine_step_seconds(bench, count)
    blocks = count * 6
    with Server(program, "--max-sequences", count, "--token-budget", count, "--kv-blocks", blocks) as server:
        base, kv = server.rss_mb(), server.scrape().sum("kv_bytes") / 2**20
        randoms, peak, done = random.Random(1), [0.0], []

        async def one(clients, number):
            await clients.whole(ids_request([5, 6, 7, number % 100], 64, seed=number))
            done.append(time.monotonic())

        async def run():
            async with Clients(server.target, 10) as clients:
                await at_most(count, [one(clients, randoms.randrange(1000)) for _ in range(count)])

        start = time.monotonic()
        with watching(server, 0.5, lambda _: peak.append(server.rss_mb())):
            asyncio.run(run())
        times = [end - start for end in done]
        report.equal("streams that ended well", len(times), count)
        report.at_least("tokens/s, of the engine's own at that batch", count * 64 / max(times) / alone, 0.9)
        report.at_most("last finisher over the mean", max(times) / (sum(times) / len(times)), 1.5)
        report.at_most("memory above the idle server", max(peak) - base, 100 + kv, " MB")
        report.equal("left behind", server.leaks(), {})


def engine_step_seconds(bench, batch):
    """The decode step of `flashquant bench engine` in seconds: its third column is milliseconds."""
    rows = (line.split() for line in bench.splitlines())
    return next(float(fields[2]) / 1e3 for fields in rows if fields[:1] == [str(batch)])


@gate
def K2(program, short, report):
    """Cancels at any moment: before, in the queue, in prefill, in decode, at the end."""
    count = 1000 if short else 10000
    with Server(program, "--max-sequences", 32, "--max-waiting", 4096) as server:
        randoms, unaccounted = random.Random(2), []

        async def one(clients):
            call = clients.start(ids_request(prompt_of(randoms, 1, 60), 40, every=0))
            after = randoms.choice([0, 0, 1, 2, 5, 20, 39])
            try:
                if after == 0:
                    await asyncio.sleep(randoms.random() * 0.2)
                for _ in range(after):
                    if await call.read() is grpc.aio.EOF:
                        return
                call.cancel()
            except (grpc.aio.AioRpcError, asyncio.CancelledError):
                pass

        async def run():
            async with Clients(server.target, 10) as clients:
                await at_most(200, [one(clients) for _ in range(count)])

        with watching(server, 0.2, lambda figures: unaccounted.append(figures.sum("kv_blocks_unaccounted"))):
            asyncio.run(run())
        report.equal("left behind", server.leaks(), {})
        figures = server.scrape()
        step = figures.sum("engine_step_duration_seconds_sum") / figures.sum("engine_steps_total")
        cancels = figures.sum("generations_finished_total", reason="cancelled")
        report.at_least("calls cancelled while the engine had them", cancels, 0.2 * count)
        report.equal("greatest number of unaccounted blocks in any scrape", max(unaccounted), 0.0)
        report.at_most("cancel to release, p99", figures.quantile("cancel_to_release_seconds", 0.99) * 1e3,
                       bucket_above(2 * step + 0.005) * 1e3, " ms")
        report.at_most("tokens discarded a cancel",
                       figures.sum("output_tokens_discarded_total", reason="cancelled") / cancels, 2)


def bucket_above(seconds):
    """The bucket of cancel_to_release_seconds in which a value lies."""
    return min(bound for bound in (0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 30) if bound >= seconds)


@gate
def K3(program, short, report):
    """Clients that never read beside those that do."""
    seconds = 20 if short else 300
    # Answers that 400 streams at once end within the time that counts.
    load = ["--concurrency", 200, "--connections", 10, "--input-tokens", 8, "--output-tokens", 16 if short else 64]
    with Server(program, "--max-sequences", 400, "--token-budget", 512, "--kv-blocks", 12000) as server:
        # As many streams compete for the engine as later: readers all of them.
        busy = ["--concurrency", 400, *load[2:]]
        alone = server.load(*busy, "--duration", seconds / 2, "--warmup", 5)
        # Silent streams hold blocks that nobody has used before: the KV pool becomes resident then, and stays.
        after_baseline = server.rss_besides_pool_mb()
        silent, held, stop = [], [], threading.Event()

        def keep_them_coming():
            while not stop.is_set():
                silent.append(SilentReaders(server.target, 10, 20))
                if len(silent) > 2:
                    silent.pop(0).close()
                for _ in range(int(min(12, seconds / 4))):
                    held.append(kernel_send_mb(server.port))
                    if stop.wait(1):
                        break

        thread = threading.Thread(target=keep_them_coming)
        thread.start()
        beside = server.load(*load, "--duration", seconds, "--warmup", 5)
        stop.set()
        thread.join()
        for readers in silent:
            readers.close()
        report.equal("readers that failed", beside["sent"] - beside["ok"], 0)
        report.at_most("readers' p99 gap over that among readers alone",
                       beside["gap_seconds"]["p99"] / alone["gap_seconds"]["p99"], 1.1)
        report.at_most("memory gained besides the KV pool", server.rss_besides_pool_mb() - after_baseline, 50, " MB")
        report.at_most("kernel's send buffers", max(held), 4 * 20, " MB")
        report.equal("left behind", server.leaks(30), {})


@gate
def K4(program, short, report):
    """Three times more than fits."""
    seconds = 15 if short else 120
    with Server(program, "--max-waiting", 32, "--queue-timeout-seconds", 30, "--max-sequences", 32) as server:
        capacity = max(server.load("--concurrency", 32, "--duration", seconds / 2, "--warmup", 2, "--output-tokens",
                                   32)["rate"] for _ in range(2))
        refusals, stop = [], threading.Event()

        def probe():
            async def run():
                async with Clients(server.target, 1) as clients:
                    while not stop.is_set():
                        start = time.monotonic()
                        try:
                            await clients.whole(ids_request([5], 1))
                        except grpc.aio.AioRpcError as error:
                            if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED:
                                refusals.append(time.monotonic() - start)
                        await asyncio.sleep(0.01)
            asyncio.run(run())

        thread = threading.Thread(target=probe)
        thread.start()
        over = server.load("--rate", 3 * capacity, "--duration", seconds, "--output-tokens", 32, "--connections", 8)
        stop.set()
        thread.join()
        start = time.monotonic()
        asyncio.run(first_answer(server))
        report.at_least("goodput over capacity", over["ok"] / over["seconds"] / capacity, 0.9)
        report.at_least("refusals seen", len(refusals), 20)
        report.at_most("refusal, p99", sorted(refusals)[int(len(refusals) * 0.99)] * 1e3, 50, " ms")
        report.at_most("first answer after the overload", time.monotonic() - start, 5, " s")
        report.equal("left behind", server.leaks(), {})


async def first_answer(server):
    async with Clients(server.target, 1) as clients:
        await clients.whole(ids_request([5, 6], 1))


@gate
def K5(program, short, report):
    """A pool that holds a quarter of what runs."""
    seconds = 15 if short else 600
    randoms = random.Random(5)
    requests = [ids_request(prompt_of(randoms, 60, 120), 100, seed=number) for number in range(16)]
    # Sixteen of up to 14 blocks each would need 224.
    with Server(program, "--max-sequences", 16, "--kv-blocks", 57, "--context-length", 256) as server:
        async def run():
            async with Clients(server.target, 4) as clients:
                alone = [(await clients.whole(request))[0] for request in requests]
                end, worst, answers, wrong = time.monotonic() + seconds, 0, 0, 0

                async def worker(number):
                    nonlocal worst, answers, wrong
                    mine = random.Random(number)
                    while time.monotonic() < end:
                        which = mine.randrange(len(requests))
                        ids, finished = await clients.whole(requests[which])
                        worst = max(worst, finished.usage.preemptions)
                        answers += 1
                        wrong += ids != alone[which]

                await asyncio.gather(*(worker(number) for number in range(16)))
                return worst, answers, wrong

        worst, answers, wrong = asyncio.run(run())
        figures = server.scrape()
        computed = figures.sum("input_tokens_total", kind="computed") + figures.sum("output_tokens_total")
        report.at_least("preemptions", figures.sum("preemptions_total"), 10)
        report.equal(f"answers other than alone, of {answers}", wrong, 0)
        report.at_most("computed again, of all tokens",
                       figures.sum("input_tokens_total", kind="recomputed") / computed, 0.5)
        report.at_most("preemptions of one request", worst, 8)
        report.equal("left behind", server.leaks(), {})


@gate
def K6(program, short, report):
    """Mixed lengths at 80% of capacity."""
    seconds = 20 if short else 600
    randoms = random.Random(6)

    def length(low, high):
        return min(high, max(low, int(randoms.lognormvariate(3.7, 0.9))))

    with tempfile.NamedTemporaryFile("w", suffix=".csv") as trace, Server(program) as server:
        trace.write("TIMESTAMP,ContextTokens,GeneratedTokens\n")
        at = 0.0
        for _ in range(400):
            at += randoms.expovariate(10)
            trace.write(f"{at:.3f},{length(8, 400)},{min(length(1, 200), 100)}\n")
        trace.flush()
        load = ["--trace", trace.name]
        capacity = server.load(*load, "--concurrency", 48, "--duration", max(10, seconds / 10), "--warmup", 2)["rate"]
        before, oldest = server.scrape(), [0.0]

        def look(figures):
            since = figures.sum("oldest_waiting_timestamp_seconds")
            oldest.append(time.time() - since if since else 0.0)

        with watching(server, 0.5, look):
            run = server.load(*load, "--rate", 0.8 * capacity, "--duration", seconds, "--warmup", 2)
        after = server.scrape()
        # Of those that have a prefill: a first token comes from such a step.
        step = ((after.sum("engine_step_duration_seconds_sum", phase="prefill") -
                 before.sum("engine_step_duration_seconds_sum", phase="prefill")) /
                (after.sum("engine_steps_total", phase="prefill") - before.sum("engine_steps_total", phase="prefill")))
        report.equal("failed", run["sent"] - run["ok"], 0)
        report.at_most("p95 of the first token, in steps", run["first_token_seconds"]["p95"] / step, 5)
        report.at_most("oldest waiting", max(oldest), 2, " s")
        report.equal("left behind", server.leaks(), {})


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
    """Bursts of ten thousand calls: memory must level off."""
    with Server(program) as server:
        sizes = []
        for _ in range(8):
            h2load(server, 2000 if short else 10000, 10, 100)
            sizes.append(server.rss_mb())
        report.at_most("memory after round 8 over that after round 3", sizes[7] / sizes[2], 1.02)
        report.equal("left behind", server.leaks(), {})


@gate
def K9(program, short, report):
    """Twenty minutes at 60% of capacity."""
    tenth = 4 if short else 120
    load = ["--input-tokens", 24, "--output-tokens", 48]
    with Server(program) as server:
        capacity = server.load("--concurrency", 32, "--duration", tenth, "--warmup", 1, *load)["rate"]
        points, runs, start = [], [], time.monotonic()
        with watching(server, tenth / 12, lambda _: points.append((time.monotonic() - start, server.rss_mb()))):
            for _ in range(10):
                runs.append(server.load("--rate", 0.6 * capacity, "--duration", tenth, *load))
        late = [point for point in points if point[0] > points[-1][0] * 0.25]
        report.equal("failed", sum(run["sent"] - run["ok"] for run in runs), 0)
        report.at_most("growth of memory after a quarter of the time", slope(late) * 600, 1, " MB in 10 min")
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


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--contamination-test")
    options = parser.parse_args()
    K13.binary = options.contamination_test
    program = str(pathlib.Path(options.program).resolve())
    names = [name for name in GATES if not options.only or name in options.only.split(",")]
    failed = []
    for name in names:
        report, start = Report(name), time.monotonic()
        try:
            GATES[name](program, options.short, report)
        except Exception as error:  # a gate that cannot be measured is broken
            report.line("ended early", f"{type(error).__name__}: {error}", "no error", False)
        if not report.ok:
            failed.append(name)
        print(f"{name:4} {time.monotonic() - start:.0f} s", flush=True)
    print(f"{len(names) - len(failed)} of {len(names)} gates held" + (f"; broken: {', '.join(failed)}" if failed else ""))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
