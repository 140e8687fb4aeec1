#include "engine/checkpoint/gguf_parser.h"

#include <algorithm>
#include <array>
#include <bit>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "engine/checkpoint/gguf_cursor.h"
#include "engine/checkpoint/safetensors.h"
#include "kernels/base/math_util.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

constexpr uint64_t kMaxKeys = 65'536;
constexpr uint64_t kMaxTensors = 100'000;
constexpr uint64_t kMaxKeyBytes = 65'535;
constexpr uint64_t kMaxArrayValues = uint64_t{8} << 20;  // over all arrays together
constexpr uint32_t kMaxDims = 4;
constexpr uint64_t kDefaultAlignment = 32;
constexpr uint64_t kMaxAlignment = 65'536;

enum class ValueType : uint32_t {
  kU8 = 0,
  kI8 = 1,
  kU16 = 2,
  kI16 = 3,
  kU32 = 4,
  kI32 = 5,
  kF32 = 6,
  kBool = 7,
  kString = 8,
  kArray = 9,
  kU64 = 10,
  kI64 = 11,
  kF64 = 12,
};

// Bytes that one value takes at least; 0 for an unknown type.
uint64_t MinValueBytes(ValueType type) {
  switch (type) {
    case ValueType::kU8:
    case ValueType::kI8:
    case ValueType::kBool:
      return 1;
    case ValueType::kU16:
    case ValueType::kI16:
      return 2;
    case ValueType::kU32:
    case ValueType::kI32:
    case ValueType::kF32:
      return 4;
    case ValueType::kString:
    case ValueType::kU64:
    case ValueType::kI64:
    case ValueType::kF64:
      return 8;
    case ValueType::kArray:
      return 12;
  }
  return 0;
}

// 0.1f as 0.1: the decimal number that a person wrote before it became a float.
double WidenByDecimal(float value) {
  if (!std::isfinite(value)) return value;
  std::array<char, 64> text;
  const auto written = std::to_chars(text.data(), text.data() + text.size(), value);
  double result = value;
  std::from_chars(text.data(), written.ptr, result);
  return result;
}

// Parses the header of one file.
class Parser {
 public:
  explicit Parser(const FileReader& file) : file_(file), cursor_(file) {}

  absl::Status Parse(GgufMetadata* metadata, std::vector<GgufTensor>* tensors) {
    FQ_RETURN_IF_ERROR(ReadStart());
    for (uint64_t i = 0; i < num_keys_; ++i) FQ_RETURN_IF_ERROR(ReadKey(metadata));
    FQ_ASSIGN_OR_RETURN(const uint64_t alignment, Alignment(*metadata));
    for (uint64_t i = 0; i < num_tensors_; ++i) FQ_RETURN_IF_ERROR(ReadTensor(tensors));
    return PlaceTensors(alignment, tensors);
  }

 private:
  absl::Status ReadStart() {
    std::array<char, 4> magic = {};
    FQ_RETURN_IF_ERROR(cursor_.Read(magic.size(), magic.data()));
    if (std::string_view(magic.data(), magic.size()) != "GGUF") {
      return DataLossError("{}: header: wrong magic, this is no GGUF file", file_.path());
    }
    FQ_ASSIGN_OR_RETURN(const uint32_t version, cursor_.ReadNumber<uint32_t>());
    if (version != 2 && version != 3) {
      return UnimplementedError("{}: header: unsupported version {} (need 2 or 3, little-endian)",
                                file_.path(), version);
    }
    FQ_ASSIGN_OR_RETURN(num_tensors_, cursor_.ReadNumber<uint64_t>());
    if (num_tensors_ > kMaxTensors) {
      return DataLossError("{}: header: too many tensors (limit {}, got {})", file_.path(),
                           kMaxTensors, num_tensors_);
    }
    FQ_ASSIGN_OR_RETURN(num_keys_, cursor_.ReadNumber<uint64_t>());
    if (num_keys_ > kMaxKeys) {
      return DataLossError("{}: header: too many keys (limit {}, got {})", file_.path(), kMaxKeys,
                           num_keys_);
    }
    return absl::OkStatus();
  }

  absl::Status ReadKey(GgufMetadata* metadata) {
    FQ_ASSIGN_OR_RETURN(std::string key, cursor_.ReadString(kMaxKeyBytes));
    FQ_ASSIGN_OR_RETURN(const uint32_t type, cursor_.ReadNumber<uint32_t>());
    absl::StatusOr<GgufValue> value = ReadValue(static_cast<ValueType>(type));
    if (!value.ok()) return Annotate(value.status(), "key " + PrintableName(key));
    if (!metadata->emplace(key, *std::move(value)).second) {
      return DataLossError("{}: header: duplicate key {}", file_.path(), PrintableName(key));
    }
    return absl::OkStatus();
  }

  template <typename Number>
  absl::StatusOr<GgufValue> ReadInt() {
    FQ_ASSIGN_OR_RETURN(const Number number, cursor_.ReadNumber<Number>());
    if (!std::in_range<int64_t>(number)) {
      return DataLossError("{}: header: integer beyond 2^63 - 1", file_.path());
    }
    return GgufValue(static_cast<int64_t>(number));
  }

  absl::StatusOr<GgufValue> ReadValue(ValueType type) {
    switch (type) {
      case ValueType::kU8:
        return ReadInt<uint8_t>();
      case ValueType::kI8:
        return ReadInt<int8_t>();
      case ValueType::kU16:
        return ReadInt<uint16_t>();
      case ValueType::kI16:
        return ReadInt<int16_t>();
      case ValueType::kU32:
        return ReadInt<uint32_t>();
      case ValueType::kI32:
        return ReadInt<int32_t>();
      case ValueType::kU64:
        return ReadInt<uint64_t>();
      case ValueType::kI64:
        return ReadInt<int64_t>();
      case ValueType::kF32: {
        FQ_ASSIGN_OR_RETURN(const float number, cursor_.ReadNumber<float>());
        return GgufValue(WidenByDecimal(number));
      }
      case ValueType::kF64: {
        FQ_ASSIGN_OR_RETURN(const double number, cursor_.ReadNumber<double>());
        return GgufValue(number);
      }
      case ValueType::kBool: {
        FQ_ASSIGN_OR_RETURN(const uint8_t byte, cursor_.ReadNumber<uint8_t>());
        if (byte > 1) {
          return DataLossError("{}: header: truth value (limit 1, got {})", file_.path(), byte);
        }
        return GgufValue(byte == 1);
      }
      case ValueType::kString: {
        FQ_ASSIGN_OR_RETURN(std::string text, cursor_.ReadString(kMaxGgufHeaderBytes));
        return GgufValue(std::move(text));
      }
      case ValueType::kArray:
        return ReadArray();
    }
    return DataLossError("{}: header: unknown value type {}", file_.path(),
                         static_cast<uint32_t>(type));
  }

  absl::StatusOr<GgufValue> ReadArray() {
    FQ_ASSIGN_OR_RETURN(const uint32_t type_number, cursor_.ReadNumber<uint32_t>());
    FQ_ASSIGN_OR_RETURN(const uint64_t count, cursor_.ReadNumber<uint64_t>());
    const auto type = static_cast<ValueType>(type_number);
    const uint64_t min_bytes = MinValueBytes(type);
    if (min_bytes == 0 || type == ValueType::kArray) {
      return DataLossError("{}: header: array of value type {} is not supported", file_.path(),
                           type_number);
    }
    if (count > cursor_.remaining() / min_bytes || count > kMaxArrayValues - num_array_values_) {
      return DataLossError(
          "{}: header: array too long (limit {}, got {})", file_.path(),
          std::min(cursor_.remaining() / min_bytes, kMaxArrayValues - num_array_values_), count);
    }
    num_array_values_ += count;
    if (type == ValueType::kString) return ReadElements<std::string>(type, count);
    if (type == ValueType::kF32 || type == ValueType::kF64) {
      return ReadElements<double>(type, count);
    }
    return ReadElements<int64_t>(type, count);
  }

  template <typename Element>
  absl::StatusOr<GgufValue> ReadElements(ValueType type, uint64_t count) {
    std::vector<Element> elements;
    elements.reserve(count);
    for (uint64_t i = 0; i < count; ++i) {
      FQ_ASSIGN_OR_RETURN(GgufValue value, ReadValue(type));
      if (const bool* const truth = std::get_if<bool>(&value)) value = int64_t{*truth};
      elements.push_back(std::get<Element>(std::move(value)));
    }
    return GgufValue(std::move(elements));
  }

  absl::StatusOr<uint64_t> Alignment(const GgufMetadata& metadata) const {
    const auto found = metadata.find("general.alignment");
    if (found == metadata.end()) return kDefaultAlignment;
    const int64_t* const value = std::get_if<int64_t>(&found->second);
    if (value == nullptr || *value < 1 || *value > static_cast<int64_t>(kMaxAlignment) ||
        !std::has_single_bit(static_cast<uint64_t>(*value))) {
      return DataLossError("{}: general.alignment: must be a power of two (limit {}, got {})",
                           file_.path(), kMaxAlignment,
                           value == nullptr ? std::string("another type") : fmt::to_string(*value));
    }
    return static_cast<uint64_t>(*value);
  }

  absl::Status ReadTensor(std::vector<GgufTensor>* tensors) {
    GgufTensor tensor;
    FQ_ASSIGN_OR_RETURN(tensor.name, cursor_.ReadString(kMaxTensorNameBytes));
    FQ_RETURN_IF_ERROR(CheckTensorName(file_.path(), tensor.name));
    FQ_ASSIGN_OR_RETURN(const uint32_t num_dims, cursor_.ReadNumber<uint32_t>());
    if (num_dims < 1 || num_dims > kMaxDims) {
      return DataLossError("{}: tensor {}: dimensions (limit 1..{}, got {})", file_.path(),
                           tensor.name, kMaxDims, num_dims);
    }
    for (uint32_t i = 0; i < num_dims; ++i) {
      FQ_ASSIGN_OR_RETURN(const uint64_t dim, cursor_.ReadNumber<uint64_t>());
      if (dim < 1 || !std::in_range<int64_t>(dim)) {
        return DataLossError("{}: tensor {}: size overflow: bad dimension {}", file_.path(),
                             tensor.name, dim);
      }
      tensor.shape.insert(tensor.shape.begin(), static_cast<int64_t>(dim));
    }
    FQ_ASSIGN_OR_RETURN(const uint32_t type, cursor_.ReadNumber<uint32_t>());
    tensor.type = static_cast<GgufType>(type);
    FQ_RETURN_IF_ERROR(SizeTensor(type, &tensor));
    FQ_ASSIGN_OR_RETURN(const uint64_t offset, cursor_.ReadNumber<uint64_t>());
    if (offset > static_cast<uint64_t>(file_.num_bytes())) {
      return DataLossError(
          "{}: tensor {}: truncated: offset past the end of the file (limit {}, "
          "got {})",
          file_.path(), tensor.name, file_.num_bytes(), offset);
    }
    tensor.file_offset = static_cast<int64_t>(offset);
    tensors->push_back(std::move(tensor));
    return absl::OkStatus();
  }

  absl::Status SizeTensor(uint32_t type, GgufTensor* tensor) const {
    const std::optional<GgufBlock> block = GgufBlockOf(tensor->type);
    if (!block.has_value()) {
      return UnimplementedError(
          "{}: tensor {}: {} ({}) is not imported (F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q6_K are)",
          file_.path(), tensor->name, GgufTypeName(type), type);
    }
    // Weights along the fastest dimension come in whole blocks.
    if (tensor->shape.back() % block->num_weights != 0) {
      return DataLossError("{}: tensor {}: {} needs a multiple of {} columns (got {})",
                           file_.path(), tensor->name, GgufTypeName(type), block->num_weights,
                           tensor->shape.back());
    }
    std::optional<uint64_t> row_bytes = static_cast<uint64_t>(block->num_bytes);
    if (tensor->shape.size() > 1) {
      row_bytes =
          CheckedMul(*row_bytes, static_cast<uint64_t>(tensor->shape.back() / block->num_weights));
    } else if (block->num_weights > 1) {
      return UnimplementedError("{}: tensor {}: vector of {}", file_.path(), tensor->name,
                                GgufTypeName(type));
    }
    for (size_t i = 1; i + 1 < tensor->shape.size() && row_bytes.has_value(); ++i) {
      row_bytes = CheckedMul(*row_bytes, static_cast<uint64_t>(tensor->shape[i]));
    }
    const std::optional<uint64_t> num_bytes =
        row_bytes.has_value() ? CheckedMul(*row_bytes, static_cast<uint64_t>(tensor->shape[0]))
                              : std::nullopt;
    // What is delivered may be floats: at most 4 bytes for each weight, 8 times the stored size.
    if (!num_bytes.has_value() ||
        *num_bytes > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) / 8) {
      return DataLossError("{}: tensor {}: size overflow", file_.path(), tensor->name);
    }
    tensor->row_bytes = static_cast<int64_t>(*row_bytes);
    tensor->num_bytes = static_cast<int64_t>(*num_bytes);
    return absl::OkStatus();
  }

  // Turns offsets from the start of the data into those of the file; the tensors must follow each
  // other with nothing but padding between them and behind the last.
  absl::Status PlaceTensors(uint64_t alignment, std::vector<GgufTensor>* tensors) const {
    const std::optional<uint64_t> data_start = CheckedRoundUp(cursor_.position(), alignment);
    const auto file_bytes = static_cast<uint64_t>(file_.num_bytes());
    std::sort(tensors->begin(), tensors->end(), [](const GgufTensor& a, const GgufTensor& b) {
      return a.file_offset < b.file_offset;
    });
    std::optional<uint64_t> end = data_start;
    for (GgufTensor& tensor : *tensors) {
      const std::optional<uint64_t> start =
          CheckedAdd(*data_start, static_cast<uint64_t>(tensor.file_offset));
      if (!start.has_value() || *start != *end) {
        return DataLossError("{}: tensor {}: offset {} (expected {}, got {})", file_.path(),
                             tensor.name,
                             start.has_value() && *start < *end ? "overlaps" : "leaves a gap",
                             *end - *data_start, tensor.file_offset);
      }
      const std::optional<uint64_t> stop =
          CheckedAdd(*start, static_cast<uint64_t>(tensor.num_bytes));
      if (!stop.has_value() || *stop > file_bytes) {
        return DataLossError(
            "{}: tensor {}: truncated: past the end of the file (limit {}, got {})", file_.path(),
            tensor.name, file_bytes, stop.value_or(0));
      }
      end = CheckedRoundUp(*stop, alignment);
      if (!end.has_value()) {
        return DataLossError("{}: tensor {}: size overflow", file_.path(), tensor.name);
      }
      tensor.file_offset = static_cast<int64_t>(*start);
    }
    if (file_bytes > *end) {
      return DataLossError("{}: trailing bytes after the last tensor (limit {}, got {})",
                           file_.path(), *end, file_bytes);
    }
    return CheckNames(tensors);
  }

  absl::Status CheckNames(std::vector<GgufTensor>* tensors) const {
    std::sort(tensors->begin(), tensors->end(),
              [](const GgufTensor& a, const GgufTensor& b) { return a.name < b.name; });
    const auto twice = std::adjacent_find(
        tensors->begin(), tensors->end(),
        [](const GgufTensor& a, const GgufTensor& b) { return a.name == b.name; });
    if (twice == tensors->end()) return absl::OkStatus();
    return DataLossError("{}: tensor {}: duplicate name", file_.path(), twice->name);
  }

  const FileReader& file_;
  GgufCursor cursor_;
  uint64_t num_tensors_ = 0;
  uint64_t num_keys_ = 0;
  uint64_t num_array_values_ = 0;
};

}  // namespace

absl::Status ParseGgufHeader(const FileReader& file, GgufMetadata* metadata,
                             std::vector<GgufTensor>* tensors) {
  return Parser(file).Parse(metadata, tensors);
}

}  // namespace flashquant
