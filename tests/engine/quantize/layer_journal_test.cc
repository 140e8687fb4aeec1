// Runs that end half way: what a killed one leaves is taken over, anything else is made again, and
// the output is the same bit for bit.
#include "engine/quantize/layer_journal.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>

#include "engine/quantize/checkpoint_quantizer.h"
#include "engine/quantize/cpu_quantizer_ops.h"
#include "engine/quantize/matrix_quantizer.h"
#include "engine/quantize/model_calibration.h"
#include "gtest/gtest.h"
#include "kernels/base/status_macros.h"
#include "tests/engine/quantize/small_checkpoint.h"
#include "tests/support/status_matchers.h"
#include "tests/support/test_data.h"

namespace flashquant {
namespace {

namespace fs = std::filesystem;

std::string Bytes(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::map<std::string, std::string> Contents(const fs::path& folder) {
  std::map<std::string, std::string> contents;
  for (const auto& entry : fs::directory_iterator(folder)) {
    contents[entry.path().filename().string()] = Bytes(entry.path());
  }
  return contents;
}

std::vector<int32_t> SomeTokens() {
  std::vector<int32_t> tokens;
  for (int i = 0; i < 256; ++i) tokens.push_back((i * 37 + i / 7) % 512);
  return tokens;
}

// GPTQ with outliers of a tiny model; killed after `layers_before_kill` layers when that is >= 0.
absl::StatusOr<QuantizeReport> QuantizeTiny(const std::string& output, int layers_before_kill,
                                            int num_threads = 1, double density = 0.02,
                                            QuantizerOps* ops = nullptr) {
  FQ_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                      OpenCheckpoint(TestDataPath("tiny_models/qwen3")));
  ModelCalibrationOptions calibration_options;
  calibration_options.context = 64;
  calibration_options.num_threads = num_threads;
  const std::vector<int32_t> tokens = SomeTokens();
  FQ_ASSIGN_OR_RETURN(const auto calibration,
                      ModelCalibration::Create(checkpoint, tokens, calibration_options));
  QuantizeOptions options;
  options.method = QuantizeMethod::kGptq;
  options.group_size = 64;
  options.density = density;
  options.num_threads = num_threads;
  options.ops = ops;
  int num_layers = 0;
  const QuantizeProgress progress = [&](int64_t, int64_t, const std::string& tensor) {
    if (tensor.find("layers.") == std::string::npos) return;
    if (++num_layers == layers_before_kill) ::kill(::getpid(), SIGKILL);
  };
  return QuantizeCheckpoint(checkpoint, output, options, progress, calibration.get());
}

// In a process of its own.
void RunAndKill(const std::string& output, int layers_before_kill) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    (void)QuantizeTiny(output, layers_before_kill);
    ::_exit(0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

TEST(LayerJournalTest, AKilledRunIsTakenUpAndGivesTheSameBytes) {
  const WorkDir dir;
  FQ_ASSERT_OK(QuantizeTiny(dir / "whole", -1));
  for (const int layers : {2, 11}) {
    const std::string output = dir / ("out" + std::to_string(layers));
    RunAndKill(output, layers);
    EXPECT_FALSE(fs::exists(output));
    EXPECT_TRUE(fs::exists(output + kJournalSuffix));
    const auto report = QuantizeTiny(output, -1);
    FQ_ASSERT_OK(report);
    EXPECT_EQ(report->resumed_layers, layers);
    EXPECT_EQ(Contents(output), Contents(dir / "whole")) << layers;
    EXPECT_FALSE(fs::exists(output + kJournalSuffix));
  }
}

TEST(LayerJournalTest, TheResultDoesNotDependOnTheNumberOfThreadsOrTheRun) {
  const WorkDir dir;
  FQ_ASSERT_OK(QuantizeTiny(dir / "one", -1, 1));
  FQ_ASSERT_OK(QuantizeTiny(dir / "again", -1, 1));
  FQ_ASSERT_OK(QuantizeTiny(dir / "three", -1, 3));
  EXPECT_EQ(Contents(dir / "one"), Contents(dir / "again"));
  EXPECT_EQ(Contents(dir / "one"), Contents(dir / "three"));
}

TEST(LayerJournalTest, OtherOptionsStartAfresh) {
  const WorkDir dir;
  RunAndKill(dir / "out", 5);
  const auto report = QuantizeTiny(dir / "out", -1, 1, 0.05);
  FQ_ASSERT_OK(report);
  EXPECT_EQ(report->resumed_layers, 0);
  FQ_ASSERT_OK(QuantizeTiny(dir / "whole", -1, 1, 0.05));
  EXPECT_EQ(Contents(dir / "out"), Contents(dir / "whole"));
}

// As the quantizer on a GPU would be, whose results differ in rounding.
class OtherDevice final : public CpuQuantizerOps {
 public:
  OtherDevice() : CpuQuantizerOps(1) {}
  std::string name() const override { return "other"; }
};

TEST(LayerJournalTest, LayersOfAnotherDeviceAreNotTakenOver) {
  const WorkDir dir;
  RunAndKill(dir / "out", 5);
  OtherDevice device;
  const auto report = QuantizeTiny(dir / "out", -1, 1, 0.02, &device);
  FQ_ASSERT_OK(report);
  EXPECT_EQ(report->resumed_layers, 0);
}

TEST(LayerJournalTest, DamagedFilesAreMadeAgain) {
  const WorkDir dir;
  RunAndKill(dir / "out", 6);
  std::vector<fs::path> layers;
  for (const auto& entry : fs::directory_iterator(dir / ("out" + std::string(kJournalSuffix)))) {
    if (entry.path().extension() == ".layer") layers.push_back(entry.path());
  }
  ASSERT_EQ(layers.size(), 6u);
  fs::resize_file(layers[0], fs::file_size(layers[0]) / 2);
  fs::resize_file(layers[1], 0);
  std::string text = Bytes(layers[2]);
  text[text.size() / 2] = static_cast<char>(text[text.size() / 2] ^ 1);
  std::ofstream(layers[2], std::ios::binary) << text;
  const auto report = QuantizeTiny(dir / "out", -1);
  FQ_ASSERT_OK(report);
  EXPECT_EQ(report->resumed_layers, 3);
  FQ_ASSERT_OK(QuantizeTiny(dir / "whole", -1));
  EXPECT_EQ(Contents(dir / "out"), Contents(dir / "whole"));
}

TEST(LayerJournalTest, AFolderThatAnotherRunHoldsIsLeftAlone) {
  const WorkDir dir;
  const std::vector<float> weights(64 * 8, 0.5f);
  LayerJournal first(dir / "journal", "a");
  ASSERT_TRUE(first.is_on());
  LayerJournal second(dir / "journal", "b");
  EXPECT_FALSE(second.is_on());
  second.Remove();
  EXPECT_TRUE(fs::exists(dir / "journal"));
  EXPECT_FALSE(LayerJournal(dir / "no/such", "a").is_on());
}

TEST(LayerJournalTest, BytesOfAnyLengthAreReadOrRefusedWithoutHarm) {
  const std::vector<float> weights(64 * 8, 0.5f);
  QuantizedMatrix matrix = QuantizeMatrix(weights, 8, 64, {.group_size = 64, .density = 0});
  matrix.outliers = {{3, 2, 0x3f80, false}};
  std::vector<uint8_t> bytes = SerializeMatrix(matrix);
  const auto read = ParseMatrix(bytes);
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(Dequantize(*read), Dequantize(matrix));
  for (size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(ParseMatrix(std::span(bytes).first(length)).has_value()) << length;
  }
  for (size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] ^= 0x80;
    (void)ParseMatrix(bytes);  // must not read outside
    bytes[i] ^= 0x80;
  }
}

}  // namespace
}  // namespace flashquant
