// Plain sockets: a gRPC client would keep threads and channels for a few bytes.
#include "server/listener_probe.h"

#include <netdb.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <memory>

namespace flashquant {
namespace {

// The client's preface and an empty SETTINGS frame.
std::string Http2Opening() {
  return std::string("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n") + std::string("\0\0\0\4\0\0\0\0\0", 9);
}

// A ClientHello. Nothing of the answer is read, so nothing needs to be trusted.
std::string TlsOpening() {
  const std::unique_ptr<SSL_CTX, decltype(&SSL_CTX_free)> context(SSL_CTX_new(TLS_client_method()),
                                                                  SSL_CTX_free);
  if (context == nullptr) return "";
  const std::unique_ptr<SSL, decltype(&SSL_free)> tls(SSL_new(context.get()), SSL_free);
  BIO* in = BIO_new(BIO_s_mem());
  BIO* out = BIO_new(BIO_s_mem());
  SSL_set_bio(tls.get(), in, out);
  constexpr unsigned char kHttp2[] = {2, 'h', '2'};
  SSL_set_alpn_protos(tls.get(), kHttp2, sizeof(kHttp2));
  SSL_connect(tls.get());  // wants an answer, which is not there yet
  ERR_clear_error();
  char* bytes = nullptr;
  const long size = BIO_get_mem_data(out, &bytes);
  return std::string(bytes, static_cast<size_t>(std::max(size, 0L)));
}

// Whether `event` happens on `socket` before `deadline`.
bool WaitFor(int socket, short event, TimePoint deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      deadline - std::chrono::steady_clock::now());
  pollfd waited = {socket, event, 0};
  const int ready = poll(&waited, 1, static_cast<int>(std::max<int64_t>(left.count(), 0)));
  return ready == 1 && (waited.revents & event) != 0;
}

bool Exchange(int socket, const addrinfo& target, const std::string& opening, TimePoint deadline) {
  if (connect(socket, target.ai_addr, target.ai_addrlen) != 0 && errno != EINPROGRESS) return false;
  if (!WaitFor(socket, POLLOUT, deadline)) return false;
  // It fits the socket's buffer: it was never used.
  if (send(socket, opening.data(), opening.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(opening.size())) {
    return false;
  }
  char byte = 0;
  return WaitFor(socket, POLLIN, deadline) && recv(socket, &byte, 1, 0) == 1;
}

}  // namespace

bool ListenerAnswers(const std::string& host, int port, bool tls, Duration limit) {
  const TimePoint deadline = std::chrono::steady_clock::now() + limit;
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;  // no look-up: it could wait
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* target = nullptr;
  std::string address = host;
  if (host == "0.0.0.0" || host == "localhost") address = "127.0.0.1";
  if (host == "::") address = "::1";
  const std::string service = std::to_string(port);
  if (getaddrinfo(address.c_str(), service.c_str(), &hints, &target) != 0 &&
      getaddrinfo("127.0.0.1", service.c_str(), &hints, &target) != 0) {
    return false;
  }
  const int connection =
      socket(target->ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, target->ai_protocol);
  const bool answers = connection >= 0 &&
                       Exchange(connection, *target, tls ? TlsOpening() : Http2Opening(), deadline);
  if (connection >= 0) close(connection);
  freeaddrinfo(target);
  return answers;
}

}  // namespace flashquant
