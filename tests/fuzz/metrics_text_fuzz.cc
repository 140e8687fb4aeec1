// Metrics page (target F15; O2). Input: the texts that become label values: model name, quantization,
// revision, version.
//
// Properties: whatever they are, the page is one that the strict reader of the tests takes, and the
// values come back as they were.
#include <cstdint>
#include <string>

#include "engine/metrics.h"
#include "prometheus/registry.h"
#include "prometheus/text_serializer.h"
#include "tests/e2e/exposition.h"
#include "tests/fuzz/fuzz_input.h"

namespace flashquant {
namespace {

void RunOne(FuzzInput input) {
  // Not empty: a label without a value is the same as no label.
  const std::string model = "m" + input.Text(64);
  const std::string quantization = "q" + input.Text(64);
  const std::string revision = "r" + input.Text(64);
  const std::string version = "v" + input.Text(64);
  prometheus::Registry registry;
  Metrics metrics(registry, model, 64);
  metrics.SetModelInfo(quantization, "128", "0.03", revision);
  metrics.SetBuildInfo(version, revision, "cpu", "none", version);
  metrics.RequestReceived(RpcMethod::kGenerate);
  const auto page = Exposition::Parse(prometheus::TextSerializer().Serialize(registry.Collect()));
  Require(page.ok(), std::string(page.status().message()));
  Require(page->Sum("flashquant_requests_received_total", {{"model", model}}) == 1, "model");
  Require(
      page->Sum("flashquant_model_info",
                {{"model", model}, {"quantization", quantization}, {"revision", revision}}) == 1,
      "model_info");
  Require(page->Sum("flashquant_build_info", {{"version", version}, {"grpc", version}}) == 1,
          "build_info");
}

}  // namespace
}  // namespace flashquant

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashquant::RunOne({data, size});
  return 0;
}
