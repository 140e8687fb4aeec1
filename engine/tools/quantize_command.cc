// flashquant quantize: makes an INT4 + outlier checkpoint from a Hugging Face folder, a GPTQ folder
// or a GGUF file.
//
// Flags, progress and the printed report; the work is engine/quantize.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "engine/checkpoint/file_reader.h"
#include "engine/checkpoint/gguf_reader.h"
#include "engine/checkpoint/gptq_reader.h"
#include "engine/checkpoint/json.h"
#include "engine/model/memory_plan.h"
#include "engine/model/model_config.h"
#include "engine/quantize/checkpoint_quantizer.h"
#include "engine/quantize/matrix_quantizer.h"
#include "engine/quantize/model_calibration.h"
#include "engine/quantize/parallel_for.h"
#include "engine/quantize/quantizer_device.h"
#include "engine/quantize/random_checkpoint.h"
#include "engine/quantize/random_layer.h"
#include "engine/tools/commands.h"
#include "engine/tools/imported_model.h"
#include "engine/tools/progress_printer.h"
#include "engine/tools/run_tool.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kMaxTextBytes = int64_t{1} << 30;
constexpr double kDefaultDensity = 0.01;
constexpr int64_t kMaxRandomTokens = int64_t{1} << 24;

struct QuantizeFlags {
  std::string input;
  std::string original;
  std::string output;
  std::string group_size = "auto";
  std::optional<double> density;
  double threshold = 0;
  std::string target_size;
  std::optional<uint64_t> random_weights;
  double damping = 0.01;
  int descent = 4;
  std::string calibration;
  int64_t calibration_tokens = 131072;
  int64_t calibration_skip = 0;
  int32_t calibration_context = 0;
  bool symmetric = false;
  std::string embedding = "bf16";
  std::string lm_head = "auto";
  std::string method = "auto";
  std::string backend = "auto";
  std::string outliers = "rescale";
  std::string json;
  int threads = 0;
  bool overwrite = false;
  bool report = false;
  bool quiet = false;
};

// Seconds of the main thread: what runs beside it shows only where it was waited for.
std::string StageText(const QuantizeSeconds& seconds) {
  return fmt::format(
      "weights {:.1f}, calibration {:.1f}, factors {:.1f}, layers {:.1f}, results to the model "
      "{:.1f}, writing {:.1f}",
      seconds.weights, seconds.calibration, seconds.factors, seconds.layers, seconds.results,
      seconds.writing);
}

// Flags that contradict each other.
absl::Status CheckFlags(const CLI::App& command, const QuantizeFlags& flags) {
  for (const char* name : {"--calibration-tokens", "--calibration-skip", "--calibration-context"}) {
    if (command.count(name) > 0 && flags.calibration.empty() && !flags.random_weights.has_value()) {
      return InvalidArgumentError("{} requires --calibration", name);
    }
  }
  if (flags.density.has_value() && flags.threshold > 0) {
    return InvalidArgumentError("--threshold: not together with --density");
  }
  if (!flags.target_size.empty() && (flags.density.has_value() || flags.threshold > 0)) {
    return InvalidArgumentError("--target-size: not together with --density or --threshold");
  }
  if (!flags.target_size.empty() && flags.method == "gptq") {
    return InvalidArgumentError("--method gptq: has no outliers, --method spqr has");
  }
  if (!flags.target_size.empty() && flags.outliers != "rescale") {
    return InvalidArgumentError("--target-size: only with --outliers rescale");
  }
  const bool is_calibrated = flags.method == "gptq" || flags.method == "spqr";
  if (flags.random_weights.has_value() && !is_calibrated &&
      (flags.threshold > 0 || flags.overwrite || !flags.json.empty())) {
    return InvalidArgumentError(
        "--random-weights: without --method gptq or spqr not with --threshold, --overwrite or "
        "--json");
  }
  if (flags.random_weights.has_value() && !flags.calibration.empty()) {
    return InvalidArgumentError("--random-weights: not with --calibration, its text is random too");
  }
  if (flags.method == "gptq" && (flags.density.value_or(0) > 0 || flags.threshold > 0)) {
    return InvalidArgumentError("--method gptq: has no outliers, --method spqr has");
  }
  if (flags.method == "spqr" && flags.density.value_or(1) == 0) {
    return InvalidArgumentError("--method spqr: needs outliers (--density above 0)");
  }
  if (is_calibrated && flags.calibration.empty() && !flags.random_weights.has_value()) {
    return InvalidArgumentError("--method {}: needs --calibration", flags.method);
  }
  if (!flags.original.empty() && flags.method != "auto") {
    return InvalidArgumentError("--original: only where codes are taken over, not with --method");
  }
  return absl::OkStatus();
}

// Null without --calibration.
absl::StatusOr<std::unique_ptr<ModelCalibration>> CalibrationFrom(const QuantizeFlags& flags,
                                                                  const Checkpoint& checkpoint) {
  ModelCalibrationOptions options;
  options.num_tokens = flags.calibration_tokens;
  options.first_token = flags.calibration_skip;
  options.context = flags.calibration_context;
  options.backend = flags.backend;
  options.num_threads = flags.threads == 0 ? AvailableThreads() : flags.threads;
  std::vector<int32_t> tokens;
  if (flags.random_weights.has_value()) {
    options.text_path = "random text";
    FQ_ASSIGN_OR_RETURN(const ModelConfig config, ParseModelConfig(checkpoint));
    const int64_t count = std::min(options.first_token, kMaxRandomTokens) +
                          std::clamp<int64_t>(options.num_tokens, 1, kMaxRandomTokens);
    for (int64_t i = 0; i < count; ++i) {
      tokens.push_back(
          static_cast<int32_t>(RandomWord(*flags.random_weights, static_cast<uint64_t>(i)) %
                               static_cast<uint64_t>(config.vocab_size)));
    }
  } else if (!flags.calibration.empty()) {
    options.text_path = flags.calibration;
    FQ_ASSIGN_OR_RETURN(const std::string text, ReadFile(flags.calibration, kMaxTextBytes));
    FQ_ASSIGN_OR_RETURN(const std::unique_ptr<Tokenizer> tokenizer, TokenizerOf(checkpoint.path));
    tokens = tokenizer->Encode(text, SpecialText::kPlain);
  } else {
    return std::unique_ptr<ModelCalibration>();
  }
  return ModelCalibration::Create(checkpoint, tokens, options);
}

QuantizeOptions OptionsFrom(const QuantizeFlags& flags) {
  const std::map<std::string, TableFormat> formats = {
      {"bf16", TableFormat::kBFloat16}, {"int8", TableFormat::kInt8}, {"int4", TableFormat::kInt4}};
  QuantizeOptions options;
  if (flags.group_size != "auto") options.group_size = std::stoll(flags.group_size);
  options.symmetric = flags.symmetric;
  options.method = flags.method == "gptq" || flags.method == "spqr" ? QuantizeMethod::kGptq
                                                                    : QuantizeMethod::kRtn;
  options.density = flags.density.value_or(flags.method == "gptq" ? 0.0 : kDefaultDensity);
  options.threshold = flags.threshold;
  options.damping = flags.damping;
  options.descent_sweeps = flags.descent;
  options.embedding = formats.at(flags.embedding);
  if (flags.lm_head != "auto") options.lm_head = formats.at(flags.lm_head);
  options.rule = flags.outliers == "magnitude" ? OutlierRule::kMagnitude
                 : flags.outliers == "error"   ? OutlierRule::kError
                                               : OutlierRule::kErrorWithRescale;
  options.num_threads = flags.threads == 0 ? AvailableThreads() : flags.threads;
  options.overwrite = flags.overwrite;
  return options;
}

// The options for a GPTQ checkpoint whose codes are taken over.
absl::Status UseCodes(const GptqTensors& codes, const QuantizeFlags& flags,
                      QuantizeOptions* options) {
  options->imported = &codes;
  const bool has_original = !flags.original.empty();
  if (!has_original && !codes.HasActOrder()) {
    if (flags.density.value_or(0) > 0 || flags.threshold > 0) {
      return InvalidArgumentError(
          "--density, --threshold: outliers beside a GPTQ checkpoint's codes need --original");
    }
    options->density = 0;
  }
  // Layers that have to be quantized anew.
  if (!flags.calibration.empty()) options->method = QuantizeMethod::kGptq;
  if (!flags.symmetric && !codes.HasActOrder()) {
    FQ_ASSIGN_OR_RETURN(options->symmetric, codes.AllZeroPointsAreEight());
  }
  if (flags.lm_head == "auto" && codes.HasCodes("lm_head")) options->lm_head = TableFormat::kInt4;
  return absl::OkStatus();
}

absl::Status WriteReport(const std::string& path, const QuantizeReport& report) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) return ErrnoStatus(errno, path, "create");
  const std::string text = DumpJson(ReportJson(report)) + "\n";
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int error_number = errno;
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed) return ErrnoStatus(written ? errno : error_number, path, "write");
  return absl::OkStatus();
}

// A checkpoint of the configuration's shapes, from nothing else.
absl::Status RunRandomWeights(const QuantizeFlags& flags) {
  const RandomWeightOptions options = {.seed = *flags.random_weights,
                                       .quantize = OptionsFrom(flags)};
  FQ_ASSIGN_OR_RETURN(const Checkpoint checkpoint, MakeRandomCheckpoint(flags.input, options));
  ProgressPrinter printer(flags.quiet);
  int64_t num_bytes = 0;
  FQ_RETURN_IF_ERROR(WriteCheckpoint(checkpoint, flags.output,
                                     [&](int64_t done, int64_t total, const std::string& tensor) {
                                       num_bytes = total;
                                       printer.Show(done, total, tensor);
                                     }));
  fmt::print("{}: random weights, seed {}, tensors {:.2f} MB\n", flags.output, options.seed,
             static_cast<double>(num_bytes) / 1e6);
  return absl::OkStatus();
}

// What is to be quantized: the input, or random weights in BF16.
absl::StatusOr<Checkpoint> InputFrom(const QuantizeFlags& flags) {
  if (!flags.random_weights.has_value()) return CheckpointFromPath(flags.input);
  return MakeRandomCheckpoint(
      flags.input, {.seed = *flags.random_weights, .int4 = false, .quantize = OptionsFrom(flags)});
}

absl::Status RunQuantize(const CLI::App& command, const QuantizeFlags& flags) {
  FQ_RETURN_IF_ERROR(CheckFlags(command, flags));
  if (flags.random_weights.has_value() && flags.method != "gptq" && flags.method != "spqr") {
    return RunRandomWeights(flags);
  }
  const auto start = std::chrono::steady_clock::now();
  QuantizeOptions options = OptionsFrom(flags);
  if (!flags.target_size.empty()) {
    FQ_ASSIGN_OR_RETURN(options.target_bytes, ParseMemorySize(flags.target_size));
  }
  FQ_ASSIGN_OR_RETURN(const Checkpoint input, InputFrom(flags));
  const GptqTensors* const codes = flags.method == "auto" ? AsGptq(*input.tensors) : nullptr;
  if (codes != nullptr) FQ_RETURN_IF_ERROR(UseCodes(*codes, flags, &options));
  Checkpoint original;
  if (!flags.original.empty()) {
    if (codes == nullptr) {
      return InvalidArgumentError("--original: {} is no GPTQ checkpoint", flags.input);
    }
    FQ_ASSIGN_OR_RETURN(original, CheckpointFromPath(flags.original));
  }
  const Checkpoint& checkpoint = flags.original.empty() ? input : original;
  FQ_ASSIGN_OR_RETURN(const std::unique_ptr<ModelCalibration> calibration,
                      CalibrationFrom(flags, checkpoint));
  QuantizerDevice device;
  if (calibration == nullptr) {
    FQ_ASSIGN_OR_RETURN(device, OpenQuantizerDevice(flags.backend, options.num_threads));
  }
  options.ops = calibration != nullptr ? calibration->ops() : device.ops.get();
  ProgressPrinter printer(flags.quiet);
  FQ_ASSIGN_OR_RETURN(const QuantizeReport report,
                      QuantizeCheckpoint(
                          checkpoint, flags.output, options,
                          [&](int64_t done, int64_t total, const std::string& tensor) {
                            printer.Show(done, total, tensor);
                          },
                          calibration.get()));
  if (flags.report || !flags.quiet) fmt::print("{}", ReportTable(report));
  if (report.resumed_layers > 0) {
    fmt::print("{}: {} layers were finished by an earlier run and taken over\n", flags.output,
               report.resumed_layers);
  }
  const LayerReport total = report.Total();
  fmt::print("{}: {} quantized layers, group size {}, stored density {:.3f}%, tensors {:.2f} MB\n",
             flags.output, report.layers.size(), report.group_size, 100 * total.stored_density(),
             static_cast<double>(report.tensor_bytes) / 1e6);
  if (!flags.quiet) {
    const double seconds =
        std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    fmt::print("{}: {:.1f} s on {}: {}\n", flags.output, seconds, options.ops->name(),
               StageText(report.seconds));
  }
  if (!flags.json.empty()) FQ_RETURN_IF_ERROR(WriteReport(flags.json, report));
  return absl::OkStatus();
}

void AddMethodFlags(CLI::App* command, QuantizeFlags* flags) {
  command
      ->add_option(
          "--method", flags->method,
          "rtn: round to nearest; gptq: least output error on a calibration text; spqr: the "
          "same with outliers; auto: rtn, or the codes of a GPTQ checkpoint as they are")
      ->check(CLI::IsMember({"auto", "rtn", "gptq", "spqr"}))
      ->capture_default_str();
  command->add_option("--calibration", flags->calibration,
                      "text file for gptq and spqr; with rtn it adds output errors to the report");
  command
      ->add_option("--calibration-tokens", flags->calibration_tokens,
                   "most tokens to use, 0 = the whole text")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()))
      ->capture_default_str();
  command
      ->add_option("--calibration-skip", flags->calibration_skip,
                   "tokens of the text to leave out at its beginning")
      ->check(CLI::Range(int64_t{0}, std::numeric_limits<int64_t>::max()))
      ->capture_default_str();
  command
      ->add_option("--calibration-context", flags->calibration_context,
                   "tokens of a window, 0 = 2048 or the model's own")
      ->check(CLI::Range(0, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--damping", flags->damping,
                   "gptq and spqr: share of the mean squared input added to all inputs")
      ->check(CLI::Range(1e-6, 1.0))
      ->capture_default_str();
  command
      ->add_option("--descent", flags->descent,
                   "gptq and spqr: sweeps of coordinate descent after the first pass")
      ->check(CLI::Range(0, 100))
      ->capture_default_str();
}

}  // namespace

void AddQuantizeCommand(CLI::App& app, int* exit_code) {
  auto flags = std::make_shared<QuantizeFlags>();
  CLI::App* command = app.add_subcommand("quantize", "Make an INT4 + outlier checkpoint");
  command->add_option("--input", flags->input, "Hugging Face folder, GPTQ folder or GGUF file")
      ->required();
  command->add_option("--original", flags->original,
                      "what a GPTQ --input was made of: its weights become outliers beside the "
                      "codes, by output error with --calibration");
  command->add_option("--output", flags->output, "folder to make")->required();
  command->add_option("--random-weights", flags->random_weights,
                      "seed: --input is a config.json (or its folder), and the folder made has "
                      "random weights of its shapes, for trials of big models; with --method gptq "
                      "or spqr they are quantized so, on random text");
  command
      ->add_option("--group-size", flags->group_size,
                   "weights per scale; auto: the largest of 128, 64, 32 that divides every K; -1: "
                   "one group per row")
      ->check(CLI::IsMember({"auto", "32", "64", "128", "-1"}))
      ->capture_default_str();
  command
      ->add_option(
          "--density", flags->density,
          "outliers: stored slots as a share of the weights, 0 = none (default: 0.01, with "
          "--method gptq 0)")
      ->check(CLI::Range(0.0, kMaxDensity));
  command
      ->add_option(
          "--threshold", flags->threshold,
          "outliers as SpQR chooses them, in place of --density: what costs more than this "
          "times the layer's weighted spread, for example 0.1")
      ->check(CLI::Range(0.0, kMaxThreshold));
  command->add_option("--target-size", flags->target_size,
                      "of all tensors, as in 6.0GiB, in place of --density: every layer gets the "
                      "outliers that lower its error most for the bytes");
  command->add_flag("--symmetric,!--asymmetric", flags->symmetric,
                    "zero point 8 everywhere (default: asymmetric)");
  command->add_option("--embedding", flags->embedding, "embedding table: bf16 or int8")
      ->check(CLI::IsMember({"bf16", "int8"}))
      ->capture_default_str();
  command
      ->add_option("--lm-head", flags->lm_head,
                   "output head: bf16, int8 or int4; auto: as the embedding when tied, else bf16")
      ->check(CLI::IsMember({"auto", "bf16", "int8", "int4"}))
      ->capture_default_str();
  AddMethodFlags(command, flags.get());
  command
      ->add_option("--outliers", flags->outliers,
                   "how outliers are chosen: rescale (least error, finer scales included), error, "
                   "magnitude (for comparisons)")
      ->check(CLI::IsMember({"rescale", "error", "magnitude"}))
      ->capture_default_str();
  command
      ->add_option("--backend", flags->backend,
                   "where the heavy steps run: auto, cpu or cuda; the results of the two differ in "
                   "rounding")
      ->capture_default_str();
  command->add_option("--threads", flags->threads, "0 = one per core; no influence on the result")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  command->add_option("--json", flags->json, "also write the report to this file");
  command->add_flag("--overwrite", flags->overwrite, "replace an existing model folder");
  command->add_flag("--report", flags->report, "print the table of layers with --quiet too");
  command->add_flag("--quiet", flags->quiet, "no progress, no table");
  command->callback([command, flags, exit_code] {
    *exit_code = RunTool([&] { return RunQuantize(*command, *flags); });
  });
}

}  // namespace flashquant
