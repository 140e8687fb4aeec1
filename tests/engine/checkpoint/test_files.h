// Files for the tests of this folder: a temporary folder, writing bytes, safetensors files made by
// hand (not by the writer under test), and running as a user without privileges.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <string_view>

#include "absl/status/status.h"
#include "gtest/gtest.h"

namespace flashquant {

// A folder that is removed with its content at the end of the test.
class TempDir {
 public:
  TempDir() {
    std::string pattern = testing::TempDir() + "/fq_checkpoint_XXXXXX";
    const char* const made = ::mkdtemp(pattern.data());
    EXPECT_NE(made, nullptr);
    path_ = pattern;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string File(std::string_view name) const { return path_ + "/" + std::string(name); }
  std::string Write(std::string_view name, std::string_view bytes) const {
    std::filesystem::create_directories(std::filesystem::path(File(name)).parent_path());
    // Rewriting a file in place makes some file systems flush it at once: milliseconds per write.
    std::filesystem::remove(File(name));
    std::ofstream(File(name), std::ios::binary)
        .write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    return File(name);
  }

 private:
  std::string path_;
};

inline std::string ReadAll(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return std::string(std::istreambuf_iterator<char>(file), {});
}

inline std::string LittleEndian(uint64_t value, size_t num_bytes) {
  std::string bytes;
  for (size_t i = 0; i < num_bytes; ++i) bytes += static_cast<char>(value >> (8 * i) & 0xff);
  return bytes;
}

// Length, header text, data.
inline std::string SafetensorsBytes(std::string_view header, std::string_view data) {
  return LittleEndian(header.size(), 8) + std::string(header) + std::string(data);
}

// The code of `call`'s status, run in a child process as a user without privileges ("nobody") when
// this one is root, who may read and write everything.
inline absl::StatusCode CodeAsNobody(const std::function<absl::Status()>& call) {
  const pid_t child = ::fork();
  if (child == 0) {
    constexpr uid_t kNobody = 65534;
    if (::geteuid() == 0 && ::setuid(kNobody) != 0) ::_exit(255);
    ::_exit(static_cast<int>(call().code()));
  }
  int status = 0;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  return static_cast<absl::StatusCode>(WEXITSTATUS(status));
}

}  // namespace flashquant
