// JSON from files: nlohmann-json behind functions that return a Status and never throw.
//
// Limits on size, depth and number of values hold while parsing, duplicate keys and numbers that no
// double holds are refused, strings are checked to be UTF-8. Nothing here knows what a key means.
//
// Deviation: the tree is built by a handler of our own, because the library keeps the last of two
// equal keys silently and its callback parser takes quadratic time on an object of objects.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace flashquant {

struct JsonLimits {
  int64_t max_bytes = int64_t{64} << 20;
  int32_t max_depth = 64;          // nested arrays and objects
  int64_t max_values = 8'000'000;  // in the whole tree, keys not counted
  int64_t max_root_members = std::numeric_limits<int64_t>::max();
  std::string_view root_members_name = "keys";  // what they are called in the message
};

// `file` names the source in messages: "‹file›: JSON: ‹what› (limit ‹x›, got ‹y›)", always
// DATA_LOSS.
absl::StatusOr<nlohmann::json> ParseJson(std::string_view text, std::string_view file,
                                         const JsonLimits& limits = {});

// The file, which must hold an object at the top. Status of ReadFile or ParseJson.
absl::StatusOr<nlohmann::json> ReadJsonFile(const std::string& path, const JsonLimits& limits = {});

// `value` as text; invalid UTF-8 becomes U+FFFD. indent -1: one line.
std::string DumpJson(const nlohmann::json& value, int indent = 2);

// A JSON object with the name of its place, for typed reading of hostile data. Every error is
// DATA_LOSS "‹where›: ‹key›: ‹what› (limit ‹x›, got ‹y›)". Refers to the tree, which must outlive
// it.
class JsonObject final {
 public:
  // DATA_LOSS when `value` is not an object. `where`: "config.json", "config.json: rope_scaling".
  static absl::StatusOr<JsonObject> Create(const nlohmann::json& value, std::string where);

  // The key is there and not null. (Hugging Face writes null for "not set".)
  bool Has(std::string_view key) const { return Find(key) != nullptr; }
  // The value, nullptr when Has is false.
  const nlohmann::json* Find(std::string_view key) const;

  absl::StatusOr<int64_t> GetInt(std::string_view key, int64_t min, int64_t max) const;
  // Finite, within [min, max]; an integer will do.
  absl::StatusOr<double> GetDouble(std::string_view key, double min, double max) const;
  absl::StatusOr<bool> GetBool(std::string_view key) const;
  absl::StatusOr<std::string> GetString(std::string_view key, int64_t max_bytes = 4096) const;
  absl::StatusOr<JsonObject> GetObject(std::string_view key) const;
  // An array of at most `max_size` values of any type.
  absl::StatusOr<const nlohmann::json*> GetArray(std::string_view key, int64_t max_size) const;

  // The same with a value for a key that Has denies. The default is not checked.
  absl::StatusOr<int64_t> GetIntOr(std::string_view key, int64_t fallback, int64_t min,
                                   int64_t max) const;
  absl::StatusOr<double> GetDoubleOr(std::string_view key, double fallback, double min,
                                     double max) const;
  absl::StatusOr<bool> GetBoolOr(std::string_view key, bool fallback) const;
  absl::StatusOr<std::string> GetStringOr(std::string_view key, std::string_view fallback,
                                          int64_t max_bytes = 4096) const;

  const nlohmann::json& json() const { return *object_; }
  const std::string& where() const { return where_; }
  // "‹where›: ‹key›: " and the formatted rest, for a caller's own checks: Error("eos", "unknown").
  absl::Status Error(std::string_view key, std::string_view what) const;

 private:
  JsonObject(const nlohmann::json* object, std::string where)
      : object_(object), where_(std::move(where)) {}
  absl::StatusOr<const nlohmann::json*> Require(std::string_view key) const;

  const nlohmann::json* object_;
  std::string where_;
};

}  // namespace flashquant
