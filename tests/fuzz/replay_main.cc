// Replays a folder of corpus files through a fuzz harness, so that the normal suite runs every past
// finding with g++ too: REPLAY DIR. Each file is one input; the harness crashes or the program
// exits 0.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: %s CORPUS_DIR\n", argv[0]);
    return 64;
  }
  int num_files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
    LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(bytes.data()), bytes.size());
    ++num_files;
  }
  std::printf("%d corpus files replayed\n", num_files);
  return num_files > 0 ? 0 : 1;
}
