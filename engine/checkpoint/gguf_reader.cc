#include "engine/checkpoint/gguf_reader.h"

#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/checkpoint/gguf_blocks.h"
#include "engine/checkpoint/gguf_config.h"
#include "engine/checkpoint/gguf_tokenizer.h"
#include "engine/checkpoint/gptq_reader.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr std::string_view kRopeDivisors = "rope_freqs.weight";

// Where the rows of a tensor are in the file: as they are, or reordered within each head.
struct RowOrder {
  int64_t head_dim = 0;  // 0: as they are

  // Hugging Face rotates row i with row i + head_dim / 2 of a head, GGUF rows 2 i and 2 i + 1.
  int64_t FileRow(int64_t row) const {
    if (head_dim == 0) return row;
    const int64_t within = row % head_dim;
    const int64_t half = head_dim / 2;
    return row - within + 2 * (within % half) + within / half;
  }
};

struct MappedName {
  std::string name;
  bool is_rotary = false;
};

// "blk.12.attn_q.weight" to "model.layers.12.self_attn.q_proj.weight"; nullopt for a tensor that a
// Llama model does not have.
std::optional<MappedName> MapName(std::string_view gguf_name, int64_t num_layers) {
  if (gguf_name == "token_embd.weight") return MappedName{"model.embed_tokens.weight"};
  if (gguf_name == "output_norm.weight") return MappedName{"model.norm.weight"};
  if (gguf_name == "output.weight") return MappedName{"lm_head.weight"};
  constexpr std::string_view kBlock = "blk.";
  if (!gguf_name.starts_with(kBlock)) return std::nullopt;
  std::string_view rest = gguf_name.substr(kBlock.size());
  int64_t layer = 0;
  size_t num_digits = 0;
  while (num_digits < rest.size() && num_digits < 9 && rest[num_digits] >= '0' &&
         rest[num_digits] <= '9') {
    layer = layer * 10 + (rest[num_digits++] - '0');
  }
  // "blk.01" would be a second name of layer 1.
  const bool canonical = num_digits > 0 && (rest[0] != '0' || num_digits == 1);
  if (!canonical || layer >= num_layers || rest.size() <= num_digits || rest[num_digits] != '.') {
    return std::nullopt;
  }
  rest.remove_prefix(num_digits + 1);
  constexpr std::array<std::pair<std::string_view, std::string_view>, 9> kParts = {{
      {"attn_norm", "input_layernorm"},
      {"ffn_norm", "post_attention_layernorm"},
      {"attn_q", "self_attn.q_proj"},
      {"attn_k", "self_attn.k_proj"},
      {"attn_v", "self_attn.v_proj"},
      {"attn_output", "self_attn.o_proj"},
      {"ffn_gate", "mlp.gate_proj"},
      {"ffn_up", "mlp.up_proj"},
      {"ffn_down", "mlp.down_proj"},
  }};
  for (const auto& [part, name] : kParts) {
    for (const std::string_view kind : {".weight", ".bias"}) {
      if (rest.size() != part.size() + kind.size() || !rest.starts_with(part) ||
          !rest.ends_with(kind)) {
        continue;
      }
      if (kind == ".bias" && part.ends_with("norm")) return std::nullopt;  // no LayerNorm here
      return MappedName{fmt::format("model.layers.{}.{}{}", layer, name, kind),
                        part == "attn_q" || part == "attn_k"};
    }
  }
  return std::nullopt;
}

// The tensors of one GGUF file under Hugging Face's names.
class GgufTensors final : public TensorSource {
 public:
  static absl::StatusOr<std::unique_ptr<TensorSource>> Create(std::unique_ptr<GgufFile> gguf,
                                                              int64_t num_layers,
                                                              int64_t head_dim) {
    auto result = std::make_unique<GgufTensors>();
    std::vector<std::pair<TensorInfo, Stored>> all;
    for (const GgufTensor& tensor : gguf->tensors()) {
      if (tensor.name == kRopeDivisors) continue;  // is in config.json as rope_scaling
      const std::optional<MappedName> mapped = MapName(tensor.name, num_layers);
      if (!mapped.has_value()) {
        return UnimplementedError("{}: tensor {}: not part of a Llama model of {} layers",
                                  gguf->path(), tensor.name, num_layers);
      }
      const RowOrder order = {mapped->is_rotary ? head_dim : 0};
      if (mapped->is_rotary && tensor.shape[0] % head_dim != 0) {
        return DataLossError(
            "{}: tensor {}: rows must be a multiple of the head dimension {} "
            "(got {})",
            gguf->path(), tensor.name, head_dim, tensor.shape[0]);
      }
      all.emplace_back(Describe(tensor, mapped->name), Stored{&tensor, order});
    }
    std::sort(all.begin(), all.end(),
              [](const auto& a, const auto& b) { return a.first.name < b.first.name; });
    for (auto& [info, stored] : all) {
      result->infos_.push_back(std::move(info));
      result->stored_.push_back(stored);
    }
    result->gguf_ = std::move(gguf);
    return std::unique_ptr<TensorSource>(std::move(result));
  }

  const std::vector<TensorInfo>& tensors() const override { return infos_; }

  absl::Status ReadRows(const TensorInfo& tensor, int64_t first_row, int64_t num_rows,
                        void* out) const override {
    const TensorInfo* const info = Find(tensor.name);
    if (info == nullptr) return DataLossError("missing tensor {}", tensor.name);
    if (first_row < 0 || num_rows < 0 || first_row > info->num_rows() - num_rows) {
      return InternalError("tensor {}: rows {}..+{} (limit {})", info->name, first_row, num_rows,
                           info->num_rows());
    }
    const Stored& stored = stored_[static_cast<size_t>(info - infos_.data())];
    std::vector<uint8_t> buffer;
    auto* destination = static_cast<uint8_t*>(out);
    const int64_t row_bytes = info->num_bytes / info->num_rows();
    // Reordered rows come one by one, others in pieces that bound the buffer.
    const int64_t step = stored.order.head_dim != 0
                             ? 1
                             : std::max<int64_t>(1, kPieceBytes / stored.tensor->row_bytes);
    for (int64_t row = 0; row < num_rows; row += step) {
      const int64_t count = std::min(step, num_rows - row);
      FQ_RETURN_IF_ERROR(Annotate(ReadPiece(*stored.tensor, stored.order.FileRow(first_row + row),
                                            count, &buffer, destination + row * row_bytes),
                                  fmt::format("{}: tensor {}", gguf_->path(), info->name)));
    }
    return absl::OkStatus();
  }

 private:
  static constexpr int64_t kPieceBytes = int64_t{1} << 20;

  struct Stored {
    const GgufTensor* tensor = nullptr;  // in gguf_
    RowOrder order;
  };

  static bool IsBlockType(GgufType type) {
    return type != GgufType::kF32 && type != GgufType::kF16 && type != GgufType::kBF16;
  }

  static TensorInfo Describe(const GgufTensor& tensor, std::string name) {
    TensorInfo info;
    info.name = std::move(name);
    info.shape = tensor.shape;
    info.dtype = tensor.type == GgufType::kF16    ? DType::kF16
                 : tensor.type == GgufType::kBF16 ? DType::kBF16
                                                  : DType::kF32;
    const GgufBlock block = *GgufBlockOf(tensor.type);
    info.num_bytes =
        tensor.num_bytes / block.num_bytes * block.num_weights * DTypeBytes(info.dtype);
    return info;
  }

  // Neighbouring rows of the file, delivered.
  absl::Status ReadPiece(const GgufTensor& tensor, int64_t file_row, int64_t num_rows,
                         std::vector<uint8_t>* buffer, uint8_t* out) const {
    const int64_t offset = tensor.file_offset + file_row * tensor.row_bytes;
    const int64_t num_bytes = num_rows * tensor.row_bytes;
    if (!IsBlockType(tensor.type)) return gguf_->file().ReadAt(offset, num_bytes, out);
    buffer->resize(static_cast<size_t>(num_bytes));
    FQ_RETURN_IF_ERROR(gguf_->file().ReadAt(offset, num_bytes, buffer->data()));
    const GgufBlock block = *GgufBlockOf(tensor.type);
    std::vector<float> weights(
        static_cast<size_t>(num_bytes / block.num_bytes * block.num_weights));
    FQ_RETURN_IF_ERROR(DequantizeGgufBlocks(tensor.type, *buffer, weights.data()));
    std::memcpy(out, weights.data(), weights.size() * sizeof(float));
    return absl::OkStatus();
  }

  std::unique_ptr<GgufFile> gguf_;
  std::vector<TensorInfo> infos_;  // sorted by name
  std::vector<Stored> stored_;     // beside infos_
};

// A regular file that starts with the magic, or one called .gguf whatever it holds.
bool LooksLikeGguf(const std::string& path) {
  struct stat info = {};
  if (::stat(path.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return false;
  if (path.ends_with(".gguf")) return true;
  const absl::StatusOr<std::unique_ptr<FileReader>> file = FileReader::Open(path);
  std::array<char, 4> magic = {};
  return file.ok() && (*file)->num_bytes() >= 4 && (*file)->ReadAt(0, 4, magic.data()).ok() &&
         std::string_view(magic.data(), magic.size()) == "GGUF";
}

}  // namespace

absl::StatusOr<Checkpoint> OpenGguf(const std::string& path) {
  FQ_ASSIGN_OR_RETURN(std::unique_ptr<GgufFile> gguf, GgufFile::Open(path));
  Checkpoint checkpoint;
  checkpoint.path = path;
  FQ_ASSIGN_OR_RETURN(checkpoint.config, ConfigFromGguf(*gguf));
  FQ_ASSIGN_OR_RETURN(checkpoint.generation_config, GenerationConfigFromGguf(*gguf));
  FQ_ASSIGN_OR_RETURN(
      checkpoint.tensors,
      GgufTensors::Create(std::move(gguf), checkpoint.config["num_hidden_layers"].get<int64_t>(),
                          checkpoint.config["head_dim"].get<int64_t>()));
  return checkpoint;
}

absl::StatusOr<Checkpoint> CheckpointFromPath(const std::string& path) {
  if (LooksLikeGguf(path)) return OpenGguf(path);
  FQ_ASSIGN_OR_RETURN(Checkpoint checkpoint, OpenCheckpoint(path));
  return DequantizeIfGptq(std::move(checkpoint));
}

absl::Status CopyTokenizerFiles(const std::string& path, CheckpointWriter* writer) {
  if (LooksLikeGguf(path)) {
    FQ_ASSIGN_OR_RETURN(const std::unique_ptr<GgufFile> gguf, GgufFile::Open(path));
    FQ_ASSIGN_OR_RETURN(const GgufTokenizerFiles files, TokenizerFromGguf(*gguf));
    FQ_RETURN_IF_ERROR(files.tokenizer_json.empty()
                           ? writer->WriteTextFile("tokenizer.model", files.tokenizer_model)
                           : writer->WriteTextFile("tokenizer.json", files.tokenizer_json));
    return writer->WriteTextFile("tokenizer_config.json", files.tokenizer_config_json);
  }
  for (const std::string_view name :
       {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json",
        "merges.txt", "chat_template.jinja"}) {
    const absl::Status status = writer->CopyTextFile(fmt::format("{}/{}", path, name), name);
    if (!absl::IsNotFound(status)) FQ_RETURN_IF_ERROR(status);
  }
  return absl::OkStatus();
}

}  // namespace flashquant
