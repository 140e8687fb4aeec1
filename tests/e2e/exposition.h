// A strict reader of the Prometheus text format (0.0.4), written apart from the library that makes
// it: what it refuses, a scraper may refuse. Counters must end in _total, NaN is an error.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace flashquant {

class Exposition final {
 public:
  using Labels = std::map<std::string, std::string>;

  // INVALID_ARGUMENT with the line for anything that the format or the naming rules forbid:
  // families that are not contiguous or have no type, repeated series, histograms whose buckets do
  // not add up.
  static absl::StatusOr<Exposition> Parse(std::string_view text);

  // Sum over all series of `name` that have these labels; 0 when there is none.
  double Sum(const std::string& name, const Labels& labels = {}) const;
  bool Has(const std::string& name) const;

 private:
  friend class ExpositionParser;
  std::map<std::string, std::map<Labels, double>> samples_;
};

// Body of GET `path` from 127.0.0.1:`port` by HTTP/1.0; empty when there is no answer or another
// status than 200.
std::string HttpGet(int port, const std::string& path);

}  // namespace flashquant
