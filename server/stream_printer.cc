#include "server/stream_printer.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <string>
#include <string_view>

#include "fmt/format.h"
#include "google/protobuf/util/json_util.h"

namespace flashquant {
namespace {

double ToSeconds(const google::protobuf::Duration& duration) {
  return static_cast<double>(duration.seconds()) + duration.nanos() * 1e-9;
}

// "stop_sequence" for FINISH_REASON_STOP_SEQUENCE.
std::string ShownReason(v1::FinishReason reason) {
  constexpr std::string_view kPrefix = "FINISH_REASON_";
  std::string name = v1::FinishReason_Name(reason).substr(kPrefix.size());
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  return name;
}

void PrintJson(const v1::GenerateResponse& response) {
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  std::string text;
  if (google::protobuf::util::MessageToJsonString(response, &text, options).ok()) {
    fmt::print("{}\n", text);
  }
}

void PrintDelta(const v1::Delta& delta) {
  if (!delta.text().empty()) {
    std::fwrite(delta.text().data(), 1, delta.text().size(), stdout);
    return;
  }
  for (const uint32_t id : delta.token_ids()) fmt::print("{} ", id);
}

}  // namespace

bool StreamPrinter::Print(const v1::GenerateResponse& response) {
  if (response.has_delta() && !first_delta_) first_delta_ = std::chrono::steady_clock::now();
  if (response.has_finished()) finished_ = response.finished();
  if (json_) {
    PrintJson(response);
  } else if (response.has_delta()) {
    PrintDelta(response.delta());
  }
  std::fflush(stdout);
  return std::ferror(stdout) == 0;
}

void StreamPrinter::PrintSummary() const {
  if (!finished_) return;
  if (!json_) fmt::print("\n");
  std::fflush(stdout);  // before the figures, which go to stderr
  const v1::Usage& usage = finished_->usage();
  const std::chrono::duration<double, std::milli> first =
      first_delta_.value_or(std::chrono::steady_clock::now()) - start_;
  std::string figures =
      fmt::format("{} tokens in, {} out ({}), first token {:.0f} ms", usage.prompt_tokens(),
                  usage.output_tokens(), ShownReason(finished_->reason()), first.count());
  const double decode = ToSeconds(finished_->timing().decode());
  if (usage.output_tokens() > 1 && decode > 0) {
    figures += fmt::format(", {:.1f} tokens/s", (usage.output_tokens() - 1) / decode);
  }
  fmt::print(stderr, "{}\n", figures);
}

}  // namespace flashquant
