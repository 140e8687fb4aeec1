"""A client in another language: Python's grpcio and the proto alone. python_client_test.py PROGRAM STEERED_SERVER

Streams, cancels, meets every error that a client can be given, and reads its details. Row N24 of the reliability
matrix, with and without retries and round robin. Started by python_client_test.sh.
"""
import hashlib
import json
import os
import re
import sys
import tempfile
import threading
import time
import unittest

import grpc

import python_client

STUBS = python_client.make_stubs()
from flashquant.v1 import admin_service_pb2 as admin_pb  # noqa: E402
from flashquant.v1 import admin_service_pb2_grpc as admin_service  # noqa: E402
from flashquant.v1 import inference_pb2 as pb  # noqa: E402
from flashquant.v1 import inference_service_pb2_grpc as service  # noqa: E402
from google.rpc import error_details_pb2, status_pb2  # noqa: E402

PROGRAM, STEERED = sys.argv[1:3]
SERVER_MAXIMUM_SECONDS = 4  # of a call, in steered_server
DOMAIN = "flashquant.dev"
TOKEN = "fq_a_token_of_this_test"
# Reasons that no client can be given: kept for later, or a bug of the server; a cancelled call ends in the client; and
# text that is not UTF-8 is a MALFORMED_REQUEST already when it is parsed.
OUT_OF_REACH = {"QUOTA_EXCEEDED", "PERMISSION_DENIED", "INTERNAL_ERROR", "CANCELLED", "INVALID_UTF8"}
UNAVAILABLE_IS_RETRIED = {
    "methodConfig": [{
        "name": [{"service": "flashquant.v1.InferenceService"}],
        "retryPolicy": {"maxAttempts": 4, "initialBackoff": "0.2s", "maxBackoff": "5s", "backoffMultiplier": 2,
                        "retryableStatusCodes": ["UNAVAILABLE"]},
    }],
}


def text_request(text, max_output_tokens=4, seed=1, **more):
    return pb.GenerateRequest(text=text, sampling=pb.SamplingParams(seed=seed),
                              stop=pb.StopConditions(max_output_tokens=max_output_tokens),
                              output=pb.OutputOptions(token_ids=True), **more)


class Failure:
    """A failed call: its code, and its google.rpc details taken apart."""

    def __init__(self, error):
        self.code = error.code()
        self.message = error.details()
        self.reason, self.domain, self.metadata, self.fields, self.retry = "", "", {}, [], None
        self.had_headers = bool(error.initial_metadata())
        self.pushback = dict(error.trailing_metadata() or ()).get("grpc-retry-pushback-ms")
        packed = dict(error.trailing_metadata() or ()).get("grpc-status-details-bin")
        if packed is None:
            return
        status = status_pb2.Status.FromString(packed)
        assert status.code == self.code.value[0] and status.message == self.message
        for detail in status.details:
            info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                self.reason, self.domain, self.metadata = info.reason, info.domain, dict(info.metadata)
            elif detail.Unpack(bad):
                self.fields = [violation.field for violation in bad.field_violations]
            elif detail.Unpack(retry):
                self.retry = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9


def failure_of(call):
    """The failure of a call or of a stream that is read to its end."""
    try:
        for _ in call() if callable(call) else call:
            pass
    except grpc.RpcError as error:
        return Failure(error)
    raise AssertionError("the call went well")


class Client:
    def __init__(self, target, service_config=None):
        # A connection of its own: calls of one test do not wait for those of another.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", int(service_config is not None))]
        if service_config is not None:
            options.append(("grpc.service_config", json.dumps(service_config)))
        self.channel = grpc.insecure_channel(target, options=options)
        self.stub = service.InferenceServiceStub(self.channel)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.channel.close()

    def generate(self, request, **more):
        return self.stub.Generate(request, timeout=more.pop("timeout", 60), **more)

    def bytes_of(self, method, data):
        return self.channel.unary_stream(python_client.SERVICE + method)(data, timeout=60)


def answer_of(stream):
    """(accepted, text, ids, finished) of a good stream, whose order is checked."""
    messages = list(stream)
    events = [message.WhichOneof("event") for message in messages]
    assert events[0] == "accepted" and events[-1] == "finished", events
    assert set(events[1:-1]) <= {"delta"}, events
    deltas = [message.delta for message in messages[1:-1]]
    ids = [token for delta in deltas for token in delta.token_ids]
    return messages[0].accepted, "".join(delta.text for delta in deltas), ids, messages[-1].finished


class RealServerTest(unittest.TestCase):
    """The program with the demo model."""

    @classmethod
    def setUpClass(cls):
        cls.server = python_client.Served(PROGRAM)
        cls.server.wait_for(r"(serving model)")

    @classmethod
    def tearDownClass(cls):
        cls.server.close()

    def setUp(self):
        self.client = Client(self.server.target)
        self.addCleanup(self.client.channel.close)

    def test_streams_an_answer_that_repeats(self):
        request = text_request("Once upon a time", 20)
        accepted, text, ids, finished = answer_of(self.client.generate(request))
        self.assertEqual(accepted.seed, 1)
        self.assertEqual((len(ids), finished.usage.output_tokens), (20, 20))
        self.assertEqual(finished.reason, pb.FINISH_REASON_LENGTH)
        self.assertGreater(len(text), 20)
        self.assertEqual(answer_of(self.client.generate(request))[2], ids)

    def test_whole_answer_is_that_of_the_stream(self):
        request = text_request("The cat", 12)
        _, text, ids, _ = answer_of(self.client.generate(request))
        whole = self.client.stub.GenerateText(pb.GenerateTextRequest(request=request), timeout=60)
        self.assertEqual((whole.text, list(whole.token_ids)), (text, ids))

    def test_tokens_and_model(self):
        model = self.client.stub.GetModel(pb.GetModelRequest(), timeout=60)
        self.assertGreater(model.vocabulary_size, 0)
        ids = self.client.stub.Tokenize(pb.TokenizeRequest(text="Tom and Lily"), timeout=60).token_ids
        self.assertTrue(all(token < model.vocabulary_size for token in ids))
        text = self.client.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids), timeout=60).text
        self.assertEqual(text.strip(), "Tom and Lily")

    def test_cancel_in_the_middle_and_a_deadline(self):
        request = text_request("Once", 400)
        request.stop.ignore_eos = True
        stream = self.client.generate(request)
        self.assertTrue(next(stream).HasField("accepted"))
        next(stream)
        stream.cancel()
        self.assertEqual(failure_of(stream).code, grpc.StatusCode.CANCELLED)
        late = failure_of(lambda: self.client.generate(request, timeout=0.05))
        self.assertEqual(late.code, grpc.StatusCode.DEADLINE_EXCEEDED)
        answer_of(self.client.generate(text_request("Once", 2)))


class RestartTest(unittest.TestCase):
    def test_hundred_clients_come_back_at_once(self):  # N26
        first = python_client.Served(PROGRAM)
        first.wait_for(r"(serving model)")
        port = first.target.split(":")[1]
        clients = [Client(first.target, UNAVAILABLE_IS_RETRIED) for _ in range(100)]
        self.addCleanup(lambda: [client.channel.close() for client in clients])
        for client in clients:
            client.stub.GetModel(pb.GetModelRequest(), timeout=60)
        first.process.kill()
        first.process.wait()
        first.log.close()
        second = python_client.Served(PROGRAM, port=port)
        self.addCleanup(second.close)
        # All at once while the model is being loaded: served, or told when to come again.
        for stream in [client.generate(text_request("Once", 3), wait_for_ready=True) for client in clients]:
            try:
                answer_of(stream)
            except grpc.RpcError as error:
                failure = Failure(error)
                self.assertEqual(failure.reason, "MODEL_LOADING", failure.message)
                self.assertGreater(failure.retry, 0)
        second.wait_for(r"(serving model)")
        for stream in [client.generate(text_request("Once", 3), wait_for_ready=True) for client in clients]:
            self.assertGreater(len(answer_of(stream)[2]), 0)


class SteeredServerTest(unittest.TestCase):
    """Errors that need a server that waits, fails or draws NaN at the right moment."""

    def start(self, *arguments, serve=True):
        server = python_client.Steered(STEERED, *arguments)
        self.addCleanup(server.close)
        if serve:
            server.tell("serve")
        return server

    def client(self, server):
        client = Client(server.target)
        self.addCleanup(client.channel.close)
        return client

    # Each gives the Failure of its reason.

    def refused(self, request):
        return failure_of(lambda: self.main.generate(request))

    def sampling(self, **fields):
        return self.refused(pb.GenerateRequest(text="x", sampling=pb.SamplingParams(**fields)))

    def stop(self, **fields):
        return self.refused(pb.GenerateRequest(text="x", stop=pb.StopConditions(**fields)))

    def raw(self, data):
        return failure_of(lambda: self.main.bytes_of("Generate", data))

    def loading(self):
        server = self.start(serve=False)
        return failure_of(lambda: self.client(server).generate(text_request("x")))

    def draining(self):
        server = self.start()
        server.tell("drain")
        return failure_of(lambda: self.client(server).generate(text_request("x")))

    def engine_failed(self):
        server = self.start()
        server.tell("fail")
        return failure_of(lambda: self.client(server).generate(text_request("x", 10)))

    def held(self, server, count):
        """`count` streams of which the first ones run and stand still; cancelled at the end of the test."""
        server.tell("gate close")
        client = self.client(server)
        streams = [client.generate(text_request("x", 900, request_id=f"held-{i}")) for i in range(count)]
        server.tell("at-gate")
        for stream in streams:
            self.addCleanup(stream.cancel)
        self.addCleanup(server.tell, "gate open")
        return client, streams

    def queue_full(self):
        server = self.start()
        client, streams = self.held(server, 4)
        # Those that wait have said nothing yet: ask until the queue is seen full.
        while True:
            failure = failure_of(lambda: client.generate(text_request("x", 1), timeout=2))
            if failure.reason:
                return failure

    def queue_timeout(self):
        server = self.start()
        client, _ = self.held(server, 1)
        request = text_request("x", 1)
        request.queue_timeout.FromMilliseconds(100)
        waiting = client.generate(request)
        threading.Timer(0.3, server.tell, ("gate open",)).start()
        return failure_of(waiting)

    def duplicate(self):
        client, streams = self.held(self.start(), 1)
        return failure_of(lambda: client.generate(text_request("x", 1, request_id="held-0")))

    def server_deadline(self):
        server = self.start()
        self.held(server, 1)
        call = self.client(server).stub.Generate(text_request("y", 50))  # no deadline of its own
        threading.Timer(SERVER_MAXIMUM_SECONDS + 0.1, server.tell, ("gate open",)).start()
        return failure_of(call)

    def slow_reader(self):
        server = self.start()
        stream = self.client(server).generate(text_request("x", 1000))
        next(stream)
        self.assertTrue(eventually(lambda: float(server.tell("sum flashquant_stream_aborts_total")) == 1))
        return failure_of(stream)

    def too_large(self):
        return failure_of(lambda: [self.main.stub.GenerateText(
            pb.GenerateTextRequest(request=text_request("x", 1000)), timeout=60)])

    def credentials(self, token):
        metadata = (("authorization", f"Bearer {token}"),) if token else ()
        return failure_of(lambda: self.locked.generate(text_request("x"), metadata=metadata))

    def no_such_request(self):
        with grpc.insecure_channel(self.start().admin_target) as channel:
            stub = admin_service.AdminServiceStub(channel)
            return failure_of(lambda: [stub.CancelRequest(admin_pb.CancelRequestRequest(request_id="no"), timeout=60)])

    def test_every_reason_of_the_table(self):
        server = self.start()
        self.main = self.client(server)
        with tempfile.NamedTemporaryFile("w") as tokens:
            os.chmod(tokens.name, 0o600)
            tokens.write(f"alice {hashlib.sha256(TOKEN.encode()).hexdigest()}\n")
            tokens.flush()
            self.locked = self.client(self.start("--tokens", tokens.name))
        scenarios = {
            "MALFORMED_REQUEST": lambda: self.raw(pb.GenerateRequest(text="XYZ").SerializeToString().replace(b"Y", b"\xff")),
            "EMPTY_PROMPT": lambda: self.refused(pb.GenerateRequest()),
            "TOKEN_ID_OUT_OF_RANGE": lambda: self.refused(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 1000]))),
            "PROMPT_TOO_LONG": lambda: self.refused(text_request("x" * (2**20 + 1))),
            "CONTEXT_LENGTH_EXCEEDED": lambda: self.refused(text_request("x" * 2048)),
            "KV_CAPACITY_EXCEEDED": lambda: self.refused(text_request("x" * 1500)),
            "PARAMETER_OUT_OF_RANGE": lambda: self.sampling(temperature=3),
            "PARAMETER_NOT_FINITE": lambda: self.sampling(temperature=float("nan")),
            "TOO_MANY_STOP_SEQUENCES": lambda: self.stop(sequences=["s"] * 9),
            "STOP_SEQUENCE_INVALID": lambda: self.stop(sequences=["fine", ""]),
            "LOGIT_BIAS_INVALID": lambda: self.sampling(logit_bias=[pb.LogitBias(token_id=1000, bias=1)]),
            "REQUEST_ID_INVALID": lambda: self.refused(text_request("x", request_id="two words")),
            "CHAT_INVALID": lambda: self.refused(
                pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="wizard", content="hm")]))),
            "DUPLICATE_REQUEST_ID": self.duplicate,
            "MODEL_NOT_FOUND": lambda: self.refused(text_request("x", model="another")),
            "REQUEST_NOT_FOUND": self.no_such_request,
            "MODEL_LOADING": self.loading,
            "DRAINING": self.draining,
            "ENGINE_FAILED": self.engine_failed,
            "QUEUE_FULL": self.queue_full,
            "QUEUE_TIMEOUT": self.queue_timeout,
            "SLOW_READER": self.slow_reader,
            "ANSWER_TOO_LARGE": self.too_large,
            "DEADLINE_EXCEEDED": self.server_deadline,
            "FEATURE_DISABLED": lambda: self.raw(text_request("x").SerializeToString() + b"\x60\x01"),  # field 12
            "NON_FINITE_LOGITS": lambda: self.refused(text_request("x", 10, seed=666)),
            "CREDENTIALS_MISSING": lambda: self.credentials(""),
            "CREDENTIALS_INVALID": lambda: self.credentials("fq_another"),
        }
        table = read_table()
        self.assertEqual(set(table), set(scenarios) | OUT_OF_REACH)
        for reason, scenario in scenarios.items():
            with self.subTest(reason):
                failure = scenario()
                code, retry = table[reason]
                self.assertEqual((failure.reason, failure.code.name, failure.domain), (reason, code, DOMAIN),
                                 failure.message)
                # "later": a time to wait in both places; for the others none.
                self.assertEqual(failure.retry is not None, retry in ("later", "elsewhere"))
                if failure.retry:
                    self.assertEqual(int(failure.pushback), int(failure.retry * 1000))
                # The whole of an invalid request is told by field.
                if code == "INVALID_ARGUMENT" and reason != "MALFORMED_REQUEST":
                    self.assertTrue(failure.fields and failure.metadata["field"], failure.message)
        answer_of(self.locked.generate(text_request("x"), metadata=(("authorization", f"Bearer {TOKEN}"),)))
        answer_of(self.main.generate(text_request("x")))
        self.assertEqual(server.tell("leaks"), "ok")

    def test_all_violations_are_told_at_once(self):
        self.main = self.client(self.start())
        failure = self.refused(pb.GenerateRequest(
            sampling=pb.SamplingParams(temperature=-1, top_p=0, min_p=2), stop=pb.StopConditions(max_output_tokens=0)))
        self.assertEqual(set(failure.fields), {"prompt", "sampling.temperature", "sampling.top_p", "sampling.min_p",
                                               "stop.max_output_tokens"})

    def test_no_headers_come_before_a_refusal(self):
        failure = self.loading()
        self.assertFalse(failure.had_headers)

    def test_retries_reach_a_server_that_was_loading(self):  # N24
        server = self.start(serve=False)
        with Client(server.target, UNAVAILABLE_IS_RETRIED) as client:
            stream = client.generate(text_request("x", 3))
            threading.Timer(0.3, server.tell, ("serve",)).start()
            self.assertEqual(len(answer_of(stream)[2]), 3)

    def test_round_robin_leaves_a_server_that_drains(self):  # N24
        servers = [self.start(), self.start()]
        config = dict(UNAVAILABLE_IS_RETRIED, loadBalancingConfig=[{"round_robin": {}}])
        addresses = "ipv4:" + ",".join(server.target for server in servers)
        with Client(addresses, config) as client:
            while not all(float(server.tell("sum flashquant_requests_received_total")) for server in servers):
                answer_of(client.generate(text_request("x", 2)))  # both connections come up in their own time
            servers[0].tell("drain")
            for _ in range(6):
                answer_of(client.generate(text_request("x", 2)))

    def test_call_that_is_open_at_the_end_of_the_drain_is_told_so(self):
        server = self.start()
        client, (stream,) = self.held(server, 1)
        server.tell("shutdown")
        self.assertTrue(eventually(lambda: failure_of(lambda: client.generate(text_request("y"), timeout=1)).reason == "DRAINING"))
        server.tell("gate open")
        failure = failure_of(stream)
        self.assertEqual((failure.code, failure.reason), (grpc.StatusCode.UNAVAILABLE, "DRAINING"))


def eventually(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
    return True


def read_table():
    """reason -> (code, retry) of errors.md."""
    text = (python_client.ROOT / "proto/flashquant/v1/errors.md").read_text()
    rows = re.findall(r"^\| ([A-Z_0-9]+) \| ([A-Z_]+) \|.*\| *([^|]*?) *\|$", text, re.M)
    return {reason: (code, retry) for reason, code, retry in rows}


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
