#include "engine/checkpoint/safetensors.h"

#include <algorithm>
#include <array>
#include <limits>
#include <utility>

#include "engine/checkpoint/json.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr std::string_view kMetadataKey = "__metadata__";
constexpr int64_t kLengthBytes = 8;

uint64_t LoadU64(std::span<const uint8_t> bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < 8; ++i) value |= static_cast<uint64_t>(bytes[i]) << (8 * i);
  return value;
}

bool StartsWith(std::span<const uint8_t> head, std::string_view magic) {
  return head.size() >= magic.size() &&
         std::equal(magic.begin(), magic.end(), head.begin(),
                    [](char a, uint8_t b) { return static_cast<uint8_t>(a) == b; });
}

absl::Status ReadMetadata(const JsonObject& header, SafetensorsHeader* result) {
  FQ_ASSIGN_OR_RETURN(const JsonObject metadata, header.GetObject(kMetadataKey));
  for (const auto& [key, value] : metadata.json().items()) {
    if (!value.is_string()) {
      return metadata.Error(key, fmt::format("must be a string (got {})", value.type_name()));
    }
    result->metadata.emplace(key, value.get<std::string>());
  }
  return absl::OkStatus();
}

// One member of the header, offsets not yet compared with those of the others.
absl::StatusOr<SafetensorsTensor> ReadEntry(std::string_view where, const std::string& name,
                                            const nlohmann::json& value, int64_t data_bytes) {
  FQ_RETURN_IF_ERROR(CheckTensorName(where, name));
  FQ_ASSIGN_OR_RETURN(const JsonObject entry,
                      JsonObject::Create(value, fmt::format("{}: tensor {}", where, name)));
  SafetensorsTensor tensor;
  tensor.info.name = name;
  FQ_ASSIGN_OR_RETURN(const std::string dtype_name, entry.GetString("dtype", 32));
  const std::optional<DType> dtype = DTypeFromName(dtype_name);
  if (!dtype.has_value()) {
    return UnimplementedError("{}: tensor {}: unsupported dtype {}", where, name,
                              PrintableName(dtype_name));
  }
  tensor.info.dtype = *dtype;
  FQ_ASSIGN_OR_RETURN(const nlohmann::json* const shape, entry.GetArray("shape", kMaxTensorDims));
  for (const nlohmann::json& dim : *shape) {
    if (!dim.is_number_unsigned() ||
        dim.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return DataLossError("{}: tensor {}: size overflow: bad dimension (got {})", where, name,
                           PrintableName(dim.dump()));
    }
    tensor.info.shape.push_back(dim.get<int64_t>());
  }
  FQ_ASSIGN_OR_RETURN(tensor.info.num_bytes,
                      CheckedTensorBytes(where, name, *dtype, tensor.info.shape));
  FQ_ASSIGN_OR_RETURN(const nlohmann::json* const offsets, entry.GetArray("data_offsets", 2));
  if (offsets->size() != 2 || !(*offsets)[0].is_number_unsigned() ||
      !(*offsets)[1].is_number_unsigned()) {
    return entry.Error("data_offsets", "must be two offsets");
  }
  const auto begin = (*offsets)[0].get<uint64_t>();
  const auto end = (*offsets)[1].get<uint64_t>();
  if (end < begin) return entry.Error("data_offsets", "go backwards");
  if (end > static_cast<uint64_t>(data_bytes)) {
    return entry.Error("data_offsets", fmt::format("truncated: past the end of the file (limit {}, "
                                                   "got {})",
                                                   data_bytes, end));
  }
  if (end - begin != static_cast<uint64_t>(tensor.info.num_bytes)) {
    return entry.Error("data_offsets", fmt::format("do not fit the shape (need {} bytes, got {})",
                                                   tensor.info.num_bytes, end - begin));
  }
  tensor.file_offset = static_cast<int64_t>(begin);
  return tensor;
}

// Sorted by offset, the tensors must tile the data exactly.
absl::Status CheckTiling(std::string_view where, int64_t data_bytes,
                         const std::vector<SafetensorsTensor>& tensors) {
  int64_t end = 0;
  for (const SafetensorsTensor& tensor : tensors) {
    if (tensor.file_offset != end) {
      return DataLossError("{}: tensor {}: data_offsets {} (expected {}, got {})", where,
                           tensor.info.name, tensor.file_offset < end ? "overlap" : "leave a gap",
                           end, tensor.file_offset);
    }
    end += tensor.info.num_bytes;
  }
  if (end != data_bytes) {
    return DataLossError("{}: trailing bytes after the last tensor (limit {}, got {})", where, end,
                         data_bytes);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckForeignFormat(std::string_view file_name, std::span<const uint8_t> head) {
  constexpr std::string_view kAdvice = "give a folder with safetensors files";
  if (StartsWith(head, "GGUF")) {
    return UnimplementedError(
        "{}: format not supported: GGUF; import it with `flashquant quantize --input FILE.gguf "
        "--output DIR`",
        file_name);
  }
  if (StartsWith(head, "TCOO")) {
    return UnimplementedError("{}: format not supported: stand-alone Tile-COO matrix; {}",
                              file_name, kAdvice);
  }
  if (StartsWith(head, "PK\x03\x04")) {
    return UnimplementedError("{}: format not supported: zip archive (torch pickle); {}", file_name,
                              kAdvice);
  }
  if (head.size() >= 2 && head[0] == 0x80 && head[1] >= 2 && head[1] <= 5) {
    return UnimplementedError("{}: format not supported: pickle; {}", file_name, kAdvice);
  }
  // ONNX has no magic: a protobuf whose field 1 is a small version, followed by a string field.
  if (head.size() >= 3 && head[0] == 0x08 && head[1] >= 1 && head[1] <= 32 &&
      (head[2] == 0x12 || head[2] == 0x1a || head[2] == 0x22 || head[2] == 0x3a)) {
    return UnimplementedError("{}: format not supported: ONNX; {}", file_name, kAdvice);
  }
  return absl::OkStatus();
}

absl::Status CheckTensorName(std::string_view where, std::string_view name) {
  const bool control = std::any_of(name.begin(), name.end(), [](char c) {
    return static_cast<uint8_t>(c) < 0x20 || static_cast<uint8_t>(c) == 0x7f;
  });
  if (name.empty()) return DataLossError("{}: tensor name: empty", where);
  if (static_cast<int64_t>(name.size()) > kMaxTensorNameBytes) {
    return DataLossError("{}: tensor name: too long (limit {} bytes, got {})", where,
                         kMaxTensorNameBytes, name.size());
  }
  if (control || name.find("..") != std::string_view::npos) {
    return DataLossError("{}: tensor name: illegal characters (got {})", where,
                         PrintableName(name));
  }
  return absl::OkStatus();
}

absl::StatusOr<int64_t> CheckedTensorBytes(std::string_view where, std::string_view name,
                                           DType dtype, std::span<const int64_t> shape) {
  if (static_cast<int64_t>(shape.size()) > kMaxTensorDims) {
    return DataLossError("{}: tensor {}: size overflow: dimensions (limit {}, got {})", where, name,
                         kMaxTensorDims, shape.size());
  }
  std::optional<uint64_t> num_bytes = static_cast<uint64_t>(DTypeBytes(dtype));
  for (const int64_t dim : shape) {
    if (dim < 1) {
      return DataLossError("{}: tensor {}: size overflow: dimension below 1 (got {})", where, name,
                           dim);
    }
    num_bytes = CheckedMul(*num_bytes, static_cast<uint64_t>(dim));
    if (!num_bytes.has_value() ||
        *num_bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
      return DataLossError("{}: tensor {}: size overflow", where, name);
    }
  }
  return static_cast<int64_t>(*num_bytes);
}

absl::StatusOr<int64_t> ParseSafetensorsHeaderLength(std::string_view file_name,
                                                     std::span<const uint8_t> head,
                                                     int64_t file_bytes) {
  if (file_bytes < kLengthBytes || head.size() < static_cast<size_t>(kLengthBytes)) {
    FQ_RETURN_IF_ERROR(CheckForeignFormat(file_name, head));
    return DataLossError("{}: header: truncated (need {} bytes, got {})", file_name, kLengthBytes,
                         file_bytes);
  }
  const uint64_t length = LoadU64(head);
  if (length > static_cast<uint64_t>(kMaxSafetensorsHeaderBytes)) {
    FQ_RETURN_IF_ERROR(CheckForeignFormat(file_name, head));
    return DataLossError("{}: header: too large (limit {}, got {})", file_name,
                         kMaxSafetensorsHeaderBytes, length);
  }
  if (static_cast<int64_t>(length) > file_bytes - kLengthBytes) {
    FQ_RETURN_IF_ERROR(CheckForeignFormat(file_name, head));
    return DataLossError("{}: header: truncated (limit {}, got {})", file_name,
                         file_bytes - kLengthBytes, length);
  }
  return static_cast<int64_t>(length);
}

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(std::string_view file_name,
                                                         std::string_view header_text,
                                                         int64_t file_bytes) {
  const std::string where = fmt::format("{}: header", file_name);
  // The specification asks for it; leading blanks would only hide another format.
  if (!header_text.starts_with('{')) return DataLossError("{}: must start with '{{'", where);
  JsonLimits limits;
  limits.max_bytes = kMaxSafetensorsHeaderBytes;
  limits.max_values = 16 * kMaxSafetensorsTensors;
  // One more for the metadata, which holds a checksum per tensor.
  limits.max_root_members = kMaxSafetensorsTensors + 1;
  limits.root_members_name = "tensors";
  FQ_ASSIGN_OR_RETURN(const nlohmann::json json, ParseJson(header_text, where, limits));
  FQ_ASSIGN_OR_RETURN(const JsonObject header, JsonObject::Create(json, where));

  SafetensorsHeader result;
  const int64_t data_start = kLengthBytes + static_cast<int64_t>(header_text.size());
  const int64_t data_bytes = file_bytes - data_start;
  if (data_bytes < 0) return DataLossError("{}: truncated", where);
  for (const auto& [name, value] : header.json().items()) {
    if (name == kMetadataKey) {
      FQ_RETURN_IF_ERROR(ReadMetadata(header, &result));
      continue;
    }
    FQ_ASSIGN_OR_RETURN(SafetensorsTensor tensor, ReadEntry(where, name, value, data_bytes));
    result.tensors.push_back(std::move(tensor));
  }
  std::sort(result.tensors.begin(), result.tensors.end(),
            [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
              return a.file_offset < b.file_offset;
            });
  FQ_RETURN_IF_ERROR(CheckTiling(where, data_bytes, result.tensors));
  for (SafetensorsTensor& tensor : result.tensors) tensor.file_offset += data_start;
  return result;
}

absl::StatusOr<SafetensorsHeader> ReadSafetensorsHeader(const FileReader& file) {
  std::array<uint8_t, kLengthBytes> head = {};
  const int64_t head_bytes = std::min<int64_t>(kLengthBytes, file.num_bytes());
  FQ_RETURN_IF_ERROR(file.ReadAt(0, head_bytes, head.data()));
  const auto head_span = std::span<const uint8_t>(head).first(static_cast<size_t>(head_bytes));
  FQ_ASSIGN_OR_RETURN(const int64_t length,
                      ParseSafetensorsHeaderLength(file.path(), head_span, file.num_bytes()));
  std::string text(static_cast<size_t>(length), '\0');
  FQ_RETURN_IF_ERROR(file.ReadAt(kLengthBytes, length, text.data()));
  return ParseSafetensorsHeader(file.path(), text, file.num_bytes());
}

}  // namespace flashquant
