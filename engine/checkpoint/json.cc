#include "engine/checkpoint/json.h"

#include <cmath>
#include <cstddef>
#include <utility>
#include <vector>

#include "engine/checkpoint/file_reader.h"
#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

using Json = nlohmann::json;

// Builds the tree. Every handler returns false to stop the parser; `error` then says why.
class TreeBuilder final : public Json::json_sax_t {
 public:
  explicit TreeBuilder(const JsonLimits& limits) : limits_(limits) {}

  bool null() override { return Add(nullptr) != nullptr; }
  bool boolean(bool value) override { return Add(value) != nullptr; }
  bool number_integer(number_integer_t value) override { return Add(value) != nullptr; }
  bool number_unsigned(number_unsigned_t value) override { return Add(value) != nullptr; }
  bool number_float(number_float_t value, const string_t& text) override {
    if (!std::isfinite(value)) return Fail(fmt::format("number {} overflows", PrintableName(text)));
    return Add(value) != nullptr;
  }
  bool string(string_t& value) override { return Add(std::move(value)) != nullptr; }
  bool binary(binary_t& /*value*/) override { return Fail("binary value"); }
  bool start_object(std::size_t /*size*/) override { return Open(Json::object()); }
  bool start_array(std::size_t /*size*/) override { return Open(Json::array()); }
  bool end_object() override { return Close(); }
  bool end_array() override { return Close(); }
  bool key(string_t& name) override {
    const auto [member, inserted] = open_.back()->emplace(name, nullptr);
    if (!inserted) return Fail(fmt::format("duplicate key {}", PrintableName(name)));
    if (open_.size() == 1 &&
        static_cast<int64_t>(open_.back()->size()) > limits_.max_root_members) {
      return Fail(fmt::format("too many {} (limit {}, got more)", limits_.root_members_name,
                              limits_.max_root_members));
    }
    pending_ = &*member;
    return true;
  }
  bool parse_error(std::size_t position, const std::string& /*last_token*/,
                   const nlohmann::detail::exception& error) override {
    // 406 is the library's number for a number that no double holds.
    return Fail(error.id == 406 ? fmt::format("number overflows at byte {}", position)
                                : fmt::format("syntax error at byte {}", position));
  }

  const std::string& error() const { return error_; }
  Json& root() { return root_; }

 private:
  bool Fail(std::string what) {
    if (error_.empty()) error_ = std::move(what);
    return false;
  }

  template <typename Value>
  Json* Add(Value&& value) {
    if (++num_values_ > limits_.max_values) {
      Fail(fmt::format("too many values (limit {}, got more)", limits_.max_values));
      return nullptr;
    }
    if (open_.empty()) {
      root_ = std::forward<Value>(value);
      return &root_;
    }
    if (open_.back()->is_array()) {
      open_.back()->emplace_back(std::forward<Value>(value));
      return &open_.back()->back();
    }
    *pending_ = std::forward<Value>(value);
    return pending_;
  }

  bool Open(Json container) {
    if (static_cast<int64_t>(open_.size()) >= limits_.max_depth) {
      return Fail(fmt::format("nested too deeply (limit {}, got more)", limits_.max_depth));
    }
    Json* const added = Add(std::move(container));
    if (added == nullptr) return false;
    open_.push_back(added);
    return true;
  }

  bool Close() {
    open_.pop_back();
    return true;
  }

  const JsonLimits& limits_;
  Json root_;
  // Open containers. Only the last one grows, so the pointers to the others stay valid.
  std::vector<Json*> open_;
  Json* pending_ = nullptr;  // value of the key that was read last
  int64_t num_values_ = 0;
  std::string error_;
};

}  // namespace

absl::StatusOr<Json> ParseJson(std::string_view text, std::string_view file,
                               const JsonLimits& limits) {
  if (static_cast<int64_t>(text.size()) > limits.max_bytes) {
    return DataLossError("{}: JSON: too large (limit {} bytes, got {})", file, limits.max_bytes,
                         text.size());
  }
  // The library takes a NUL byte for the end of the text and would ignore what follows.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    return DataLossError("{}: JSON: NUL at byte {}", file, nul);
  }
  TreeBuilder builder(limits);
  if (!Json::sax_parse(text.begin(), text.end(), &builder)) {
    return DataLossError("{}: JSON: {}", file, builder.error());
  }
  return std::move(builder.root());
}

absl::StatusOr<Json> ReadJsonFile(const std::string& path, const JsonLimits& limits) {
  FQ_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, limits.max_bytes));
  FQ_ASSIGN_OR_RETURN(Json value, ParseJson(text, path, limits));
  if (!value.is_object()) {
    return DataLossError("{}: JSON: must be an object (got {})", path, value.type_name());
  }
  return value;
}

std::string DumpJson(const Json& value, int indent) {
  return value.dump(indent, ' ', false, Json::error_handler_t::replace);
}

absl::StatusOr<JsonObject> JsonObject::Create(const Json& value, std::string where) {
  if (!value.is_object()) {
    return DataLossError("{}: must be an object (got {})", where, value.type_name());
  }
  return JsonObject(&value, std::move(where));
}

const Json* JsonObject::Find(std::string_view key) const {
  const auto found = object_->find(key);
  return found == object_->end() || found->is_null() ? nullptr : &*found;
}

absl::Status JsonObject::Error(std::string_view key, std::string_view what) const {
  return DataLossError("{}: {}: {}", where_, PrintableName(key), what);
}

absl::StatusOr<const Json*> JsonObject::Require(std::string_view key) const {
  const Json* const value = Find(key);
  if (value == nullptr) return Error(key, "missing");
  return value;
}

absl::StatusOr<int64_t> JsonObject::GetInt(std::string_view key, int64_t min, int64_t max) const {
  FQ_ASSIGN_OR_RETURN(const Json* const value, Require(key));
  if (!value->is_number_integer()) {
    return Error(key, fmt::format("must be an integer (got {})", value->type_name()));
  }
  // An unsigned value above the signed range would wrap in get<int64_t>.
  const bool above =
      value->is_number_unsigned() &&
      value->get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  if (above || value->get<int64_t>() < min || value->get<int64_t>() > max) {
    return Error(key, fmt::format("out of range (limit {}..{}, got {})", min, max, value->dump()));
  }
  return value->get<int64_t>();
}

absl::StatusOr<double> JsonObject::GetDouble(std::string_view key, double min, double max) const {
  FQ_ASSIGN_OR_RETURN(const Json* const value, Require(key));
  if (!value->is_number()) {
    return Error(key, fmt::format("must be a number (got {})", value->type_name()));
  }
  const auto number = value->get<double>();
  if (!(number >= min && number <= max)) {
    return Error(key, fmt::format("out of range (limit {}..{}, got {})", min, max, number));
  }
  return number;
}

absl::StatusOr<bool> JsonObject::GetBool(std::string_view key) const {
  FQ_ASSIGN_OR_RETURN(const Json* const value, Require(key));
  if (!value->is_boolean()) {
    return Error(key, fmt::format("must be true or false (got {})", value->type_name()));
  }
  return value->get<bool>();
}

absl::StatusOr<std::string> JsonObject::GetString(std::string_view key, int64_t max_bytes) const {
  FQ_ASSIGN_OR_RETURN(const Json* const value, Require(key));
  if (!value->is_string()) {
    return Error(key, fmt::format("must be a string (got {})", value->type_name()));
  }
  const auto& text = value->get_ref<const std::string&>();
  if (static_cast<int64_t>(text.size()) > max_bytes) {
    return Error(key, fmt::format("too long (limit {} bytes, got {})", max_bytes, text.size()));
  }
  return text;
}

absl::StatusOr<JsonObject> JsonObject::GetObject(std::string_view key) const {
  FQ_ASSIGN_OR_RETURN(const Json* const value, Require(key));
  return Create(*value, fmt::format("{}: {}", where_, key));
}

absl::StatusOr<const Json*> JsonObject::GetArray(std::string_view key, int64_t max_size) const {
  FQ_ASSIGN_OR_RETURN(const Json* const value, Require(key));
  if (!value->is_array()) {
    return Error(key, fmt::format("must be an array (got {})", value->type_name()));
  }
  if (static_cast<int64_t>(value->size()) > max_size) {
    return Error(key, fmt::format("too many values (limit {}, got {})", max_size, value->size()));
  }
  return value;
}

absl::StatusOr<int64_t> JsonObject::GetIntOr(std::string_view key, int64_t fallback, int64_t min,
                                             int64_t max) const {
  if (!Has(key)) return fallback;
  return GetInt(key, min, max);
}

absl::StatusOr<double> JsonObject::GetDoubleOr(std::string_view key, double fallback, double min,
                                               double max) const {
  if (!Has(key)) return fallback;
  return GetDouble(key, min, max);
}

absl::StatusOr<bool> JsonObject::GetBoolOr(std::string_view key, bool fallback) const {
  if (!Has(key)) return fallback;
  return GetBool(key);
}

absl::StatusOr<std::string> JsonObject::GetStringOr(std::string_view key, std::string_view fallback,
                                                    int64_t max_bytes) const {
  if (!Has(key)) return std::string(fallback);
  return GetString(key, max_bytes);
}

}  // namespace flashquant
