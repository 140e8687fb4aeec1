// The parser in one pass over the lines, then the sums of the histograms.
#include "tests/e2e/exposition.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <set>

#include "kernels/base/status_macros.h"

namespace flashquant {
namespace {

bool IsName(std::string_view name) {
  if (name.empty() || (name[0] >= '0' && name[0] <= '9')) return false;
  for (const char c : name) {
    const bool allowed =
        (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
    if (!allowed) return false;
  }
  return true;
}

bool ParseValue(const std::string& text, double* value) {
  if (text == "+Inf") {
    *value = std::numeric_limits<double>::infinity();
    return true;
  }
  char* end = nullptr;
  *value = std::strtod(text.c_str(), &end);
  return !text.empty() && *end == '\0' && std::isfinite(*value);
}

}  // namespace

class ExpositionParser {
 public:
  absl::Status Line(std::string_view line) {
    if (line.starts_with("# HELP ")) return Comment(line.substr(7), /*is_type=*/false);
    if (line.starts_with("# TYPE ")) return Comment(line.substr(7), /*is_type=*/true);
    if (line.empty() || line[0] == '#') return InvalidArgumentError("not a sample: '{}'", line);
    return Sample(line);
  }

  absl::StatusOr<Exposition> Finish() {
    for (const auto& [family, type] : types_) {
      if (type == "histogram") FQ_RETURN_IF_ERROR(CheckHistogram(family));
    }
    return std::move(result_);
  }

 private:
  absl::Status Comment(std::string_view rest, bool is_type) {
    const size_t space = rest.find(' ');
    if (space == std::string_view::npos) return InvalidArgumentError("no text after '{}'", rest);
    const std::string name(rest.substr(0, space));
    const std::string text(rest.substr(space + 1));
    if (!IsName(name) || text.empty()) return InvalidArgumentError("bad comment '{}'", rest);
    if (!is_type) {
      if (!helped_.insert(name).second) return InvalidArgumentError("{}: two HELP lines", name);
      return absl::OkStatus();
    }
    if (text != "counter" && text != "gauge" && text != "histogram" && text != "summary") {
      return InvalidArgumentError("{}: type {}", name, text);
    }
    if (!types_.emplace(name, text).second) return InvalidArgumentError("{}: two families", name);
    if (!helped_.contains(name)) return InvalidArgumentError("{}: no HELP", name);
    if ((text == "counter") != name.ends_with("_total")) {
      return InvalidArgumentError("{}: _total belongs to counters", name);
    }
    family_ = name;
    return absl::OkStatus();
  }

  absl::Status Sample(std::string_view line) {
    const size_t name_end = line.find_first_of("{ ");
    if (name_end == std::string_view::npos) return InvalidArgumentError("no value: '{}'", line);
    const std::string name(line.substr(0, name_end));
    Exposition::Labels labels;
    size_t pos = name_end;
    if (line[pos] == '{') FQ_RETURN_IF_ERROR(ParseLabels(line, &pos, &labels));
    if (pos >= line.size() || line[pos] != ' ') return InvalidArgumentError("no value: '{}'", line);
    double value = 0;
    const std::string type = types_[family_];
    // The quantiles of a summary without observations are the one place for NaN.
    const bool may_be_nan = type == "summary" && name == family_;
    const std::string value_text(line.substr(pos + 1));
    if (!ParseValue(value_text, &value) && !(may_be_nan && value_text == "Nan")) {
      return InvalidArgumentError("bad value: '{}'", line);
    }
    const bool belongs = (name == family_ && type != "histogram") ||
                         (type == "histogram" && name == family_ + "_bucket") ||
                         ((type == "histogram" || type == "summary") &&
                          (name == family_ + "_sum" || name == family_ + "_count"));
    if (!belongs) return InvalidArgumentError("{}: outside its family", name);
    if (name != family_ + "_bucket" && labels.contains("le")) {
      return InvalidArgumentError("{}: label le", name);
    }
    if (!result_.samples_[name].emplace(labels, value).second) {
      return InvalidArgumentError("series twice: '{}'", line);
    }
    return absl::OkStatus();
  }

  // `*pos` at '{'; after it, behind '}'.
  absl::Status ParseLabels(std::string_view line, size_t* pos, Exposition::Labels* labels) {
    ++*pos;
    while (*pos < line.size() && line[*pos] != '}') {
      const size_t equals = line.find("=\"", *pos);
      if (equals == std::string_view::npos) return InvalidArgumentError("bad label: '{}'", line);
      const std::string name(line.substr(*pos, equals - *pos));
      std::string value;
      size_t i = equals + 2;
      for (; i < line.size() && line[i] != '"'; ++i) {
        if (line[i] == '\\') {
          ++i;
          if (i >= line.size() || (line[i] != '\\' && line[i] != '"' && line[i] != 'n')) {
            return InvalidArgumentError("bad escape: '{}'", line);
          }
          value += line[i] == 'n' ? '\n' : line[i];
        } else {
          value += line[i];
        }
      }
      if (i >= line.size()) return InvalidArgumentError("label without end: '{}'", line);
      if (!IsName(name) || !labels->emplace(name, value).second) {
        return InvalidArgumentError("bad label '{}': '{}'", name, line);
      }
      *pos = i + 1;
      if (*pos < line.size() && line[*pos] == ',') ++*pos;
    }
    if (*pos >= line.size()) return InvalidArgumentError("labels without end: '{}'", line);
    ++*pos;
    return absl::OkStatus();
  }

  absl::Status CheckHistogram(const std::string& family) {
    // By the labels without le: the buckets in order of their bound.
    std::map<Exposition::Labels, std::map<double, double>> buckets;
    for (const auto& [labels, value] : result_.samples_[family + "_bucket"]) {
      Exposition::Labels rest = labels;
      double bound = 0;
      if (!ParseValue(rest["le"], &bound)) return InvalidArgumentError("{}: bad le", family);
      rest.erase("le");
      buckets[rest][bound] = value;
    }
    for (const auto& [labels, by_bound] : buckets) {
      double last = 0;
      for (const auto& [bound, value] : by_bound) {
        if (value < last) return InvalidArgumentError("{}: buckets fall", family);
        last = value;
      }
      const auto& counts = result_.samples_[family + "_count"];
      const auto count = counts.find(labels);
      if (!std::isinf(by_bound.rbegin()->first) || count == counts.end() || count->second != last ||
          !result_.samples_[family + "_sum"].contains(labels)) {
        return InvalidArgumentError("{}: buckets, count and sum disagree", family);
      }
    }
    return absl::OkStatus();
  }

  Exposition result_;
  std::map<std::string, std::string> types_;
  std::set<std::string> helped_;
  std::string family_;
};

absl::StatusOr<Exposition> Exposition::Parse(std::string_view text) {
  ExpositionParser parser;
  if (text.empty() || text.back() != '\n') return InvalidArgumentError("no line end at the end");
  while (!text.empty()) {
    const size_t end = text.find('\n');
    FQ_RETURN_IF_ERROR(parser.Line(text.substr(0, end)));
    text.remove_prefix(end + 1);
  }
  return parser.Finish();
}

double Exposition::Sum(const std::string& name, const Labels& labels) const {
  const auto family = samples_.find(name);
  if (family == samples_.end()) return 0;
  double sum = 0;
  for (const auto& [found, value] : family->second) {
    bool matches = true;
    for (const auto& [key, wanted] : labels) {
      const auto label = found.find(key);
      matches = matches && label != found.end() && label->second == wanted;
    }
    if (matches) sum += value;
  }
  return sum;
}

bool Exposition::Has(const std::string& name) const { return samples_.contains(name); }

std::string HttpGet(int port, const std::string& path) {
  const int fd = socket(AF_INET, SOCK_STREAM, 0);
  if (fd < 0) return "";
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  std::string response;
  if (connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0) {
    const std::string request = "GET " + path + " HTTP/1.0\r\n\r\n";
    if (send(fd, request.data(), request.size(), MSG_NOSIGNAL) ==
        static_cast<ssize_t>(request.size())) {
      char buffer[4096];
      for (ssize_t n = 0; (n = recv(fd, buffer, sizeof(buffer), 0)) > 0;) {
        response.append(buffer, static_cast<size_t>(n));
      }
    }
  }
  close(fd);
  const size_t body = response.find("\r\n\r\n");
  if (body == std::string::npos || response.find(" 200 ") > response.find("\r\n")) return "";
  return response.substr(body + 4);
}

}  // namespace flashquant
