// GGUF importer (target F16): the input is a whole file, given as an anonymous file in memory.
//
// Property: no over-read; in an accepted file every tensor lies inside it and is of a known type;
// an accepted model's tensors can be read (or are refused by value), its tokenizer made or refused.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "engine/checkpoint/gguf_blocks.h"
#include "engine/checkpoint/gguf_reader.h"
#include "engine/checkpoint/gguf_tokenizer.h"

namespace flashquant {
namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "property broken: %s\n", what);
  std::abort();
}

void RunOne(const std::string& path, int64_t file_bytes) {
  const auto gguf = GgufFile::Open(path);
  if (!gguf.ok()) return;
  for (const GgufTensor& tensor : (*gguf)->tensors()) {
    Require(GgufBlockOf(tensor.type).has_value(), "unknown tensor type");
    Require(tensor.file_offset >= 0 && tensor.num_bytes > 0 &&
                tensor.num_bytes <= file_bytes - tensor.file_offset,
            "tensor outside the file");
  }
  (void)TokenizerFromGguf(**gguf);
  const auto checkpoint = OpenGguf(path);
  if (!checkpoint.ok()) return;
  for (const TensorInfo& tensor : checkpoint->tensors->tensors()) {
    (void)checkpoint->tensors->ReadBytes(tensor.name);
  }
}

}  // namespace
}  // namespace flashquant

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const int fd = ::memfd_create("input", MFD_CLOEXEC);
  if (fd < 0) std::abort();
  for (size_t done = 0; done < size;) {
    const ssize_t written = ::write(fd, data + done, size - done);
    if (written <= 0) std::abort();
    done += static_cast<size_t>(written);
  }
  flashquant::RunOne("/proc/self/fd/" + std::to_string(fd), static_cast<int64_t>(size));
  ::close(fd);
  return 0;
}
