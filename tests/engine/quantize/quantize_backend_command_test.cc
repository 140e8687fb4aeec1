// flashquant quantize --backend, and its trial with random weights and random text.
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/engine/quantize/run_command.h"
#include "tests/engine/quantize/small_checkpoint.h"
#include "tests/engine/quantize/tiny_llama.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

// A trial of the quantizer with no model and no text at hand.
TEST(QuantizeCommandTest, RandomWeightsAreQuantizedByTheMethodOnRandomText) {
  const WorkDir dir;
  CopyTinyLlama(dir / "in");
  std::filesystem::create_directories(dir / "config");
  std::filesystem::copy_file(dir / "in/config.json", dir / "config/config.json");
  const auto run = [&](const std::string& name) {
    return RunCommand({"quantize", "--input", dir / "config", "--output", dir / name,
                       "--random-weights", "5", "--method", "spqr", "--calibration-tokens", "256",
                       "--calibration-context", "64", "--backend", "cpu", "--threads", "1"});
  };
  const CommandResult result = run("out");
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr(" s on cpu: weights "));
  const nlohmann::json report = nlohmann::json::parse(FileBytes(dir / "out/quantize_report.json"));
  EXPECT_EQ(report["calibration"], "256 tokens from number 0 on, windows of 64");
  EXPECT_EQ(report["method"], "gptq+outliers");
  EXPECT_GT(report["total"]["stored_density"], 0);
  EXPECT_EQ(RunCommand({"inspect", dir / "out", "--verify"}).exit_code, 0);
  EXPECT_EQ(run("again").exit_code, 0);
  EXPECT_EQ(FileBytes(dir / "out/quantize_report.json"),
            FileBytes(dir / "again/quantize_report.json"));
}

TEST(QuantizeCommandTest, ABackendThatIsNotThereIsRefused) {
  const WorkDir dir;
  CopyTinyLlama(dir / "in");
  for (const std::string method : {"rtn", "gptq"}) {
    std::vector<std::string> arguments = {"quantize", "--input", dir / "in",  "--output", dir / "o",
                                          "--method", method,    "--backend", "tpu"};
    if (method == "gptq") {
      std::ofstream(dir / "text") << TinyText(3000);
      arguments.insert(arguments.end(),
                       {"--calibration", dir / "text", "--calibration-context", "64"});
    }
    const CommandResult result = RunCommand(arguments);
    EXPECT_EQ(result.exit_code, 64);
    EXPECT_THAT(result.err, HasSubstr("backend 'tpu'"));
    EXPECT_FALSE(std::filesystem::exists(dir / "o"));
  }
}

}  // namespace
}  // namespace flashquant
