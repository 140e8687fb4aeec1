#include "engine/checkpoint/gguf_file.h"

#include <algorithm>
#include <utility>

#include "engine/checkpoint/gguf_parser.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

absl::StatusOr<std::unique_ptr<GgufFile>> GgufFile::Open(const std::string& path) {
  std::unique_ptr<GgufFile> result(new GgufFile);
  FQ_ASSIGN_OR_RETURN(result->file_, FileReader::Open(path));
  FQ_RETURN_IF_ERROR(ParseGgufHeader(*result->file_, &result->metadata_, &result->tensors_));
  return result;
}

const GgufTensor* GgufFile::FindTensor(std::string_view name) const {
  const auto found = std::lower_bound(
      tensors_.begin(), tensors_.end(), name,
      [](const GgufTensor& tensor, std::string_view wanted) { return tensor.name < wanted; });
  return found != tensors_.end() && found->name == name ? &*found : nullptr;
}

absl::Status GgufFile::Error(std::string_view key, std::string_view what) const {
  return DataLossError("{}: {}: {}", path(), key, what);
}

template <typename Value>
absl::StatusOr<const Value*> GgufFile::Get(std::string_view key, std::string_view kind) const {
  const auto found = metadata_.find(key);
  if (found == metadata_.end()) return Error(key, "missing");
  const Value* const value = std::get_if<Value>(&found->second);
  if (value == nullptr) return Error(key, fmt::format("must be {}", kind));
  return value;
}

absl::StatusOr<int64_t> GgufFile::GetInt(std::string_view key, int64_t min, int64_t max) const {
  FQ_ASSIGN_OR_RETURN(const int64_t* const value, Get<int64_t>(key, "an integer"));
  if (*value < min || *value > max) {
    return Error(key, fmt::format("out of range (limit {}..{}, got {})", min, max, *value));
  }
  return *value;
}

absl::StatusOr<int64_t> GgufFile::GetIntOr(std::string_view key, int64_t fallback, int64_t min,
                                           int64_t max) const {
  if (!Has(key)) return fallback;
  return GetInt(key, min, max);
}

absl::StatusOr<double> GgufFile::GetDouble(std::string_view key, double min, double max) const {
  FQ_ASSIGN_OR_RETURN(const double* const value, Get<double>(key, "a float"));
  if (!(*value >= min && *value <= max)) {
    return Error(key, fmt::format("out of range (limit {}..{}, got {})", min, max, *value));
  }
  return *value;
}

absl::StatusOr<double> GgufFile::GetDoubleOr(std::string_view key, double fallback, double min,
                                             double max) const {
  if (!Has(key)) return fallback;
  return GetDouble(key, min, max);
}

absl::StatusOr<bool> GgufFile::GetBoolOr(std::string_view key, bool fallback) const {
  if (!Has(key)) return fallback;
  FQ_ASSIGN_OR_RETURN(const bool* const value, Get<bool>(key, "true or false"));
  return *value;
}

absl::StatusOr<std::string> GgufFile::GetString(std::string_view key) const {
  FQ_ASSIGN_OR_RETURN(const std::string* const value, Get<std::string>(key, "a string"));
  return *value;
}

absl::StatusOr<std::string> GgufFile::GetStringOr(std::string_view key,
                                                  std::string_view fallback) const {
  if (!Has(key)) return std::string(fallback);
  return GetString(key);
}

absl::StatusOr<const std::vector<std::string>*> GgufFile::GetStrings(std::string_view key) const {
  return Get<std::vector<std::string>>(key, "an array of strings");
}

absl::StatusOr<const std::vector<int64_t>*> GgufFile::GetInts(std::string_view key) const {
  return Get<std::vector<int64_t>>(key, "an array of integers");
}

absl::StatusOr<const std::vector<double>*> GgufFile::GetDoubles(std::string_view key) const {
  return Get<std::vector<double>>(key, "an array of numbers");
}

}  // namespace flashquant
