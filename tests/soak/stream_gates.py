"""Gates K1 to K6: many streams, cancels, slow readers, overload, preemption, a mixed load."""
import asyncio
import random
import subprocess
import tempfile
import threading
import time

from soak_gate import first_answer, gate, prompt_of, watching
from soak_tools import Clients, Server, SilentReaders, at_most, grpc, ids_request, kernel_send_mb


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
            request = ids_request([5, 6, 7, number % 100], 64, seed=number)
            request.sampling.temperature = 0  # as in the engine's measurement
            await clients.whole(request)
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
    """Mixed lengths at 80% of capacity. A machine's speed drifts by more than the 20% that are left, so every minute
    has a capacity of its own, measured just before it."""
    minutes, seconds = (1, 20) if short else (10, 60)
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
        load, oldest, first_tokens, failed = ["--trace", trace.name], [0.0], [], 0

        def look(figures):
            since = figures.sum("oldest_waiting_timestamp_seconds")
            oldest.append(time.time() - since if since else 0.0)

        for _ in range(minutes):
            capacity = server.load(*load, "--concurrency", 48, "--duration", 10, "--warmup", 2)["rate"]
            before = server.scrape()
            with watching(server, 0.5, look):
                run = server.load(*load, "--rate", 0.8 * capacity, "--duration", seconds, "--warmup", 2)
            failed += run["sent"] - run["ok"]
            first_tokens.append(run["first_token_seconds"]["p95"] / prefill_step_seconds(before, server.scrape()))
        report.equal("failed", failed, 0)
        report.at_most("p95 of the first token in steps, mean of the minutes", sum(first_tokens) / minutes, 5)
        print("K6   minute by minute:", " ".join(f"{steps:.2f}" for steps in first_tokens), flush=True)
        report.at_most("oldest waiting", max(oldest), 2, " s")
        report.equal("left behind", server.leaks(), {})


def prefill_step_seconds(before, after):
    """The mean of the steps that have a prefill: a first token comes from such a step."""
    def gained(name):
        return after.sum(name, phase="prefill") - before.sum(name, phase="prefill")

    return gained("engine_step_duration_seconds_sum") / gained("engine_steps_total")
