// flashquant quantize, inspect and compare through their command lines: exit codes, what they
// print and what they leave behind.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "engine/model/loaded_model.h"
#include "engine/model/text_scorer.h"
#include "fmt/format.h"
#include "gtest/gtest.h"
#include "tests/engine/quantize/run_command.h"
#include "tests/engine/quantize/small_checkpoint.h"
#include "tests/engine/quantize/tiny_llama.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

using testing::HasSubstr;

TEST(QuantizeCommandTest, PrintsATableAndWritesTheReport) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  const CommandResult result =
      RunCommand({"quantize", "--input", dir / "in", "--output", dir / "out", "--json",
                  dir / "report.json", "--threads", "2"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("model.layers.0.mlp.up_proj"));
  EXPECT_THAT(result.out, HasSubstr("24 x 256"));
  EXPECT_THAT(result.out, HasSubstr("total"));
  EXPECT_THAT(result.err, HasSubstr("quantized 100% of the weights"));
  EXPECT_EQ(result.err.find('\r'), std::string::npos) << "no bar when stderr is no terminal";
  const nlohmann::json report = nlohmann::json::parse(FileBytes(dir / "report.json"));
  EXPECT_EQ(report["layers"][0]["n"], 16);
  EXPECT_EQ(report, nlohmann::json::parse(FileBytes(dir / "out/quantize_report.json")));
}

TEST(QuantizeCommandTest, QuietLeavesTheTableOutUnlessAReportIsAskedFor) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  const CommandResult quiet =
      RunCommand({"quantize", "--input", dir / "in", "--output", dir / "one", "--quiet"});
  EXPECT_EQ(quiet.exit_code, 0) << quiet.err;
  EXPECT_EQ(quiet.out.find("24 x 256"), std::string::npos);
  EXPECT_EQ(quiet.err, "");
  const CommandResult report = RunCommand(
      {"quantize", "--input", dir / "in", "--output", dir / "two", "--quiet", "--report"});
  EXPECT_THAT(report.out, HasSubstr("24 x 256"));
  EXPECT_EQ(report.err, "");
}

TEST(QuantizeCommandTest, ExitCodesTellWhatWasWrong) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  const std::string in = dir / "in";
  EXPECT_EQ(RunCommand({"quantize", "--input", dir / "nothing", "--output", dir / "out"}).exit_code,
            66);
  EXPECT_EQ(RunCommand({"quantize", "--input", in, "--output", in}).exit_code, 64) << "not empty";
  EXPECT_EQ(RunCommand({"quantize", "--input", in, "--output", dir / "no/such/place"}).exit_code,
            66);
  EXPECT_EQ(
      RunCommand({"quantize", "--input", in, "--output", dir / "o", "--density", "0.5"}).exit_code,
      64);
  EXPECT_EQ(
      RunCommand({"quantize", "--input", in, "--output", dir / "o", "--density", "nan"}).exit_code,
      64);
  EXPECT_EQ(RunCommand({"quantize", "--input", in, "--output", dir / "o", "--group-size", "48"})
                .exit_code,
            64);
  EXPECT_EQ(RunCommand({"quantize", "--input", in, "--output", dir / "o", "--embedding", "int4"})
                .exit_code,
            64);
  EXPECT_FALSE(std::filesystem::exists(dir / "o"));
  std::ofstream(dir / "file") << "in the way";
  EXPECT_EQ(RunCommand({"quantize", "--input", in, "--output", dir / "file"}).exit_code, 64);
  EXPECT_EQ(FileBytes(dir / "file"), "in the way");
}

TEST(QuantizeCommandTest, CalibratedMethodsMakeAModelThatCompares) {
  const WorkDir dir;
  CopyTinyLlama(dir / "in");
  std::ofstream(dir / "text") << TinyText(3000);
  for (const std::string method : {"gptq", "spqr"}) {
    const CommandResult result = RunCommand(
        {"quantize", "--input", dir / "in", "--output", dir / method, "--method", method,
         "--calibration", dir / "text", "--calibration-skip", "1000", "--calibration-tokens", "600",
         "--calibration-context", "128", "--threads", "1"});
    EXPECT_EQ(result.exit_code, 0) << result.err;
    EXPECT_THAT(result.out, HasSubstr("out error"));
    const nlohmann::json report =
        nlohmann::json::parse(FileBytes(dir / (method + "/quantize_report.json")));
    EXPECT_EQ(report["calibration"], "512 tokens from number 1000 on, windows of 128");
    EXPECT_EQ(report["method"], method == "gptq" ? "gptq" : "gptq+outliers");
    EXPECT_EQ(report["total"]["stored_density"] > 0, method == "spqr");
    EXPECT_LT(report["total"]["relative_output_error"], 0.2);
  }
  EXPECT_EQ(RunCommand({"inspect", dir / "spqr", "--verify"}).exit_code, 0);
  const CommandResult result =
      RunCommand({"compare", dir / "in", dir / "in", dir / "spqr", "--text", dir / "text",
                  "--context", "64", "--max-windows", "3"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("3 windows of 64 tokens"));
  EXPECT_THAT(result.out,
              HasSubstr("  +0.000%      +0.000% .. +0.000%   0.000000  100.000%  " + (dir / "in")));
  EXPECT_THAT(result.out, HasSubstr("%  " + (dir / "spqr")));
}

TEST(QuantizeCommandTest, FlagsOfCalibrationThatContradictEachOtherAreUsageErrors) {
  const WorkDir dir;
  CopyTinyLlama(dir / "in");
  std::ofstream(dir / "text") << TinyText(300);
  const auto run = [&](const std::vector<std::string>& flags) {
    std::vector<std::string> arguments = {"quantize", "--input", dir / "in", "--output",
                                          dir / "out"};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    return RunCommand(arguments);
  };
  const std::string text = dir / "text";
  EXPECT_EQ(run({"--method", "awq"}).exit_code, 64);
  EXPECT_THAT(run({"--method", "gptq"}).err, HasSubstr("needs --calibration"));
  EXPECT_EQ(run({"--method", "spqr"}).exit_code, 64);
  const auto calibrated = [&](std::vector<std::string> flags) {
    flags.insert(flags.end(), {"--calibration", text, "--calibration-context", "64"});
    return run(flags).exit_code;
  };
  EXPECT_EQ(calibrated({"--method", "gptq", "--density", "0.01"}), 64);
  EXPECT_EQ(calibrated({"--method", "gptq", "--threshold", "0.1"}), 64);
  EXPECT_EQ(calibrated({"--method", "spqr", "--density", "0"}), 64);
  EXPECT_EQ(calibrated({"--method", "spqr", "--density", "0.01", "--threshold", "0.1"}), 64);
  EXPECT_EQ(calibrated({"--method", "spqr", "--threshold", "-1"}), 64);
  EXPECT_EQ(calibrated({"--method", "spqr", "--target-size", "1MiB", "--density", "0.01"}), 64);
  EXPECT_EQ(calibrated({"--method", "spqr", "--target-size", "1MiB", "--threshold", "0.1"}), 64);
  EXPECT_EQ(calibrated({"--method", "gptq", "--target-size", "1MiB"}), 64);
  EXPECT_EQ(calibrated({"--method", "spqr", "--target-size", "much"}), 64);
  EXPECT_EQ(calibrated({"--method", "spqr", "--target-size", "1KB"}), 64);
  EXPECT_EQ(calibrated({"--method", "spqr", "--target-size", "1000"}), 64);
  EXPECT_EQ(calibrated({"--method", "spqr", "--damping", "0"}), 64);
  EXPECT_EQ(calibrated({"--method", "spqr", "--calibration-skip", "290"}), 64);
  for (const std::string flag : {"tokens", "skip", "context"}) {
    EXPECT_THAT(run({"--calibration-" + flag, "5"}).err, HasSubstr("requires --calibration"));
    const CommandResult negative = run({"--calibration", text, "--calibration-" + flag, "-1"});
    EXPECT_EQ(negative.exit_code, 64);
    EXPECT_THAT(negative.err, HasSubstr("Value -1 not in range"));
    EXPECT_LT(negative.err.size(), 100) << negative.err;
  }
  EXPECT_EQ(run({"--method", "gptq", "--calibration", dir / "missing"}).exit_code, 66);
  std::filesystem::remove(dir / "in/tokenizer.json");
  EXPECT_EQ(calibrated({"--method", "gptq"}), 66) << "no tokenizer";
  EXPECT_FALSE(std::filesystem::exists(dir / "out"));
}

TEST(QuantizeCommandTest, MissingTensorOfALaterLayerIsNamedAsInTheFile) {
  const WorkDir dir;
  CopyTinyLlama(dir / "in");
  std::ofstream(dir / "text") << TinyText(300);
  const std::string path = dir / "in/model.safetensors";
  std::string bytes = FileBytes(path);
  const size_t at = bytes.find("model.layers.1.mlp.up_proj");
  ASSERT_NE(at, std::string::npos);
  bytes.replace(at + 19, 2, "no");
  std::filesystem::remove(path);
  std::ofstream(path, std::ios::binary) << bytes;
  const CommandResult result = RunCommand(
      {"quantize", "--input", dir / "in", "--output", dir / "out", "--method", "gptq",
       "--group-size", "32", "--calibration", dir / "text", "--calibration-context", "64"});
  EXPECT_EQ(result.exit_code, 65);
  EXPECT_THAT(result.err, HasSubstr("model.layers.1.mlp.up_proj.weight: missing"));
  EXPECT_FALSE(std::filesystem::exists(dir / "out"));
}

TEST(CompareCommandTest, DivergenceAndAgreementAreThoseOfTheLogits) {
  const WorkDir dir;
  CopyTinyLlama(dir / "a");
  const std::string text = TinyText(200);
  std::ofstream(dir / "text") << text;
  ASSERT_EQ(RunCommand({"quantize", "--input", dir / "a", "--output", dir / "b", "--density", "0"})
                .exit_code,
            0);
  constexpr int32_t kContext = 50;
  std::vector<std::vector<double>> probabilities[2];
  for (const int which : {0, 1}) {
    const auto loaded =
        LoadModel(dir / (which == 0 ? "a" : "b"), kContext, {.kind = "cpu"}, nullptr);
    FQ_ASSERT_OK(loaded);
    const auto scorer = TextScorer::Create(loaded->model.get(), loaded->backend.get(), kContext);
    FQ_ASSERT_OK(scorer);
    const std::vector<int32_t> tokens = loaded->tokenizer->Encode(text, SpecialText::kPlain);
    for (size_t first = 0; first + kContext <= tokens.size(); first += kContext) {
      FQ_ASSERT_OK((*scorer)->VisitLogits(
          std::span(tokens).subspan(first, kContext), [&](int32_t position, auto logits) {
            if (position + 1 == kContext) return;
            std::vector<double> row;
            double sum = 0;
            for (const float logit : logits) sum += std::exp(static_cast<double>(logit));
            for (const float logit : logits)
              row.push_back(std::exp(static_cast<double>(logit)) / sum);
            probabilities[which].push_back(std::move(row));
          }));
    }
  }
  double divergence = 0;
  int agreements = 0;
  const size_t rows = probabilities[0].size();
  for (size_t row = 0; row < rows; ++row) {
    const std::vector<double>& p = probabilities[0][row];
    const std::vector<double>& q = probabilities[1][row];
    for (size_t i = 0; i < p.size(); ++i) divergence += p[i] * std::log(p[i] / q[i]);
    agreements += std::max_element(p.begin(), p.end()) - p.begin() ==
                  std::max_element(q.begin(), q.end()) - q.begin();
  }
  const CommandResult result =
      RunCommand({"compare", dir / "a", dir / "b", "--text", dir / "text", "--context", "50"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  std::istringstream line(result.out.substr(result.out.find('\n', result.out.find(dir / "a"))));
  std::string perplexity, over, low, dots, high, top_1;
  double found = 0;
  line >> perplexity >> over >> low >> dots >> high >> found >> top_1;
  EXPECT_NEAR(found, divergence / static_cast<double>(rows), 2e-6);
  EXPECT_EQ(top_1, fmt::format("{:.3f}%", 100.0 * agreements / static_cast<double>(rows)));
  EXPECT_LE(std::stod(low), std::stod(over));
  EXPECT_LE(std::stod(over), std::stod(high));
}

TEST(CompareCommandTest, ModelsThatCannotBeComparedAreRefused) {
  const WorkDir dir;
  CopyTinyLlama(dir / "a");
  CopyTinyLlama(dir / "b");
  std::ofstream(dir / "text") << TinyText(100);
  std::ofstream(dir / "b/tokenizer.json") << TinyTokenizerJson({}, {"<s>"}).dump();
  std::ofstream(dir / "thes") << "the other thing that they thought then";
  EXPECT_EQ(RunCommand({"compare", dir / "a", dir / "b", "--text", dir / "thes", "--context", "8"})
                .exit_code,
            64);
  const CommandResult too_long =
      RunCommand({"compare", dir / "a", dir / "a", "--text", dir / "text"});
  EXPECT_EQ(too_long.exit_code, 78);
  EXPECT_THAT(too_long.err, HasSubstr((dir / "a") + ": context_length"));
  EXPECT_EQ(
      RunCommand({"compare", dir / "a", dir / "a", "--text", dir / "text", "--context", "128"})
          .exit_code,
      64);
  EXPECT_EQ(
      RunCommand({"compare", dir / "a", dir / "none", "--text", dir / "text", "--context", "16"})
          .exit_code,
      66);
  std::filesystem::remove(dir / "b/tokenizer.json");
  EXPECT_EQ(RunCommand({"compare", dir / "a", dir / "b", "--text", dir / "text", "--context", "16"})
                .exit_code,
            65);
}

TEST(InspectCommandTest, ShowsShapesDensityAndTotals) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  ASSERT_EQ(RunCommand({"quantize", "--input", dir / "in", "--output", dir / "out", "--density",
                        "0.02", "--embedding", "int8"})
                .exit_code,
            0);
  const CommandResult result = RunCommand({"inspect", dir / "out", "--verify"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("group size 128, asymmetric, tiles 256 x 128, 32 buckets"));
  EXPECT_THAT(result.out, HasSubstr("24 x 256"));
  EXPECT_THAT(result.out, HasSubstr("model.embed_tokens.weight_scale"));
  EXPECT_THAT(result.out, HasSubstr("2 layers checked, no problem"));
  // 30 and 10 records in 6144 and 2048 weights.
  EXPECT_THAT(result.out, HasSubstr("1.953%"));
}

TEST(InspectCommandTest, AnUnquantizedFolderIsShownToo) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  const CommandResult result = RunCommand({"inspect", dir / "in"});
  EXPECT_EQ(result.exit_code, 0) << result.err;
  EXPECT_THAT(result.out, HasSubstr("quantization  none"));
}

TEST(InspectCommandTest, VerifyFindsAFlippedByteAnywhereInTheData) {
  const WorkDir dir;
  WriteSmallModel({}, dir / "in");
  ASSERT_EQ(RunCommand({"quantize", "--input", dir / "in", "--output", dir / "out"}).exit_code, 0);
  const std::string path = dir / "out/model.safetensors";
  const std::string intact = FileBytes(path);
  for (size_t from_end = 1; from_end < 12000; from_end += 997) {
    std::string damaged = intact;
    damaged[damaged.size() - from_end] ^= 4;
    std::filesystem::remove(path);
    std::ofstream(path, std::ios::binary) << damaged;
    const CommandResult result = RunCommand({"inspect", dir / "out", "--verify"});
    EXPECT_EQ(result.exit_code, 65) << from_end;
    EXPECT_THAT(result.err, HasSubstr("checksum"));
  }
}

TEST(InspectCommandTest, TileCooFileIsShownAndABrokenOneRefused) {
  std::string good;
  std::string bad;
  for (const auto& entry : std::filesystem::recursive_directory_iterator("tests/data")) {
    const std::string path = entry.path().string();
    if (!path.ends_with(".tcoo")) continue;
    const int code = RunCommand({"inspect", path}).exit_code;
    EXPECT_TRUE(code == 0 || code == 65) << path;
    (code == 0 ? good : bad) = path;
  }
  if (good.empty()) GTEST_SKIP() << "needs .tcoo files below tests/data";
  EXPECT_THAT(RunCommand({"inspect", good}).out, HasSubstr("checksums and every rule hold"));
  EXPECT_FALSE(bad.empty());
}

TEST(InspectCommandTest, PlanSaysWhetherAModelFitsACardAndWhatToDoElse) {
  const auto plan = [](std::vector<std::string> flags) {
    flags.insert(flags.begin(), {"inspect", "deploy/demo-model", "--plan"});
    return RunCommand(flags);
  };
  EXPECT_THAT(plan({}).out, HasSubstr("KV, 64 x 512 tokens"));
  EXPECT_THAT(plan({"--gpu-memory", "2GiB"}).out, HasSubstr(": fits, "));
  EXPECT_THAT(plan({"--gpu-memory", "1500MiB"}).out, HasSubstr("fits with a smaller KV pool"));
  EXPECT_THAT(plan({"--gpu-memory", "1GiB"}).out, HasSubstr("does not fit"));
  EXPECT_THAT(plan({"--gpu-memory", "1GiB", "--gpu-reserve", "256MiB"}).out, HasSubstr(": fits, "));
  EXPECT_THAT(plan({"--max-sequences", "1", "--max-length", "16"}).out,
              HasSubstr("KV, 1 x 16 tokens"));
  EXPECT_THAT(plan({"--kv-cache-dtype", "fp8"}).out, HasSubstr("KV, 64 x 512 tokens in FP8"));
  EXPECT_EQ(plan({"--kv-cache-dtype", "int8"}).exit_code, 64);
  EXPECT_EQ(plan({"--max-length", "100000"}).exit_code, 78);
  EXPECT_EQ(plan({"--gpu-memory", "12apples"}).exit_code, 64);
  EXPECT_EQ(RunCommand({"inspect", "deploy/demo-model", "--gpu-memory", "2GiB"}).exit_code, 64);
}

TEST(InspectCommandTest, PlanOfAConfigurationAloneComparesInt4WithBfloat16) {
  FQ_SKIP_WITHOUT_SHARED_DATA("data/configs");
  const std::string config = SharedDataPath("data/configs/qwen2.5-14b.config.json");
  const std::string out = RunCommand({"inspect", config, "--plan", "--gpu-memory", "24GiB",
                                      "--max-sequences", "8", "--max-length", "4096"})
                              .out;
  const size_t bfloat16 = out.find("BF16");
  ASSERT_NE(bfloat16, std::string::npos);
  EXPECT_THAT(out.substr(0, bfloat16), HasSubstr(": fits, "));
  EXPECT_THAT(out.substr(bfloat16), HasSubstr("does not fit"));
  // 48 layers x 2 x 8 heads of 128 in two bytes, 8 x 4096 tokens and a null block of 16.
  EXPECT_THAT(out, HasSubstr("KV, 8 x 4096 tokens                    6.003 GiB"));
  EXPECT_THAT(RunCommand({"inspect", config, "--plan", "--max-sequences", "8", "--max-length",
                          "4096", "--kv-cache-dtype", "fp8"})
                  .out,
              HasSubstr("KV, 8 x 4096 tokens in FP8             3.001 GiB"));
}

TEST(InspectCommandTest, MissingFolderAndMissingFileAreNoInput) {
  EXPECT_EQ(RunCommand({"inspect", "/nonexistent/folder"}).exit_code, 66);
  EXPECT_EQ(RunCommand({"inspect", "/nonexistent/file.tcoo"}).exit_code, 66);
}

}  // namespace
}  // namespace flashquant
