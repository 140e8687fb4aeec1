// safetensors header parser (target F6): the input is a whole file.
//
// Property: no over-read; in an accepted file every tensor lies inside the data, none over another,
// and together they fill it.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <span>
#include <string_view>

#include "engine/checkpoint/safetensors.h"

namespace flashquant {
namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "property broken: %s\n", what);
  std::abort();
}

void RunOne(std::span<const uint8_t> file) {
  const auto file_bytes = static_cast<int64_t>(file.size());
  const auto length = ParseSafetensorsHeaderLength(
      "input", file.first(std::min<size_t>(8, file.size())), file_bytes);
  if (!length.ok()) return;
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + 8,
                              static_cast<size_t>(*length));
  const auto header = ParseSafetensorsHeader("input", text, file_bytes);
  if (!header.ok()) return;
  int64_t end = 8 + *length;
  for (const SafetensorsTensor& tensor : header->tensors) {
    int64_t num_bytes = DTypeBytes(tensor.info.dtype);
    for (const int64_t dim : tensor.info.shape) num_bytes *= dim;
    Require(num_bytes == tensor.info.num_bytes, "size does not fit the shape");
    Require(tensor.file_offset == end, "tensors do not follow each other");
    end += tensor.info.num_bytes;
  }
  Require(end == file_bytes, "tensors do not fill the file");
}

}  // namespace
}  // namespace flashquant

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  flashquant::RunOne({data, size});
  return 0;
}
