// flashquant inspect: what is in a checkpoint folder or a stand-alone Tile-COO file, whether it is
// sound, and what serving it takes of a GPU's memory. A .tcoo file is always checked whole.
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "engine/checkpoint/checkpoint.h"
#include "engine/checkpoint/file_reader.h"
#include "engine/model/memory_plan.h"
#include "engine/quantize/random_checkpoint.h"
#include "engine/tools/commands.h"
#include "engine/tools/inspect_folder.h"
#include "engine/tools/run_tool.h"
#include "kernels/backend_factory.h"
#include "kernels/base/status_macros.h"
#include "kernels/format/tile_coo_file.h"
#include "kernels/format/tile_coo_statistics.h"

namespace flashquant {
namespace {

constexpr int64_t kLeastCardBytes = int64_t{64} << 20;
constexpr int64_t kMaxTileCooFileBytes = int64_t{16} << 30;

absl::Status InspectTileCooFile(const std::string& path) {
  FQ_ASSIGN_OR_RETURN(const std::string bytes, ReadFile(path, kMaxTileCooFileBytes));
  const absl::StatusOr<TileCooFile> file =
      ParseTileCooFile(std::span(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size()));
  if (!file.ok()) return Annotate(file.status(), path);
  const TileCooGeometry& geometry = file->matrix.geometry();
  const TileCooStatistics statistics = ComputeTileCooStatistics(file->matrix);
  fmt::print("Tile-COO      1.{}, K {}, N {}\n", file->header.version_minor, geometry.k,
             geometry.n);
  fmt::print("tiles         {} of {} x {}, {} empty, {} buckets each\n", statistics.num_tiles,
             geometry.tile_k, geometry.tile_n, statistics.num_empty_tiles,
             geometry.buckets_per_tile);
  fmt::print(
      "values        {}, {}, {}, order hint {}\n",
      geometry.value_type == TileCooValueType::kBFloat16 ? "BF16" : "FP16",
      geometry.column_mode == TileCooColumnMode::kShared ? "shared column" : "column per slot",
      geometry.semantics == TileCooSemantics::kReplace ? "replace" : "residual",
      file->header.stored_order_hint);
  fmt::print("slots         {} stored ({:.3f}%), {} null\n", file->matrix.num_slots(),
             100 * file->matrix.stored_density(), statistics.num_null_slots);
  fmt::print(
      "records       {:.1f} a tile, at most {} in a tile and {} in a bucket, balance {:.3f}\n",
      statistics.mean_tile_records(), statistics.max_tile_records, statistics.max_bucket_records,
      statistics.bucket_balance);
  fmt::print("bytes         {} in the file, {} by the paper's formula\n", bytes.size(),
             PaperStorageBytes(file->matrix));
  fmt::print("verify        header, checksums and every rule hold\n");
  return absl::OkStatus();
}

struct PlanFlags {
  std::string gpu_memory;
  std::string reserve = "1GiB";
  std::string kv_cache_dtype = "auto";
  MemoryPlanOptions options;
};

void AddPlanFlags(CLI::App* command, CLI::Option* plan, PlanFlags* flags) {
  command->add_option("--gpu-memory", flags->gpu_memory, "of the card, as in 24GiB")->needs(plan);
  command->add_option("--gpu-reserve", flags->reserve, "of it for driver, desktop and others")
      ->needs(plan)
      ->capture_default_str();
  command->add_option("--max-sequences", flags->options.max_sequences, "sequences at once")
      ->needs(plan)
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command
      ->add_option("--max-length", flags->options.context_length,
                   "tokens of a sequence, 0 = the model's")
      ->needs(plan)
      ->check(CLI::Range(0, 1 << 24))
      ->capture_default_str();
  command->add_option("--token-budget", flags->options.token_budget, "tokens of a step")
      ->needs(plan)
      ->check(CLI::Range(1, 1 << 17))
      ->capture_default_str();
  command
      ->add_option("--kv-cache-dtype", flags->kv_cache_dtype,
                   "keys and values: auto (BF16), bf16 or fp8")
      ->needs(plan)
      ->capture_default_str();
}

absl::Status PlanMemory(const std::string& path, const PlanFlags& flags) {
  int64_t card = 0;
  if (!flags.gpu_memory.empty()) {
    FQ_ASSIGN_OR_RETURN(card, ParseMemorySize(flags.gpu_memory));
    if (card < kLeastCardBytes) {
      return InvalidArgumentError(
          "--gpu-memory {}: no card is that small; give a unit, as in 24GiB", flags.gpu_memory);
    }
  }
  FQ_ASSIGN_OR_RETURN(const int64_t reserve, ParseMemorySize(flags.reserve));
  FQ_ASSIGN_OR_RETURN(const std::optional<DType> kv_dtype, ParseKvCacheDType(flags.kv_cache_dtype));
  MemoryPlanOptions options = flags.options;
  options.kv_dtype = kv_dtype.value_or(DType::kBF16);
  const auto print = [&](const Checkpoint& checkpoint) -> absl::Status {
    FQ_ASSIGN_OR_RETURN(const MemoryPlan plan, MakeMemoryPlan(checkpoint, options));
    fmt::print("{}", DescribeMemoryPlan(plan, options, card, reserve));
    return absl::OkStatus();
  };
  if (!path.ends_with(".json")) {
    FQ_ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(path));
    return print(checkpoint);
  }
  for (const bool int4 : {true, false}) {
    FQ_ASSIGN_OR_RETURN(const Checkpoint checkpoint,
                        MakeRandomCheckpoint(path, {.int4 = int4, .quantize = {}}));
    fmt::print("{}\n", int4 ? "INT4 with 1% outliers" : "\nBF16");
    FQ_RETURN_IF_ERROR(print(checkpoint));
  }
  return absl::OkStatus();
}

}  // namespace

void AddInspectCommand(CLI::App& app, int* exit_code) {
  struct Flags {
    std::string path;
    bool verify = false;
    bool plan = false;
    PlanFlags plan_flags;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* command = app.add_subcommand("inspect", "Show and check a checkpoint or a .tcoo file");
  command->add_option("path", flags->path, "checkpoint folder or FILE.tcoo")->required();
  command->add_flag("--verify", flags->verify, "read everything; check every checksum and rule");
  CLI::Option* const plan = command->add_flag(
      "--plan", flags->plan,
      "what serving it takes of a GPU's memory, with no GPU needed; the path may also be a "
      "config.json, which is planned in INT4 with 1% outliers and in BF16");
  AddPlanFlags(command, plan, &flags->plan_flags);
  command->callback([flags, exit_code] {
    *exit_code = RunTool([&] {
      if (flags->plan) return PlanMemory(flags->path, flags->plan_flags);
      return flags->path.ends_with(".tcoo") ? InspectTileCooFile(flags->path)
                                            : InspectFolder(flags->path, flags->verify);
    });
  });
}

}  // namespace flashquant
