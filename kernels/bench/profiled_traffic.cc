// See profiled_traffic.h.
#include "kernels/bench/profiled_traffic.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <memory>

#include "fmt/format.h"

namespace flashquant::bench {
namespace {

constexpr std::string_view kRead = "dram__bytes_read.sum";
constexpr std::string_view kWritten = "dram__bytes_write.sum";

// The last field of the line that names the metric: "9,491,456".
std::optional<int64_t> MetricValue(std::string_view csv, std::string_view metric) {
  const size_t name = csv.find(fmt::format("\"{}\"", metric));
  if (name == std::string_view::npos) return std::nullopt;
  std::string_view line = csv.substr(name);
  line = line.substr(0, line.find('\n'));
  while (!line.empty() && line.back() == '\r') line.remove_suffix(1);
  if (line.empty() || line.back() != '"') return std::nullopt;
  line.remove_suffix(1);
  const size_t quote = line.rfind('"');
  if (quote == std::string_view::npos) return std::nullopt;
  std::string digits(line.substr(quote + 1));
  std::erase(digits, ',');
  int64_t value = 0;
  const char* const end = digits.data() + digits.size();
  const auto [rest, error] = std::from_chars(digits.data(), end, value);
  if (error != std::errc() || rest != end || value < 0) return std::nullopt;
  return value;
}

// For the shell.
std::string Quoted(const std::string& text) {
  std::string out = "'";
  for (const char c : text) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

}  // namespace

std::optional<int64_t> ParseProfiledTraffic(std::string_view csv) {
  const std::optional<int64_t> read = MetricValue(csv, kRead);
  const std::optional<int64_t> written = MetricValue(csv, kWritten);
  if (!read.has_value() || !written.has_value()) return std::nullopt;
  return *read + *written;
}

std::optional<int64_t> ProfiledTraffic(const std::string& program, const KernelShape& shape, int m,
                                       double density) {
  // The first launches set things up; ncu empties the cache before the one that it counts and ends
  // the program behind it.
  const std::string command = fmt::format(
      "ncu --csv --print-units base --metrics {},{} -k regex:LinearW4A16Kernel -s 2 -c 1 "
      "--kill yes {} bench kernel --no-baselines --shapes {}x{} --m {} --density {} 2>/dev/null",
      kRead, kWritten, Quoted(program), shape.k, shape.n, m, density);
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  if (pipe == nullptr) return std::nullopt;
  std::string csv;
  std::array<char, 4096> buffer;
  while (const size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe.get())) {
    csv.append(buffer.data(), count);
  }
  return ParseProfiledTraffic(csv);
}

}  // namespace flashquant::bench
