#include "engine/quantize/random_checkpoint.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <memory>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/checkpoint/checkpoint_writer.h"
#include "engine/checkpoint/gguf_reader.h"
#include "engine/checkpoint/json.h"
#include "engine/checkpoint/quantized_tensors.h"
#include "engine/model/model_config.h"
#include "engine/model/model_layout.h"
#include "engine/quantize/matrix_quantizer.h"
#include "engine/quantize/parallel_for.h"
#include "engine/quantize/random_layer.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr int64_t kPieceBytes = int64_t{64} << 20;  // written at once
constexpr int64_t kTaskBytes = int64_t{1} << 18;    // made by one thread at once

enum class Content {
  kNorm,
  kNormal,
  kTableCodes,
  kTableScales,
  kCodes,
  kScales,
  kZeros,
  kTileIndptr,
  kBuckets,
  kRecords
};

struct RandomTensor {
  TensorInfo info;
  Content content = Content::kNormal;
  uint64_t seed = 0;
  std::shared_ptr<const NormalTable> table;      // kNormal
  std::shared_ptr<const RandomInt4Layer> layer;  // the INT4 layer's tensors
};

template <typename T>
T* At(void* out, int64_t index) {
  return static_cast<T*>(out) + index;
}

class RandomTensors final : public TensorSource {
 public:
  explicit RandomTensors(int num_threads) : num_threads_(num_threads) {}

  void Add(RandomTensor tensor) {
    const auto& shape = tensor.info.shape;
    tensor.info.num_bytes =
        std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>()) *
        DTypeBytes(tensor.info.dtype);
    items_.push_back(std::move(tensor));
  }
  void Finish() {
    std::sort(items_.begin(), items_.end(), [](const RandomTensor& a, const RandomTensor& b) {
      return a.info.name < b.info.name;
    });
    for (const RandomTensor& item : items_) infos_.push_back(item.info);
  }

  const std::vector<TensorInfo>& tensors() const override { return infos_; }
  bool IsGenerated() const override { return true; }
  absl::Status ReadRows(const TensorInfo& tensor, int64_t first_row, int64_t num_rows,
                        void* out) const override {
    const RandomTensor& item = items_[static_cast<size_t>(&tensor - infos_.data())];
    if (item.content == Content::kRecords) {
      FillRecords(*item.layer, first_row, num_rows, static_cast<TileCooRecord*>(out));
      return absl::OkStatus();
    }
    const int64_t row_bytes = item.info.num_bytes / item.info.num_rows();
    const int64_t rows_at_once = std::max<int64_t>(1, kTaskBytes / row_bytes);
    ParallelFor(num_threads_, num_rows, rows_at_once, [&](int64_t begin, int64_t end) {
      FillRows(item, first_row + begin, end - begin,
               static_cast<uint8_t*>(out) + begin * row_bytes);
    });
    return absl::OkStatus();
  }

 private:
  static void FillRows(const RandomTensor& item, int64_t first, int64_t count, uint8_t* out);

  void FillRecords(const RandomInt4Layer& layer, int64_t first, int64_t count,
                   TileCooRecord* out) const {
    const std::vector<uint32_t>& indptr = layer.tile_indptr();
    const auto after = [&](int64_t record) {
      return std::upper_bound(indptr.begin(), indptr.end(), record) - indptr.begin();
    };
    const int64_t first_tile = after(first) - 1;
    const int64_t end_tile = after(first + count - 1);
    ParallelFor(num_threads_, end_tile - first_tile, 8, [&](int64_t begin, int64_t end) {
      std::vector<TileCooBucket> buckets;
      std::vector<TileCooRecord> records;
      for (int64_t tile = first_tile + begin; tile < first_tile + end; ++tile) {
        buckets.clear();
        records.clear();
        layer.MakeTile(tile, buckets, records);
        const int64_t tile_first = indptr[static_cast<size_t>(tile)];
        for (size_t i = 0; i < records.size(); ++i) {
          const int64_t index = tile_first + static_cast<int64_t>(i) - first;
          if (index >= 0 && index < count) out[index] = records[i];
        }
      }
    });
  }

  const int num_threads_;
  std::vector<RandomTensor> items_;
  std::vector<TensorInfo> infos_;
};

void RandomTensors::FillRows(const RandomTensor& item, int64_t first, int64_t count, uint8_t* out) {
  const int64_t columns = item.info.num_bytes / item.info.num_rows() / DTypeBytes(item.info.dtype);
  const int64_t first_element = first * columns;
  switch (item.content) {
    case Content::kNorm:
      for (int64_t i = 0; i < count; ++i) {
        const auto random =
            static_cast<float>(RandomWord(item.seed, static_cast<uint64_t>(first + i)) % 1024);
        *At<BFloat16>(out, i) = ToBFloat16(0.75f + random * 0x1p-11f);
      }
      return;
    case Content::kNormal:
      return FillNormal(*item.table, item.seed, first_element, count * columns,
                        At<BFloat16>(out, 0));
    case Content::kTableCodes:
      for (int64_t i = 0; i < count * columns; ++i) {
        const uint64_t index = static_cast<uint64_t>(first_element + i);
        const uint64_t word = RandomWord(item.seed, index / 8) >> (8 * (index % 8));
        *At<int8_t>(out, i) = static_cast<int8_t>(static_cast<int>(word % 255) - 127);
      }
      return;
    case Content::kTableScales:
      for (int64_t i = 0; i < count; ++i) *At<BFloat16>(out, i) = ToBFloat16(0x1p-12f);
      return;
    case Content::kTileIndptr:
      std::memcpy(out, item.layer->tile_indptr().data() + first,
                  static_cast<size_t>(count) * sizeof(uint32_t));
      return;
    default:
      break;
  }
  std::vector<TileCooBucket> buckets;
  std::vector<TileCooRecord> records;
  const int64_t row_bytes = item.info.num_bytes / item.info.num_rows();
  for (int64_t row = first; row < first + count; ++row, out += row_bytes) {
    if (item.content == Content::kCodes) item.layer->FillCodes(row, out);
    if (item.content == Content::kScales) item.layer->FillScales(row, At<BFloat16>(out, 0));
    if (item.content == Content::kZeros) item.layer->FillZeros(row, out);
    if (item.content != Content::kBuckets) continue;
    buckets.clear();
    item.layer->MakeTile(row, buckets, records);
    std::memcpy(out, buckets.data(), static_cast<size_t>(row_bytes));
  }
}

// Decides on the tensors, from the configuration and the options.
class RandomCheckpointMaker final {
 public:
  RandomCheckpointMaker(const ModelConfig& config, const RandomWeightOptions& options)
      : config_(config),
        options_(options),
        tensors_(std::make_unique<RandomTensors>(std::max(1, options.quantize.num_threads))) {
    quantization_.group_size = options.quantize.group_size.value_or(CommonGroupSize());
    quantization_.symmetric = options.quantize.symmetric;
    quantization_.geometry.semantics = TileCooSemantics::kResidual;
    quantization_.target_density = options.quantize.density;
    quantization_.method = options.quantize.density > 0 ? "random+outliers" : "random";
  }

  std::unique_ptr<TensorSource> Run() {
    AddTables();
    AddNorm(FinalNorm(config_));
    if (config_.family == DecoderFamily::kOpt) {
      AddNormal(std::string(kPositionsName),
                {config_.max_position + kOptPositionOffset, config_.hidden_size},
                config_.hidden_size);
    }
    for (int32_t layer = 0; layer < config_.num_layers; ++layer) {
      for (const NormShape& norm : LayerNorms(config_, layer)) AddNorm(norm);
      if (config_.head_norms) {
        for (const NormShape& norm : HeadNorms(config_, layer)) AddNorm(norm);
      }
      for (const LinearShape& shape : LayerLinears(config_, layer)) {
        for (const LinearPartShape& part : shape.parts) AddPart(part, shape.k);
      }
    }
    tensors_->Finish();
    if (num_weights_ > 0) {
      quantization_.stored_density =
          static_cast<double>(num_slots_) / static_cast<double>(num_weights_);
    }
    return std::move(tensors_);
  }

  nlohmann::json QuantizationSection() const {
    nlohmann::json section = QuantizationConfigJson(quantization_);
    section["embedding"] = TableFormatName(options_.quantize.embedding);
    section["lm_head"] = head_name_;
    return section;
  }

 private:
  int64_t CommonGroupSize() const {
    for (const int64_t group : {128, 64}) {
      bool divides = config_.hidden_size % group == 0;
      for (const LinearShape& shape : LayerLinears(config_, 0)) {
        divides = divides && shape.k % group == 0;
      }
      if (divides) return group;
    }
    return 32;
  }

  uint64_t NextSeed() { return RandomWord(options_.seed, num_seeds_++); }

  void AddTables() {
    const LinearShape table = EmbeddingShape(config_);
    const TableFormat embedding =
        options_.int4 ? options_.quantize.embedding : TableFormat::kBFloat16;
    AddTable(table.parts[0], table.k, embedding);
    const bool tied = config_.tie_word_embeddings;
    const TableFormat head =
        options_.int4
            ? options_.quantize.lm_head.value_or(tied ? embedding : TableFormat::kBFloat16)
            : TableFormat::kBFloat16;
    head_name_ = TableFormatName(head);
    const LinearShape shape = HeadShape(config_);
    if (head == TableFormat::kInt4) {
      AddInt4(shape.parts[0], shape.k);
    } else if (tied) {
      head_name_ = "tied";
    } else {
      AddTable(shape.parts[0], shape.k, head);
    }
  }

  void AddTable(const LinearPartShape& part, int64_t k, TableFormat format) {
    const std::string name = part.name + ".weight";
    if (format == TableFormat::kBFloat16) return AddNormal(name, {part.n, k}, k);
    AddTensor(name, DType::kI8, {part.n, k}, Content::kTableCodes);
    AddTensor(name + std::string(kTableScaleSuffix), DType::kBF16, {part.n, 1},
              Content::kTableScales);
  }

  void AddPart(const LinearPartShape& part, int64_t k) {
    if (part.has_bias) AddNormal(part.name + ".bias", {part.n}, 100);
    if (options_.int4) {
      AddInt4(part, k);
    } else {
      AddNormal(part.name + ".weight", {part.n, k}, k);
    }
  }

  void AddInt4(const LinearPartShape& part, int64_t k) {
    RandomInt4Layer::Options options;
    options.n = part.n;
    options.k = k;
    options.n_padded = PaddedN(part.n);
    options.k_padded = PaddedK(k, quantization_.group_size);
    options.group_size =
        quantization_.group_size == -1 ? options.k_padded : quantization_.group_size;
    options.symmetric = quantization_.symmetric;
    options.density = options_.quantize.density;
    options.seed = NextSeed();
    if (options.n != options.n_padded || options.k != options.k_padded) {
      quantization_.true_shapes[part.name] = {options.n, options.k};
    }
    const auto layer = std::make_shared<const RandomInt4Layer>(options);
    const auto add = [&](std::string_view suffix, DType dtype, std::vector<int64_t> shape,
                         Content content) {
      tensors_->Add({.info = {fmt::format("{}{}", part.name, suffix), dtype, std::move(shape), 0},
                     .content = content,
                     .layer = layer});
    };
    const int64_t groups = layer->groups_per_row();
    add(kCodesSuffix, DType::kU8, {options.n_padded, options.k_padded / 2}, Content::kCodes);
    add(kScalesSuffix, DType::kBF16, {options.n_padded, groups}, Content::kScales);
    if (!options.symmetric) {
      add(kZerosSuffix, DType::kU8, {options.n_padded, groups}, Content::kZeros);
    }
    num_weights_ += options.n * options.k;
    const int64_t num_records = layer->tile_indptr().back();
    if (num_records == 0) return;
    num_slots_ += kSlotsPerRecord * num_records;
    const TileCooGeometry& geometry = layer->geometry();
    add(kTileIndptrSuffix, DType::kU32, {geometry.num_tiles() + 1}, Content::kTileIndptr);
    add(kBucketInfoSuffix, DType::kU16, {geometry.num_tiles(), geometry.buckets_per_tile, 2},
        Content::kBuckets);
    add(kRecordsSuffix, DType::kU8, {num_records, int64_t{sizeof(TileCooRecord)}},
        Content::kRecords);
  }

  void AddNorm(const NormShape& norm) {
    AddTensor(norm.name + ".weight", DType::kBF16, {norm.size}, Content::kNorm);
    if (norm.has_bias) AddNormal(norm.name + ".bias", {norm.size}, 100);
  }
  // Of variance 1 / `inverse_variance`.
  void AddNormal(const std::string& name, std::vector<int64_t> shape, int64_t inverse_variance) {
    AddTensor(name, DType::kBF16, std::move(shape), Content::kNormal,
              std::make_shared<const NormalTable>(1.0f /
                                                  std::sqrt(static_cast<float>(inverse_variance))));
  }
  void AddTensor(const std::string& name, DType dtype, std::vector<int64_t> shape, Content content,
                 std::shared_ptr<const NormalTable> table = nullptr) {
    tensors_->Add({.info = {name, dtype, std::move(shape), 0},
                   .content = content,
                   .seed = NextSeed(),
                   .table = std::move(table)});
  }

  const ModelConfig& config_;
  const RandomWeightOptions& options_;
  std::unique_ptr<RandomTensors> tensors_;
  QuantizationConfig quantization_;
  std::string_view head_name_;
  uint64_t num_seeds_ = 0;
  int64_t num_weights_ = 0;
  int64_t num_slots_ = 0;
};

absl::Status CheckOptions(const QuantizeOptions& options) {
  const int64_t group = options.group_size.value_or(128);
  if (group != -1 && group != 32 && group != 64 && group != 128) {
    return InvalidArgumentError("--group-size: must be auto, 32, 64, 128 or -1 (got {})", group);
  }
  if (!(options.density >= 0 && options.density <= kMaxDensity)) {
    return InvalidArgumentError("--density: must be 0..{} (got {})", kMaxDensity, options.density);
  }
  if (options.embedding == TableFormat::kInt4) {
    return InvalidArgumentError("--embedding: must be bf16 or int8");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Checkpoint> MakeRandomCheckpoint(const std::string& path,
                                                const RandomWeightOptions& options) {
  FQ_RETURN_IF_ERROR(CheckOptions(options.quantize));
  const bool is_folder = std::filesystem::is_directory(path);
  const std::string folder = is_folder ? path : std::filesystem::path(path).parent_path().string();
  Checkpoint checkpoint;
  checkpoint.path = folder.empty() ? "." : folder;
  FQ_ASSIGN_OR_RETURN(checkpoint.config, ReadJsonFile(is_folder ? path + "/config.json" : path));
  checkpoint.config.erase("quantization_config");
  checkpoint.generation_config = nlohmann::json::object();
  FQ_ASSIGN_OR_RETURN(const ModelConfig config, ParseModelConfig(checkpoint));
  RandomCheckpointMaker maker(config, options);
  checkpoint.tensors = maker.Run();
  if (options.int4) checkpoint.config["quantization_config"] = maker.QuantizationSection();
  return checkpoint;
}

absl::Status WriteCheckpoint(const Checkpoint& checkpoint, const std::string& output_dir,
                             const WriteProgress& progress) {
  FQ_ASSIGN_OR_RETURN(const std::unique_ptr<CheckpointWriter> writer,
                      CheckpointWriter::Create(output_dir));
  FQ_RETURN_IF_ERROR(CopyTokenizerFiles(checkpoint.path, writer.get()));
  int64_t total = 0;
  for (const TensorInfo& tensor : checkpoint.tensors->tensors()) total += tensor.num_bytes;
  std::vector<uint8_t> piece;
  for (const TensorInfo& tensor : checkpoint.tensors->tensors()) {
    FQ_RETURN_IF_ERROR(writer->BeginTensor(tensor.name, tensor.dtype, tensor.shape));
    const int64_t row_bytes = tensor.num_bytes / tensor.num_rows();
    const int64_t rows_at_once = std::max<int64_t>(1, kPieceBytes / row_bytes);
    for (int64_t row = 0; row < tensor.num_rows(); row += rows_at_once) {
      const int64_t count = std::min(rows_at_once, tensor.num_rows() - row);
      piece.resize(static_cast<size_t>(count * row_bytes));
      FQ_RETURN_IF_ERROR(checkpoint.tensors->ReadRows(tensor, row, count, piece.data()));
      FQ_RETURN_IF_ERROR(writer->AppendBytes(piece));
    }
    if (progress) progress(writer->tensor_bytes(), total, tensor.name);
  }
  return writer->Finish(checkpoint.config);
}

}  // namespace flashquant
