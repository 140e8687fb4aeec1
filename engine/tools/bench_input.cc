// See bench_input.h.
#include "engine/tools/bench_input.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <system_error>

#include "engine/checkpoint/file_reader.h"
#include "kernels/base/status_macros.h"

namespace flashquant {

using bench::KernelShape;

namespace {

constexpr int kMaxFeatures = 1 << 18;
constexpr int64_t kMaxWeights = int64_t{1} << 33;
constexpr size_t kMaxShapes = 1000;

// "4096x14336"; nothing when it is not of this form.
std::optional<KernelShape> ParseShape(const std::string& text) {
  KernelShape shape;
  const char* const end = text.data() + text.size();
  const auto [x, k_error] = std::from_chars(text.data(), end, shape.k);
  if (k_error != std::errc() || x == end || *x != 'x') return std::nullopt;
  const auto [rest, n_error] = std::from_chars(x + 1, end, shape.n);
  if (n_error != std::errc() || rest != end) return std::nullopt;
  return shape;
}

absl::Status CheckShape(const KernelShape& shape) {
  const auto good = [](int features) {
    return features >= 8 && features <= kMaxFeatures && features % 8 == 0;
  };
  if (!good(shape.k) || !good(shape.n) || int64_t{shape.k} * shape.n > kMaxWeights) {
    return InvalidArgumentError(
        "shape {}x{}; K and N are multiples of 8 up to {} with a product up to {}", shape.k,
        shape.n, kMaxFeatures, kMaxWeights);
  }
  return absl::OkStatus();
}

// A list "KxN,KxN", or nothing when any item is none.
std::vector<KernelShape> ShapesFromList(const std::string& text) {
  std::vector<KernelShape> shapes;
  std::istringstream items(text);
  for (std::string item; std::getline(items, item, ',');) {
    const std::optional<KernelShape> shape = ParseShape(item);
    if (!shape.has_value()) return {};
    shapes.push_back(*shape);
  }
  return shapes;
}

// One KxN a line; empty lines and what follows # are ignored.
absl::StatusOr<std::vector<KernelShape>> ShapesFromFile(const std::string& path) {
  std::ifstream file(path);
  if (!file) {
    return NotFoundError("--shapes {}: neither KxN,KxN,... nor a file that can be read", path);
  }
  std::vector<KernelShape> shapes;
  int number = 0;
  for (std::string line; std::getline(file, line) && shapes.size() <= kMaxShapes;) {
    ++number;
    line = line.substr(0, line.find('#'));
    std::erase_if(line, [](char c) { return c == ' ' || c == '\t' || c == '\r'; });
    if (line.empty()) continue;
    const std::optional<KernelShape> shape = ParseShape(line);
    if (!shape.has_value()) {
      return InvalidArgumentError("{} line {}: not of the form KxN", path, number);
    }
    shapes.push_back(*shape);
  }
  if (shapes.empty()) return InvalidArgumentError("{}: no shapes", path);
  return shapes;
}

}  // namespace

absl::StatusOr<std::vector<KernelShape>> ParseKernelShapes(const std::string& text) {
  if (text.empty()) return std::vector<KernelShape>();
  std::vector<KernelShape> shapes = ShapesFromList(text);
  if (shapes.empty()) {
    FQ_ASSIGN_OR_RETURN(shapes, ShapesFromFile(text));
  }
  if (shapes.size() > kMaxShapes) {
    return InvalidArgumentError("{} shapes; at most {}", shapes.size(), kMaxShapes);
  }
  for (const KernelShape& shape : shapes) FQ_RETURN_IF_ERROR(CheckShape(shape));
  return shapes;
}

absl::Status WriteText(const std::string& path, std::string_view text) {
  std::FILE* const file = std::fopen(path.c_str(), "wb");
  if (file == nullptr) return ErrnoStatus(errno, path, "create");
  const bool written = std::fwrite(text.data(), 1, text.size(), file) == text.size();
  const int error_number = errno;
  const bool closed = std::fclose(file) == 0;
  if (!written || !closed) return ErrnoStatus(written ? errno : error_number, path, "write");
  return absl::OkStatus();
}

absl::Status CheckWritable(const std::string& path) {
  if (path.empty()) return absl::OkStatus();
  std::error_code ignored;
  const bool existed = std::filesystem::exists(path, ignored);
  std::FILE* const file = std::fopen(path.c_str(), "ab");
  if (file == nullptr) return ErrnoStatus(errno, path, "create");
  std::fclose(file);
  if (!existed) std::filesystem::remove(path, ignored);
  return absl::OkStatus();
}

}  // namespace flashquant
