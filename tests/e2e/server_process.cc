// posix_spawn with files for the standard streams.
#include "tests/e2e/server_process.h"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "gtest/gtest.h"
#include "tests/support/test_data.h"

extern char** environ;

namespace flashquant {
namespace {

std::string ReadAll(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

std::vector<std::string> ServeArguments(std::vector<std::string> more) {
  std::vector<std::string> arguments = {"serve"};
  const auto given = [&](const char* flag) {
    return std::find(more.begin(), more.end(), flag) != more.end();
  };
  if (!given("--model")) {
    arguments.insert(arguments.end(), {"--model", TestDataPath("tiny_models/llama")});
  }
  for (const char* flag : {"--listen", "--metrics-listen"}) {
    if (!given(flag)) arguments.insert(arguments.end(), {flag, "127.0.0.1:0"});
  }
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

}  // namespace

Process::Process(std::vector<std::string> arguments, const std::string& input) {
  static std::atomic<int> next{0};
  const std::string stem = ::testing::TempDir() + "/fq_process_" + std::to_string(getpid()) + "_" +
                           std::to_string(next++);
  in_ = stem + ".in";
  out_ = stem + ".out";
  err_ = stem + ".err";
  std::ofstream(in_) << input;
  arguments.insert(arguments.begin(), FQ_PROGRAM);
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, 0, in_.c_str(), O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, 1, out_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  posix_spawn_file_actions_addopen(&files, 2, err_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600);
  EXPECT_EQ(posix_spawn(&pid_, FQ_PROGRAM, &files, nullptr, argv.data(), environ), 0);
  posix_spawn_file_actions_destroy(&files);
}

Process::~Process() {
  if (!ended_) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  for (const std::string& file : {in_, out_, err_}) std::filesystem::remove(file);
}

void Process::Signal(int number) { kill(pid_, number); }

int Process::Wait(Duration limit) {
  int status = 0;
  if (!Eventually([&] { return waitpid(pid_, &status, WNOHANG) == pid_; }, limit)) return -1;
  ended_ = true;
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

std::string Process::out() const { return ReadAll(out_); }
std::string Process::err() const { return ReadAll(err_); }

int NumberAfter(const std::string& text, const std::string& before) {
  const size_t at = text.find(before);
  return at == std::string::npos ? 0 : std::atoi(text.c_str() + at + before.size());
}

ServeProcess::ServeProcess(std::vector<std::string> more)
    : Process(ServeArguments(std::move(more))) {
  Eventually([&] { return (port_ = NumberAfter(err(), "listening on port ")) != 0; },
             std::chrono::seconds(20));
  metrics_port_ = NumberAfter(err(), "metrics on port ");
  EXPECT_NE(port_, 0) << err();
}

bool ServeProcess::WaitUntilServing(const ClientSecurity& security) {
  return Eventually(
      [&] { return InferenceClient(target(), security).Health("") == HealthState::kServing; },
      std::chrono::seconds(20));
}

v1::GenerateRequest IdsRequest(uint32_t max_output_tokens) {
  v1::GenerateRequest request;
  for (const uint32_t id : {1u, 2u, 3u}) request.mutable_token_ids()->add_ids(id);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stop()->set_max_output_tokens(max_output_tokens);
  request.mutable_stop()->set_ignore_eos(true);
  request.mutable_output()->set_token_ids(true);
  return request;
}

}  // namespace flashquant
