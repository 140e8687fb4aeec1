// JSON reader (target F1): the input is the text.
//
// Property: no crash and no report; accepted text, written again, gives the same tree, which is no
// deeper than the limit.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string_view>

#include "engine/checkpoint/json.h"

namespace flashquant {
namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "property broken: %s\n", what);
  std::abort();
}

int DepthOf(const nlohmann::json& value) {
  int depth = 0;
  if (value.is_structured()) {
    for (const auto& child : value) depth = std::max(depth, DepthOf(child));
    ++depth;
  }
  return depth;
}

void RunOne(std::string_view text) {
  JsonLimits limits;
  limits.max_bytes = 1 << 20;
  limits.max_values = 100'000;
  const auto value = ParseJson(text, "input", limits);
  if (!value.ok()) return;
  Require(DepthOf(*value) <= limits.max_depth, "accepted text is too deep");
  const auto again = ParseJson(DumpJson(*value, -1), "output");
  Require(again.ok() && *again == *value, "written text gives another tree");
}

}  // namespace
}  // namespace flashquant

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashquant::RunOne({reinterpret_cast<const char*>(data), size});
  return 0;
}
