// Process: the built program with its output in files; ServeProcess: a server of it on free ports.
#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

#include "flashquant/v1/inference.pb.h"
#include "server/inference_client.h"
#include "tests/e2e/test_server.h"

namespace flashquant {

class Process {
 public:
  // `input`: what it finds on stdin.
  explicit Process(std::vector<std::string> arguments, const std::string& input = "");
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  void Signal(int number);
  pid_t pid() const { return pid_; }
  // The exit code; 128 + number for a signal; -1 when it still runs after `limit`.
  int Wait(Duration limit = std::chrono::seconds(20));
  std::string out() const;
  std::string err() const;

 private:
  std::string in_;
  std::string out_;
  std::string err_;
  pid_t pid_ = -1;
  bool ended_ = false;
};

// The number behind "<before> " in `text`, 0 if it is not there.
int NumberAfter(const std::string& text, const std::string& before);

// Serves the tiny llama of the test data unless `more` names another --model; addresses are free
// ports unless given.
class ServeProcess : public Process {
 public:
  explicit ServeProcess(std::vector<std::string> more = {});
  std::string target() const { return "127.0.0.1:" + std::to_string(port_); }
  int port() const { return port_; }
  int metrics_port() const { return metrics_port_; }
  bool WaitUntilServing(const ClientSecurity& security = {});

 private:
  int port_ = 0;
  int metrics_port_ = 0;
};

// Ids 1, 2, 3, greedy, exactly so many tokens.
v1::GenerateRequest IdsRequest(uint32_t max_output_tokens);

}  // namespace flashquant
