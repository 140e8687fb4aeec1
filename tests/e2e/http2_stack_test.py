"""HTTP/2 stacks that share no code with gRPC: hyper-h2 frame by frame, with windows of 1 KiB, and nghttp2's h2load.

http2_stack_test.py PROGRAM STEERED_SERVER, started by python_client_test.sh. Rows N5, N6 and N24 of the reliability
matrix: a small window is the true slow reader, because nothing between the server and the client takes the answer in.
"""
import base64
import gzip
import re
import select
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import unittest

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

import python_client

STUBS = python_client.make_stubs()
from flashquant.v1 import inference_pb2 as pb  # noqa: E402
from google.rpc import error_details_pb2, status_pb2  # noqa: E402

STEERED = sys.argv[2]
WINDOW = 1024
# By the server; hyper-h2 takes what follows a GOAWAY for an error.
CLOSED = (OSError, h2.exceptions.ProtocolError)
QUOTA = 64 << 20  # steered_server's, for what gRPC holds


def framed(message):
    data = message.SerializeToString()
    return struct.pack(">BI", 0, len(data)) + data


class Call:
    """What one stream has brought so far."""

    def __init__(self):
        self.data, self.status, self.details, self.ended = b"", None, None, False

    def messages(self):
        found, at = [], 0
        while at + 5 <= len(self.data):
            size = struct.unpack(">I", self.data[at + 1:at + 5])[0]
            if at + 5 + size > len(self.data):
                break
            found.append(pb.GenerateResponse.FromString(self.data[at + 5:at + 5 + size]))
            at += 5 + size
        return found


class Connection:
    def __init__(self, target):
        host, port = target.split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=30)
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
        self.h2.local_settings = h2.settings.Settings(
            initial_values={h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: WINDOW})
        self.h2.initiate_connection()
        self.calls = {}
        self.flush()

    def flush(self):
        self.socket.sendall(self.h2.data_to_send())

    def receive(self):
        data = self.socket.recv(65536)
        if not data:
            raise ConnectionError("closed by the server")
        return data

    def send_headers(self, method="Generate", headers=()):
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, [(":method", "POST"), (":scheme", "http"), (":authority", "x"),
                                      (":path", python_client.SERVICE + method), ("te", "trailers"),
                                      ("content-type", "application/grpc"), ("user-agent", "h2"), *headers])
        return stream

    def start(self, request, method="Generate", body=None, headers=()):
        stream = self.send_headers(method, headers)
        body = body or framed(request)
        for at in range(0, len(body), 16384):
            self.h2.send_data(stream, body[at:at + 16384], end_stream=at + 16384 >= len(body))
        self.calls[stream] = Call()
        self.flush()
        return stream

    def pump(self, reads=lambda stream: True):
        """Takes one piece from the socket; gives back the windows of the streams that are read."""
        for event in self.h2.receive_data(self.receive()):
            call = self.calls.get(getattr(event, "stream_id", None))
            if isinstance(event, h2.events.DataReceived):
                call.data += event.data
                if reads(event.stream_id):
                    self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
                else:
                    self.h2.increment_flow_control_window(event.flow_controlled_length)
            elif isinstance(event, (h2.events.ResponseReceived, h2.events.TrailersReceived)):
                headers = dict(event.headers)
                call.status = headers.get("grpc-status", call.status)
                call.details = headers.get("grpc-status-details-bin", call.details)
            elif isinstance(event, (h2.events.StreamEnded, h2.events.StreamReset)):
                call.ended = True
        self.flush()

    def finish(self, stream, reads=lambda stream: True):
        while not self.calls[stream].ended:
            self.pump(reads)
        return self.calls[stream]


def request_of(tokens, **more):
    return pb.GenerateRequest(text="x", sampling=pb.SamplingParams(seed=1), output=pb.OutputOptions(token_ids=True),
                              stop=pb.StopConditions(max_output_tokens=tokens), **more)


class Http2Test(unittest.TestCase):
    def setUp(self):
        self.server = python_client.Steered(STEERED)
        self.addCleanup(self.server.close)
        self.server.tell("serve")
        self.connection = Connection(self.server.target)
        self.addCleanup(self.connection.socket.close)

    def assert_whole(self, call, tokens):
        messages = call.messages()
        self.assertEqual(call.status, "0")
        self.assertEqual(messages[0].WhichOneof("event"), "accepted")
        self.assertEqual(messages[-1].WhichOneof("event"), "finished")
        self.assertEqual(sum(len(message.delta.token_ids) for message in messages), tokens)

    def test_answer_through_a_window_of_a_kibibyte_is_whole(self):  # N6, N24
        stream = self.connection.start(request_of(60))  # half a megabyte of text: hundreds of windows
        self.assert_whole(self.connection.finish(stream), 60)
        self.assertEqual(self.server.tell("leaks"), "ok")

    def test_reader_whose_window_stays_closed_is_aborted_and_its_neighbour_is_not(self):  # N5
        stalled = self.connection.start(request_of(900))
        while len(self.connection.calls[stalled].data) < WINDOW:
            self.connection.pump(lambda stream: stream != stalled)
        neighbour = self.connection.start(request_of(60))
        self.assert_whole(self.connection.finish(neighbour, lambda stream: stream != stalled), 60)
        while float(self.server.tell("sum flashquant_stream_aborts_total")) == 0:
            pass
        self.assertEqual(len(self.connection.calls[stalled].data), WINDOW)
        # The abort is counted where the stream ends; the engine gives the blocks back with its next step.
        while float(self.server.tell("sum flashquant_kv_usage_ratio")) != 0:
            pass
        # Only a client that reads again learns of it: what was written before comes first.
        self.connection.h2.increment_flow_control_window(WINDOW, stalled)
        self.connection.flush()
        call = self.connection.finish(stalled)
        self.assertEqual(call.status, "8")
        status = status_pb2.Status.FromString(base64.b64decode(call.details + "=" * (-len(call.details) % 4)))
        info = error_details_pb2.ErrorInfo()
        self.assertTrue(status.details[0].Unpack(info))
        self.assertEqual(info.reason, "SLOW_READER")
        self.assertEqual(self.server.tell("leaks"), "ok")

    def test_message_that_expands_a_thousandfold_is_refused(self):  # N17
        packed = gzip.compress(b"\x1a" + bytes(8 << 20))
        self.assertLess(len(packed), 20000)
        stream = self.connection.start(None, body=struct.pack(">BI", 1, len(packed)) + packed,
                                       headers=[("grpc-encoding", "gzip")])
        self.assertEqual(self.connection.finish(stream).status, "8")
        self.assert_whole(self.connection.finish(self.connection.start(request_of(3))), 3)
        self.assertEqual(self.server.tell("leaks"), "ok")

    def upload(self, connection, streams, size, declared):
        """Begins calls whose messages never come whole: sends `size` bytes of each, as far as the server lets it. How
        many bytes went, and how many calls it ended."""
        left, sent = {}, 0
        try:
            for _ in range(streams):
                stream = connection.send_headers()
                connection.h2.send_data(stream, struct.pack(">BI", 0, declared))
                left[stream] = size
            connection.flush()
            while any(left.values()):
                pieces = {stream: min(connection.h2.local_flow_control_window(stream), 16384, rest)
                          for stream, rest in left.items()}
                stream, piece = max(pieces.items(), key=lambda item: item[1])
                if piece > 0:
                    connection.h2.send_data(stream, bytes(piece))
                    connection.flush()
                    sent += piece
                    left[stream] -= piece
                # Without credit there is only waiting for some, and a server in need may never give it.
                if select.select([connection.socket], [], [], 0 if piece > 0 else 2)[0]:
                    for event in connection.h2.receive_data(connection.receive()):
                        if isinstance(event, (h2.events.StreamReset, h2.events.StreamEnded)):
                            left.pop(event.stream_id, None)
                        elif isinstance(event, h2.events.ConnectionTerminated):
                            return sent, streams
                    connection.flush()
                elif piece == 0:
                    break
        except TimeoutError:
            pass  # the server does not read, which ends nothing
        except CLOSED:
            return sent, streams
        return sent, streams - len(left)

    def assert_others_are_served(self):
        """Ten in a row, once the library has reset what held the quota: until then it may reset others too."""
        served = 0
        for attempt in range(200):
            try:
                other = Connection(self.server.target)
                call = other.finish(other.start(request_of(3)))
                other.socket.close()
            except CLOSED:
                call = Call()
            served = served + 1 if call.status == "0" else 0
            if served == 10:
                self.assert_whole(call, 3)
                return
        self.fail(f"{served} in a row after {attempt + 1} calls")

    def test_message_without_an_end_is_cut_at_the_memory_quota(self):
        attacker = Connection(self.server.target)
        sent, ended = self.upload(attacker, 1, 1 << 30, declared=4000 << 20)
        self.assertEqual(ended, 1)
        self.assertLess(sent, 2 * QUOTA)
        self.assert_others_are_served()
        attacker.socket.close()
        self.assertEqual(self.server.tell("leaks"), "ok")

    def test_uploads_that_never_end_hold_up_nobody_else(self):
        attackers = [Connection(self.server.target) for _ in range(3)]
        sent, ended = zip(*(self.upload(attacker, 20, 3 << 20, declared=(3 << 20) + 100) for attacker in attackers))
        self.assertGreater(sum(sent), 1.5 * QUOTA)
        self.assertGreater(sum(ended), 0)
        self.assert_others_are_served()
        for attacker in attackers:
            attacker.socket.close()
        self.assertEqual(self.server.tell("leaks"), "ok")

    def test_stream_that_is_reset_leaves_nothing(self):  # N1
        stream = self.connection.start(request_of(900))
        while not self.connection.calls[stream].data:
            self.connection.pump()
        self.connection.h2.reset_stream(stream, error_code=8)
        self.connection.flush()
        self.assertEqual(self.server.tell("leaks"), "ok")

    def test_h2load_is_served_in_full(self):  # N24
        if shutil.which("h2load") is None:
            self.skipTest("needs nghttp2-client")
        with tempfile.NamedTemporaryFile() as body:
            body.write(framed(pb.TokenizeRequest(text="Tom and Lily")))
            body.flush()
            report = subprocess.run(
                ["h2load", "-n", "2000", "-c", "10", "-m", "20", "-H", "te: trailers", "-H",
                 "content-type: application/grpc", "-d", body.name,
                 f"http://{self.server.target}{python_client.SERVICE}Tokenize"],
                check=True, capture_output=True, text=True, timeout=120).stdout
        self.assertRegex(report, r"2000 succeeded, 0 failed, 0 errored, 0 timeout")
        self.assertEqual(re.search(r"status codes: (\d+) 2xx", report).group(1), "2000")
        self.assertEqual(self.server.tell("leaks"), "ok")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1], verbosity=2)
